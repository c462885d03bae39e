"""Messages as HTTP requests: a program posts them to the gateway, and the gateway posts the answers to the program.

The program sends `POST /messages` with the bearer token and a JSON object:

    {"message_id": "42", "chat_id": "room", "user_id": "anna", "text": "hello", "chat_type": "dm", "thread_id": "",
     "user_name": "Anna", "attachments": [{"name": "a.png", "media_type": "image/png", "data": "<base64>"}]}

`message_id`, `chat_id` and `user_id` are required. The reply is 202 once the message is on the disk; a repeated message
counts only once. The gateway posts answers to `reply_url`, with the header `Idempotency-Key` and, if `api_key` is set,
with `api_key` as the bearer token:

    {"key": "…", "chat_id": "room", "thread_id": "", "text": "echo", "file": null, "answers": "42", "last": true,
     "outcome": "natural"}

`answers` is the id of the message that is answered (null for a notice), and `last` is true for the last part of the
answer. `outcome` says how the turn ended: `natural`, or why its text is not a whole answer (`length`, `max_turns`,
`budget`, `interrupted`, `api_error`, `infra_error`). Every status below 300 means that the answer arrived; after 408,
409, 425, 429 and 5xx, the gateway tries again; all other statuses count as refusals.

Settings in `extra`: `reply_url` (required), `host` (127.0.0.1) and `port` (8642).
"""

from __future__ import annotations

import base64
import binascii
from contextlib import AsyncExitStack

import aiohttp
import msgspec
from aiohttp import web

from palaestra_chat.turn_events import NATURAL
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import (
    Answers,
    Attachment,
    ChatAddress,
    ChatType,
    Deliver,
    Incoming,
    PlatformLimits,
)
from palaestra_slots.core.clock import SystemClock
from palaestra_slots.core.errors import ConfigError, PlatformRefused, PlatformUnavailable
from palaestra_slots.core.io.http_server import guard, listening
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.retry import RETRIED_STATUSES, retry_after_s
from palaestra_slots.core.types import JSON

MAX_BODY_BYTES = 64 << 20
SEND_TIMEOUT_S = 60.0


class _File(msgspec.Struct):
    name: str
    data: str
    media_type: str = "application/octet-stream"


class _Message(msgspec.Struct):
    """The body of a request."""

    message_id: str
    chat_id: str
    user_id: str
    text: str = ""
    chat_type: ChatType = "dm"
    thread_id: str = ""
    user_name: str = ""
    attachments: list[_File] = []


class Webhook:
    """One server. `url` is its address while it runs."""

    extra_settings = ("reply_url", "host", "port")
    limits = PlatformLimits(max_text=1 << 20, max_file_bytes=32 << 20, idempotent=True)

    def __init__(self, name: str, config: PlatformConfig) -> None:
        self.name = name
        self.url = ""
        self._token = config.secret(name)
        self._key = config.api_key
        reply_url = config.extra.get("reply_url")
        if not isinstance(reply_url, str) or not reply_url.startswith(("http://", "https://")):
            raise ConfigError(f"platforms.{name}.extra.reply_url must be the http address that gets the answers")
        self._reply_url = reply_url
        self._host, self._port = listen_address(name, config, 8642)
        self._deliver: Deliver | None = None
        self._open = AsyncExitStack()
        self._client: aiohttp.ClientSession

    async def start(self, deliver: Deliver) -> None:
        """Start the server. Raises `ConfigError` if the port is in use, or if `host` is not a loopback address and
        there is no token."""
        self._deliver = deliver
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard(self._token)])
        app.router.add_post("/messages", self._receive)
        timeout = aiohttp.ClientTimeout(total=SEND_TIMEOUT_S)
        self._client = await self._open.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())
        )
        self.url = await self._open.enter_async_context(listening(app, self._host, self._port, token=self._token))

    async def stop(self) -> None:
        self._deliver = None
        await self._open.aclose()

    async def _receive(self, request: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await request.read(), type=_Message)
            files = [
                Attachment(file.name, file.media_type, base64.b64decode(file.data, validate=True))
                for file in body.attachments
            ]
        except (msgspec.MsgspecError, binascii.Error, UnicodeDecodeError, RecursionError) as error:
            return web.json_response({"detail": f"not a message: {error}", "error": "ValueError"}, status=400)
        if not (body.message_id and body.chat_id and body.user_id):
            problem = "message_id, chat_id and user_id must not be empty"
            return web.json_response({"detail": problem, "error": "ValueError"}, status=400)
        if self._deliver is None:
            raise web.HTTPServiceUnavailable(text="the gateway is stopping")
        address = ChatAddress(self.name, body.chat_id, body.chat_type, body.thread_id)
        message = Incoming(address, body.message_id, body.user_id, body.text, tuple(files), body.user_name)
        await self._deliver(message)
        return web.json_response({"accepted": body.message_id}, status=202)

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        return await self._post(address, key, answers, {"text": text, "file": None})

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        data = base64.b64encode(file.data).decode()
        sent = {"name": file.name, "media_type": file.media_type, "data": data}
        return await self._post(address, key, answers, {"text": "", "file": sent})

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        raise NotImplementedError("a webhook cannot edit messages")

    async def stream_text(self, message: Incoming, text: str) -> None:
        raise NotImplementedError("a webhook cannot stream answers")

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        raise NotImplementedError("a webhook has no typing notices")

    async def _post(self, address: ChatAddress, key: str, answers: Answers | None, content: dict[str, JSON]) -> str:
        body = {"key": key, "chat_id": address.chat_id, "thread_id": address.thread_id, **content}
        body |= {"answers": answers.message_id if answers else None, "last": answers.last if answers else True}
        body["outcome"] = answers.outcome if answers else NATURAL
        headers = {"Idempotency-Key": key, **({"Authorization": f"Bearer {self._key}"} if self._key else {})}
        try:
            async with self._client.post(self._reply_url, json=body, headers=headers, allow_redirects=False) as reply:
                if reply.status < 300:
                    return key
                said = without_middle(await reply.text(errors="replace"), 300)
                problem = f"{self.name}: {self._reply_url} answers HTTP {reply.status}: {said}"
                if reply.status in RETRIED_STATUSES or reply.status >= 500:
                    wait_s = retry_after_s(reply.headers.get("Retry-After"), SystemClock().wall())
                    raise PlatformUnavailable(problem, wait_s)
                raise PlatformRefused(problem)
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, (PlatformRefused, PlatformUnavailable)):
                raise
            raise PlatformUnavailable(f"{self.name}: {self._reply_url} cannot be reached: {error!r:.200}") from error


def listen_address(name: str, config: PlatformConfig, port: int) -> tuple[str, int]:
    """Return `host` and `port` for a platform that runs a server. Raises `ConfigError`."""
    host, given = config.extra.get("host", "127.0.0.1"), config.extra.get("port", port)
    if not isinstance(host, str) or type(given) is not int or not 0 <= given < 1 << 16:
        raise ConfigError(f"platforms.{name}.extra.host must be a string, and port a number from 0 to 65535")
    return host, given
