import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.conftest import started
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import Answers, Attachment, ChatAddress, Platform
from palaestra_gateway.platform_conformance import PlatformConformance
from palaestra_gateway.platforms.webhook import Webhook
from palaestra_slots.core.errors import ConfigError, PlatformUnavailable
from palaestra_slots.core.io.http_server import listening


class Program:
    """The program on the other side: takes answers, each key once."""

    def __init__(self) -> None:
        self.got: dict[str, Any] = {}
        self.status = 202
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/answers", self._take)
        async with listening(app, "127.0.0.1", 0, shutdown_s=0.1) as url:
            self.url = f"{url}/answers"
            yield

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["chat_id"] == "unknown":
            return web.Response(status=404, text="no such chat")
        if self.status < 300:
            assert request.headers["Idempotency-Key"] == body["key"]
            assert request.headers["Authorization"] == "Bearer back"
            self.got.setdefault(body["key"], body)
        return web.Response(status=self.status, headers={"Retry-After": "7"})


def config(url: str, **more: Any) -> PlatformConfig:
    return PlatformConfig(token="secret", api_key="back", extra={"reply_url": url, "port": 0}, **more)


class TestWebhook(PlatformConformance):
    sender_waits = True

    @asynccontextmanager
    async def server(self) -> AsyncIterator[None]:
        self.program = Program()
        self.number = 0
        async with self.program.serving(), aiohttp.ClientSession() as self.client:
            yield

    async def make_platform(self) -> Platform:
        self.platform = Webhook("webhook", config(self.program.url))
        return self.platform

    async def _post(self, **body: Any) -> None:
        self.number += 1
        body = {"message_id": f"m{self.number}", "chat_id": "c", "user_id": "anna", **body}
        headers = {"Authorization": "Bearer secret"}
        async with self.client.post(f"{self.platform.url}/messages", json=body, headers=headers) as reply:
            if reply.status == 500:
                raise OSError("not taken")
            assert reply.status == 202

    async def person_sends(self, text: str) -> None:
        await self._post(text=text)

    async def person_sends_disordered(self, texts: Sequence[str]) -> None:
        for text in reversed([*texts, *texts]):
            await self._post(text=text, message_id=text)

    async def person_sends_file(self, file: Attachment, text: str) -> None:
        data = base64.b64encode(file.data).decode()
        await self._post(text=text, attachments=[{"name": file.name, "media_type": file.media_type, "data": data}])

    async def person_sees(self) -> list[str]:
        return [each["text"] for each in self.program.got.values() if each["file"] is None]

    async def person_sees_files(self) -> list[bytes]:
        return [base64.b64decode(each["file"]["data"]) for each in self.program.got.values() if each["file"]]

    async def break_connection(self) -> None:
        self.program.status = 503

    def unknown_chat(self, address: ChatAddress) -> ChatAddress:
        return ChatAddress(address.platform, "unknown")


@pytest.mark.parametrize("outcome", ["natural", "length", "api_error"])
async def test_an_answer_says_how_its_turn_ended(outcome: str):
    program = Program()
    async with program.serving(), started(platform := Webhook("webhook", config(program.url))):
        await platform.send_text(ChatAddress("webhook", "c"), "a", key="k", answers=Answers("1", True, outcome=outcome))
        await platform.send_text(ChatAddress("webhook", "c"), "a notice", key="n")
    assert [each["outcome"] for each in program.got.values()] == [outcome, "natural"]


async def test_a_busy_program_says_when_to_try_again():
    program = Program()
    async with program.serving():
        platform = Webhook("webhook", config(program.url))
        await platform.start(None)
        program.status = 429
        with pytest.raises(PlatformUnavailable) as caught:
            await platform.send_text(ChatAddress("webhook", "c"), "x", key="k")
        assert caught.value.retry_after_s == 7
        await platform.stop()


IDS = b'"message_id": "1", "chat_id": "c", "user_id": "a"'


@pytest.mark.parametrize(
    ("token", "body", "status"),
    [
        ("wrong", b"{}", 401),
        ("secret", b"{}", 400),
        ("secret", b"not json", 400),
        ("secret", b'{"message_id": "1", "chat_id": "", "user_id": "a"}', 400),
        ("secret", b"{" + IDS + b', "chat_type": "room"}', 400),
        ("secret", b"{" + IDS + b', "attachments": [{"name": "x", "data": "!"}]}', 400),
        ("secret", b"\xff\xfe", 400),
    ],
)  # fmt: skip
async def test_a_request_that_is_no_message_is_refused(token, body, status):
    async def deliver(message):
        raise AssertionError

    platform = Webhook("webhook", config("http://127.0.0.1:9/x"))
    await platform.start(deliver)
    async with aiohttp.ClientSession() as client:
        headers = {"Authorization": f"Bearer {token}"}
        async with client.post(f"{platform.url}/messages", data=body, headers=headers) as reply:
            assert reply.status == status
    await platform.stop()


def test_the_address_for_answers_is_required():
    with pytest.raises(ConfigError, match="reply_url"):
        Webhook("webhook", PlatformConfig(token="t"))
