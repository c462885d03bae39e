from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gateway.answered_once import AnsweredOnce
from gateway.conftest import started, until
from gateway.slack_api import APP_TOKEN, TOKEN, SlackAPI
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import Attachment, ChatAddress, Platform
from palaestra_gateway.platforms.slack import Slack
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.http_server import listening


def slack(url: str, token: str = TOKEN) -> Slack:
    return Slack("slack", PlatformConfig(token=token, api_key=APP_TOKEN, extra={"api_url": f"{url}/api"}))


class TestSlack(AnsweredOnce):
    @asynccontextmanager
    async def server(self) -> AsyncIterator[None]:
        self.api = SlackAPI()
        async with self.api.serving():
            yield

    async def make_platform(self) -> Platform:
        return slack(self.api.url)

    async def make_refused(self) -> Platform:
        return slack(self.api.url, "xoxb-wrong")

    async def person_sends(self, text: str) -> None:
        await self.api.write(text=text)

    async def person_sends_disordered(self, texts: Sequence[str]) -> None:
        await self.api.disordered(*texts)

    async def person_sends_file(self, file: Attachment, text: str) -> None:
        self.api.files["F0"] = file.data
        about = {"name": file.name, "mimetype": file.media_type, "size": len(file.data)}
        shared = {**about, "url_private_download": f"{self.api.url}/files/F0"}
        await self.api.write(text=text, subtype="file_share", files=[shared])

    async def person_sees(self) -> list[str]:
        return [each["text"] for each in self.api.sent if "text" in each]

    async def person_sees_files(self) -> list[bytes]:
        return [each["file"] for each in self.api.sent if "file" in each]

    async def break_connection(self) -> None:
        self.api.failing = 503

    async def withdraw_token(self) -> None:
        self.api.token = "another"

    async def limit_rate(self) -> float:
        self.api.failing = 429
        return 4

    def unknown_chat(self, address: ChatAddress) -> ChatAddress:
        return ChatAddress(address.platform, "D9")


async def test_the_bot_answers_in_the_thread_of_a_mention_and_passes_over_what_is_not_for_it():
    api = SlackAPI()
    async with api.serving(), started(slack(api.url)) as arrived:
        await api.write(text="not for the bot", channel="C1", channel_type="channel")
        await api.write(text="of a bot", bot_id="B2")
        await api.write(text="edited", subtype="message_changed")
        await api.write(type="app_mention", text="<@UBOT> a &lt;b&gt;", channel="C1", channel_type="channel", ts="5.5")
        await until(lambda: bool(arrived))
        (message,) = arrived
        assert message.text == "a <b>"
        assert message.address == ChatAddress("slack", "C1", "group", "5.5")


async def test_a_file_from_elsewhere_does_not_get_the_token():
    api, asked = SlackAPI(), list[str | None]()

    async def elsewhere(request):
        asked.append(request.headers.get("Authorization"))
        return web.Response(body=b"data")

    app = web.Application()
    app.router.add_get("/file", elsewhere)
    async with api.serving(), listening(app, "127.0.0.1", 0) as url, started(slack(api.url)) as arrived:
        shared = {"name": "a.txt", "size": 4, "is_external": True, "url_private": f"{url}/file"}
        await api.write(text="look", subtype="file_share", files=[shared])
        await until(lambda: bool(arrived))
        assert not asked
        assert not arrived[0].attachments
        assert "a.txt" in arrived[0].problem


def test_both_tokens_are_required():
    with pytest.raises(ConfigError, match="xapp"):
        Slack("slack", PlatformConfig(token="xoxb-1"))
