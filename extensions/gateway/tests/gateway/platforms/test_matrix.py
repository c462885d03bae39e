import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from gateway.conftest import a_gateway, started, until
from gateway.synapse import Account, needed, synapse
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import Attachment, ChatAddress, Incoming, Platform
from palaestra_gateway.platform_conformance import PNG, PlatformConformance
from palaestra_gateway.platforms.matrix import ENCRYPTED, Matrix
from palaestra_gateway.platforms.matrix_server import SYNCED
from palaestra_slots.core.errors import ConfigError, PlatformRefused, PlatformUnavailable
from palaestra_slots.core.io.http_server import listening

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def homeserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    needed()
    with synapse(tmp_path_factory.mktemp("synapse")) as url:
        yield url


def config(url: str, token: str, **more: Any) -> PlatformConfig:
    return PlatformConfig(token=token, extra={"homeserver": url}, **more)


async def people(url: str) -> tuple[Account, Account]:
    number = next(NUMBERS)
    return await asyncio.to_thread(Account, url, f"anna{number}"), await asyncio.to_thread(Account, url, f"bot{number}")


class TestMatrix(PlatformConformance):
    @pytest.fixture(autouse=True)
    def _homeserver(self, homeserver: str) -> None:
        self.url = homeserver

    @asynccontextmanager
    async def server(self) -> AsyncIterator[None]:
        self.anna, self.bot = await people(self.url)
        self.room = ""
        yield

    async def make_platform(self) -> Platform:
        self.platform = Matrix("matrix", config(self.url, self.bot.token))
        return self.platform

    async def make_refused(self) -> Platform:
        return Matrix("matrix", config(self.url, "wrong"))

    async def _in_room(self) -> str:
        if not self.room:
            self.room = await asyncio.to_thread(self.anna.make_room, self.bot.user_id)
            await asyncio.to_thread(self.anna.wait_for_member, self.room, self.bot.user_id)
        return self.room

    async def person_sends(self, text: str) -> None:
        await asyncio.to_thread(self.anna.say, await self._in_room(), text)

    async def person_sends_all(self, texts: Sequence[str]) -> None:
        room = await self._in_room()
        await asyncio.to_thread(lambda: [self.anna.say(room, text) for text in texts])

    async def person_sends_file(self, file: Attachment, text: str) -> None:
        uri = await asyncio.to_thread(self.anna.upload, file.name, file.data)
        info = {"mimetype": file.media_type, "size": len(file.data)}
        content = {"msgtype": "m.image", "body": text, "filename": file.name, "url": uri, "info": info}
        await asyncio.to_thread(self.anna.send, await self._in_room(), content)

    async def _seen(self) -> list[Any]:
        return await asyncio.to_thread(self.anna.messages, self.room, self.bot.user_id)

    async def person_sees(self) -> list[str]:
        return [each["body"] for each in await self._seen() if each["msgtype"] == "m.text"]

    async def person_sees_files(self) -> list[bytes]:
        found = [each for each in await self._seen() if each["msgtype"] in ("m.image", "m.file")]
        return [await asyncio.to_thread(self.anna.download, each["url"]) for each in found]

    def unknown_chat(self, address: ChatAddress) -> ChatAddress:
        return ChatAddress(address.platform, "!nothing:test")


async def test_an_unreachable_homeserver_is_tried_again():
    platform = Matrix("matrix", config("http://127.0.0.1:9", "token"))
    with pytest.raises(PlatformUnavailable):
        await platform.start(None)


async def test_after_the_token_is_withdrawn_messages_wait():
    known = True

    async def answer(request: web.Request) -> web.Response:
        if not known:
            return web.json_response({"errcode": "M_UNKNOWN_TOKEN", "error": "Unrecognised access token"}, status=401)
        if request.path.endswith("/whoami"):
            return web.json_response({"user_id": "@bot:hs", "device_id": "D"})
        if request.path.endswith("/sync"):
            await asyncio.sleep(30 if "since" in request.query else 0)
            return web.json_response(
                {
                    "next_batch": "s1", "rooms": {"join": {}, "invite": {}, "leave": {}}, "device_lists": {},
                    "device_one_time_keys_count": {}, "to_device": {"events": []}, "presence": {"events": []},
                }
            )  # fmt: skip
        return web.json_response({}, status=404 if request.method == "GET" else 200)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with listening(app, "127.0.0.1", 0, shutdown_s=0.1) as url:
        platform = Matrix("matrix", config(url, "token"))
        async with started(platform):
            known = False
            with pytest.raises(PlatformUnavailable, match="M_UNKNOWN_TOKEN"):
                await platform.send_text(ChatAddress("matrix", "!r:hs"), "later", key="k")


def test_the_homeserver_and_the_token_are_required():
    with pytest.raises(ConfigError, match=r"extra\.homeserver"):
        Matrix("matrix", PlatformConfig(token="t"))


