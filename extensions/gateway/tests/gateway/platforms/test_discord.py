import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from gateway.answered_once import AnsweredOnce
from gateway.conftest import a_gateway, started, until
from gateway.discord_api import ANNA, BOT, DM, EPOCH_MS, GENERAL, QUIET, DiscordAPI
from gateway.kills import Forked, killed_again_and_again
from golden_messages import check_message
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.mailbox import Mailbox
from palaestra_gateway.platform import Answers, Attachment, ChatAddress, Platform
from palaestra_gateway.platforms.discord import Discord
from palaestra_slots.core.errors import ConfigError, PlatformRefused, PlatformUnavailable

OPEN = {"platforms": {"discord": {"allowed_users": [ANNA]}}}


def discord(api: DiscordAPI, token: str | None = None) -> Discord:
    return Discord("discord", PlatformConfig(token=token or api.token), connector=api.connector)


class TestDiscord(AnsweredOnce):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path) -> None:
        self.path = tmp_path / "gateway.db"

    @asynccontextmanager
    async def server(self) -> AsyncIterator[None]:
        self.api, self.mailbox = DiscordAPI(), Mailbox(self.path)
        try:
            async with self.api.serving():
                yield
        finally:
            await self.mailbox.aclose()

    async def make_platform(self) -> Platform:
        platform = discord(self.api)
        platform.notes = self.mailbox.notes("discord")
        return platform

    async def make_refused(self) -> Platform:
        return discord(self.api, "wrong")

    async def person_sends(self, text: str) -> None:
        await self.api.write(text)

    async def person_sends_disordered(self, texts: Sequence[str]) -> None:
        await self.api.disordered(*texts)

    async def person_sends_file(self, file: Attachment, text: str) -> None:
        await self.api.write(text, attachments=[self.api.put_file(file.name, file.data, file.media_type)])

    async def person_sees(self) -> list[str]:
        return [each["content"] for each in self.api.sent if each["content"]]

    async def person_sees_files(self) -> list[bytes]:
        return [data for each in self.api.sent for data in each["files"]]

    async def break_connection(self) -> None:
        self.api.failing = 503

    async def withdraw_token(self) -> None:
        self.api.token = "another"

    async def limit_rate(self) -> float:
        self.api.failing = 429
        return 65

    def unknown_chat(self, address: ChatAddress) -> ChatAddress:
        return ChatAddress(address.platform, "999")


@asynccontextmanager
async def connected(api: DiscordAPI, path):
    """A platform with a mailbox, and what it delivers."""
    mailbox, platform = Mailbox(path), discord(api)
    platform.notes = mailbox.notes("discord")
    try:
        async with started(platform) as arrived:
            yield platform, arrived
    finally:
        await mailbox.aclose()


async def test_in_a_server_the_bot_takes_what_mentions_it_and_answers_as_a_reply(tmp_path):
    api = DiscordAPI()
    async with api.serving(), connected(api, tmp_path / "db") as (platform, arrived):
        await api.write("not for the bot", GENERAL)
        await api.write(f"<@{BOT}> of a bot", GENERAL, author={"id": "8", "username": "b", "discriminator": "0",
                                                              "avatar": None, "bot": True})  # fmt: skip
        await api.write("joined", GENERAL, type=7)
        number = await api.write(f"<@{BOT}> what is this?", GENERAL)
        await until(lambda: bool(arrived))
        (message,) = arrived
        asked = api._history[GENERAL][-1]
        replies = {
            "type": 19,
            "message_reference": {"message_id": number, "channel_id": GENERAL},
            "referenced_message": asked,
        }
        await api.write(f"<@{BOT}> why?", GENERAL, **replies)
        await until(lambda: len(arrived) == 2)
        assert (arrived[1].said, arrived[1].text) == ("why?", f"why?\n\n> <@{BOT}> what is this?")
        assert (message.text, message.user_name) == ("what is this?", "Anna")
        assert message.address == ChatAddress("discord", GENERAL, "group")
        await platform.send_text(message.address, "an answer", key="k", answers=Answers(message.message_id))
        assert api.sent[0]["message_reference"]["message_id"] == int(number)


async def test_what_is_forwarded_arrives(tmp_path):
    api = DiscordAPI()
    async with api.serving(), connected(api, tmp_path / "db") as (_, arrived):
        file = api.put_file("log.txt", b"line 7", "text/plain")
        for snapshot in ({"content": "The build failed"}, {"content": "", "attachments": [file]}):
            copied = {"type": 0, "timestamp": "2026-01-01T00:00:00+00:00", "edited_timestamp": None, "flags": 0}
            message = {**copied, "attachments": [], "embeds": [], "mentions": [], "mention_roles": [], **snapshot}
            reference = {"type": 1, "message_id": api.new_id(), "channel_id": GENERAL}
            await api.write(message_reference=reference, message_snapshots=[{"message": message}])
        await until(lambda: len(arrived) == 2)
        assert (arrived[0].text, arrived[0].problem) == ("Forwarded message:\nThe build failed", "")
        assert [(each.name, each.data) for each in arrived[1].attachments] == [("log.txt", b"line 7")]