async def taken(contents: Sequence[Any], files: dict[str, bytes] | None = None) -> tuple[list[Incoming], list[str]]:
    """What the platform makes of messages with these contents, and the paths that it requests. The last message must
    have a text."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path.endswith("/whoami"):
            return web.json_response({"user_id": "@bot:hs", "device_id": "D"})
        if "/account_data/" in request.path:
            return web.json_response({}, status=404 if request.method == "GET" else 200)
        if "/media/download/" in request.path and (name := request.path.rpartition("/")[2]) in (files or {}):
            return web.Response(body=(files or {})[name])
        if not request.path.endswith("/sync"):
            return web.json_response({}, status=404)
        if request.query.get("since") == "s2":
            await asyncio.sleep(30)
        events = [
            {"type": "m.room.message", "event_id": f"${n}", "sender": "@m:hs", "origin_server_ts": n, "content": each}
            for n, each in enumerate(contents)
        ]
        first = "since" not in request.query
        timeline = {"events": [] if first else events, "limited": False, "prev_batch": "p"}
        room = {
            "timeline": timeline, "state": {"events": []}, "ephemeral": {"events": []}, "account_data": {"events": []},
        }  # fmt: skip
        return web.json_response(
            {
                "next_batch": "s1" if first else "s2", "rooms": {"join": {"!r:hs": room}, "invite": {}, "leave": {}},
                "device_one_time_keys_count": {}, "device_lists": {"changed": [], "left": []},
                "to_device": {"events": []}, "presence": {"events": []},
            }
        )  # fmt: skip

    arrived: list[Incoming] = []

    async def deliver(message: Incoming) -> None:
        arrived.append(message)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with listening(app, "127.0.0.1", 0, shutdown_s=0.1) as url:
        platform = Matrix("matrix", config(url, "token"))
        await platform.start(deliver)
        await until(lambda: bool(arrived) and arrived[-1].message_id == f"${len(contents) - 1}")
        await platform.stop()
    return arrived, asked


async def test_events_that_anybody_may_send_hold_up_nobody_and_read_nothing_else():
    contents: list[Any] = [
        {"msgtype": "m.text", "body": "odd", "m.relates_to": "odd"},
        {"msgtype": "m.file", "body": "odd", "url": "mxc://hs/1", "info": "odd"},
        {"msgtype": "m.file", "body": "bad", "url": "mxc://hs/../../../../client/v3/sync"},
        {"msgtype": "m.file", "body": "bad", "url": "mxc://["},
        {"msgtype": "m.file", "body": "large", "url": "mxc://hs/large", "info": {"size": 1}},
        {"msgtype": "m.text", "body": "after all of them"},
    ]
    arrived, asked = await taken(contents, {"large": b"x" * (22 << 20)})
    assert [message.text for message in arrived if message.text] == ["after all of them"]
    assert sum(bool(message.problem) for message in arrived) == 3
    assert not any(message.attachments for message in arrived)
    assert {path.rpartition("/")[2] for path in asked} == {"whoami", "palaestra.synced", "sync", "large"}


REPLIES = {
    # spec v1.12, client-server-api/#fallbacks-for-rich-replies
    "a command": ("> <@bot:hs> The build failed\n\n/stop", "/stop", "/stop\n\n> The build failed"),
    "several lines": ("> <@bot:hs> one\n> \n> two\n\nyes\nand no", "yes\nand no", "yes\nand no\n\n> one\n> \n> two"),
    "a reply to an emote": ("> * <@anna:hs> waves\n\nwhy?", "why?", "why?\n\n> waves"),
    # since v1.13, the body is only what the person wrote
    "without a quoted message": ("/stop", "/stop", "/stop"),
    "a quotation by the person": ("> one\n\nis wrong", "> one\n\nis wrong", "> one\n\nis wrong"),
}


@pytest.mark.parametrize("name", REPLIES)
async def test_what_a_reply_quotes_comes_after_what_the_person_says(name):
    body, said, text = REPLIES[name]
    relation = {"m.in_reply_to": {"event_id": "$0"}}
    content = {"msgtype": "m.text", "body": body, "m.relates_to": relation}
    ((message,), _) = await taken([content])
    assert (message.said, message.text) == (said, text)


async def test_an_encrypted_room_is_refused_clearly(homeserver):
    anna, bot = await people(homeserver)
    platform, arrived = Matrix("matrix", config(homeserver, bot.token)), list[Incoming]()

    async def deliver(message):
        arrived.append(message)

    await platform.start(deliver)
    room = await asyncio.to_thread(anna.make_room, bot.user_id, encrypted=True)
    await asyncio.to_thread(anna.wait_for_member, room, bot.user_id)
    secret = {"algorithm": "m.megolm.v1.aes-sha2", "ciphertext": "x", "session_id": "s", "device_id": "d",
              "sender_key": "k"}  # fmt: skip
    await asyncio.to_thread(anna.send, room, secret, "m.room.encrypted")
    await until(lambda: bool(arrived))
    assert arrived[0].problem == ENCRYPTED
    await platform.send_text(arrived[0].address, ENCRYPTED, key="a")
    with pytest.raises(PlatformRefused, match="encrypted"):
        await platform.send_text(arrived[0].address, "a secret", key="b")
    seen = await asyncio.to_thread(anna.messages, room, bot.user_id)
    assert [each["body"] for each in seen] == [ENCRYPTED]
    await platform.stop()


@pytest.mark.slots
async def test_a_conversation_with_a_tool_call_an_image_and_a_long_reply(homeserver, tmp_path):
    anna, bot = await people(homeserver)
    platform = Matrix("matrix", config(homeserver, bot.token))
    settings = {"platforms": {"matrix": {"allowed_users": [anna.user_id]}}}

    async def answers(count: int) -> list[Any]:
        return await asyncio.to_thread(anna.wait_for_messages, room, bot.user_id, count)

    async with a_gateway(tmp_path, settings, others=[platform]):
        room = await asyncio.to_thread(anna.make_room, bot.user_id)
        await asyncio.to_thread(anna.wait_for_member, room, bot.user_id)
        await asyncio.to_thread(anna.say, room, "run echo $((6 * 7))")
        assert "42" in (await answers(1))[-1]["body"]
        uri = await asyncio.to_thread(anna.upload, "dot.png", PNG)
        info = {"mimetype": "image/png", "size": len(PNG)}
        image = {"msgtype": "m.image", "body": "dot.png", "url": uri, "info": info}
        await asyncio.to_thread(anna.send, room, image)
        assert "uploads/dot.png" in (await answers(2))[-1]["body"]
        await asyncio.to_thread(anna.say, room, "say here\nMEDIA:uploads/dot.png")
        files = await answers(4)
        assert files[-1]["msgtype"] == "m.image"
        assert await asyncio.to_thread(anna.download, files[-1]["url"]) == PNG
        await asyncio.to_thread(anna.say, room, "run printf '語%.0s' $(seq 15000)")
        pieces = (await answers(7))[4:]
        assert sum(each["body"].count("語") for each in pieces) == 15_000


async def test_messages_that_come_again_because_the_position_was_not_written_are_answered_once(homeserver, tmp_path):
    """A homeserver gives events in one order, and again to those who ask from an earlier position."""
    anna, bot = await people(homeserver)
    settings = {"platforms": {"matrix": {"allowed_users": ["*"]}}}
    place = f"/user/{bot.user_id}/account_data/{SYNCED}"
    async with a_gateway(tmp_path, settings, others=[Matrix("matrix", config(homeserver, bot.token))]):
        room = await asyncio.to_thread(anna.make_room, bot.user_id)
        await asyncio.to_thread(anna.wait_for_member, room, bot.user_id)
        await asyncio.to_thread(anna.say, room, "one")
        await asyncio.to_thread(anna.wait_for_messages, room, bot.user_id, 1)
        before = await asyncio.to_thread(bot.call, "GET", place)
        for text in ("two", "three"):
            await asyncio.to_thread(anna.say, room, text)
        await asyncio.to_thread(anna.wait_for_messages, room, bot.user_id, 3)
    assert await asyncio.to_thread(bot.call, "GET", place) != before
    await asyncio.to_thread(bot.call, "PUT", place, before)
    async with a_gateway(tmp_path, settings, others=[Matrix("matrix", config(homeserver, bot.token))]):
        await asyncio.to_thread(anna.say, room, "four")
        found = await asyncio.to_thread(anna.wait_for_messages, room, bot.user_id, 4)
        assert [each["body"] for each in found] == ["echo 1: one", "echo 2: two", "echo 3: three", "echo 4: four"]


async def test_a_thread_is_a_session_of_its_own_and_is_answered_there(homeserver, tmp_path):
    anna, bot = await people(homeserver)
    platform = Matrix("matrix", config(homeserver, bot.token))
    async with a_gateway(tmp_path, {"platforms": {"matrix": {"allowed_users": ["*"]}}}, others=[platform]) as scene:
        room = await asyncio.to_thread(anna.make_room, bot.user_id)
        await asyncio.to_thread(anna.wait_for_member, room, bot.user_id)
        root = await asyncio.to_thread(anna.say, room, "one")
        relation = {"rel_type": "m.thread", "event_id": root}
        await asyncio.to_thread(anna.say, room, "two", **{"m.relates_to": relation})
        await until(lambda: len(scene.model.requests) == 2)
        found = await asyncio.to_thread(anna.wait_for_messages, room, bot.user_id, 2)
        by_text = {each["body"]: each for each in found}
        assert set(by_text) == {"echo 1: one", "echo 1: two"}
        assert by_text["echo 1: two"]["m.relates_to"] == relation