@pytest.mark.slow
async def test_what_was_written_while_the_gateway_was_down_is_answered_once(tmp_path):
    api = DiscordAPI()
    minute_ago = str((int((time.time() - 60) * 1000) - EPOCH_MS) << 22)
    await api.write(f"<@{BOT}> before the first start", GENERAL, id=minute_ago)
    async with api.serving():
        async with a_gateway(tmp_path, OPEN, others=[discord(api)]):
            await api.write("say one")
            await until(lambda: len(api.sent) == 1)
        await api.write("say two")
        await api.write(f"<@{BOT}> say three", QUIET)
        for number in range(150):  # more than a page
            await api.write(f"noise {number}", GENERAL)
        await api.write(f"<@{BOT}> say four", GENERAL)
        for _ in range(2):
            async with a_gateway(tmp_path, OPEN, others=[discord(api)]):
                await until(lambda: len(api.sent) >= 4)
                await api.write("say last")
                await until(lambda: api.sent[-1]["content"] == "last")
                await asyncio.sleep(2.5)  # the history is read two seconds after the connection
        said = [each["content"] for each in api.sent]
        assert sorted(said) == ["four", "last", "last", "one", "three", "two"]


@pytest.mark.parametrize("resumable", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_what_was_written_during_a_lost_connection_arrives_once(tmp_path, resumable):
    api = DiscordAPI()
    async with api.serving():
        async with a_gateway(tmp_path, OPEN, others=[discord(api)]):
            await api.write("say one")
            await until(lambda: len(api.sent) == 1)
            api.resumable = resumable
            await api.disconnect()
            await api.write("say two")
            await until(lambda: len(api.sent) == 2)
            await api.request_reconnect()
            await api.write("say three")
            await until(lambda: len(api.sent) == 3)
        assert [each["content"] for each in api.sent] == ["one", "two", "three"]
        assert (api.identified == 1) is resumable
        assert (api.resumed > 0) is resumable


@pytest.mark.slow
async def test_a_token_that_is_withdrawn_while_it_runs_is_tried_again_and_nothing_is_lost(tmp_path, caplog):
    api = DiscordAPI()
    async with api.serving(), connected(api, tmp_path / "db") as (platform, arrived):
        await api.write("one")
        await until(lambda: len(arrived) == 1)
        given, api.token = api.token, "another"
        await api.disconnect(4004)
        await until(lambda: platform._client is None)
        with pytest.raises(PlatformUnavailable, match="not connected"):
            await platform.send_text(ChatAddress("discord", DM), "x", key="k")
        await api.write("two")
        api.token = given
        await until(lambda: len(arrived) == 2)
        assert [each.text for each in arrived] == ["one", "two"]
        assert "4004" in caplog.text


async def test_a_text_that_is_sent_twice_within_minutes_is_seen_once(tmp_path):
    api = DiscordAPI()
    async with api.serving(), connected(api, tmp_path / "db") as (platform, _):
        for key in ("a" * 30, "a" * 30, "b"):
            await platform.send_text(ChatAddress("discord", DM), f"text {key[0]}", key=key)
        assert [each["content"] for each in api.sent] == ["text a", "text b"]


async def test_a_file_that_cannot_be_read_keeps_no_message_waiting(tmp_path):
    api = DiscordAPI()
    async with api.serving(), connected(api, tmp_path / "db") as (_, arrived):
        gone = api.put_file("a.txt", b"data", "text/plain")
        api.files.clear()
        await api.write("look", attachments=[gone])
        await api.write("look", attachments=[{**gone, "size": 30 << 20}])
        await api.write()
        await api.write("after it")
        await until(lambda: len(arrived) == 4)
        check_message(arrived[0].problem, "a.txt")
        assert "30 MB" in arrived[1].problem
        assert "not supported" in arrived[2].problem
        assert not any(each.attachments for each in arrived)


async def test_a_long_reply_is_split_at_the_limit(tmp_path):
    api = DiscordAPI()
    async with api.serving(), a_gateway(tmp_path, OPEN, others=[discord(api)]):
        await api.write("say " + "😀" * 1900)
        await until(lambda: len(api.sent) == 2)
        assert "".join(each["content"] for each in api.sent) == "😀" * 1900


async def test_settings_that_cannot_work_are_refused(tmp_path):
    api = DiscordAPI()
    with pytest.raises(ConfigError, match=r"platforms\.discord needs token"):
        Discord("discord", PlatformConfig())
    async with api.serving(), connected(api, tmp_path / "db") as (platform, _):
        with pytest.raises(PlatformRefused, match="general"):
            await platform.send_text(ChatAddress("discord", "general"), "x", key="k")


@pytest.mark.slow
async def test_a_gateway_that_is_killed_again_and_again_answers_every_message_once(tmp_path):
    api = DiscordAPI()

    async def play():
        settings = {**OPEN, "max_queued": 1000, "limits": {"messages_per_hour": 0}}
        async with a_gateway(tmp_path, settings, others=[discord(api)]):
            await asyncio.Event().wait()

    async def start():
        before, process = api.identified, Forked(play)
        await until(lambda: api.identified > before)
        return process

    async with api.serving():
        await killed_again_and_again(start, api.write, lambda: [each["content"] for each in api.sent])
