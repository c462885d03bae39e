"""A strict stand-in for WhatsApp's Cloud API, as Meta's documentation describes it: the parts of the Graph API that the
gateway uses, and the requests to its webhook, which are signed and repeated until they are confirmed."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.io.http_server import listening

TOKEN, SECRET, VERIFY = "EAAG-token", "app secret", "a word"
NUMBER, ANNA = "106540352242922", "16505551234"


class WhatsAppAPI:
    """`sent` are the accepted messages, `media` all files by id. Sends fail with the status and error of `failing`.
    `webhook` returns the gateway's address, or the empty string while it does not run."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.media: dict[str, tuple[str, bytes]] = {}
        self.failing: tuple[int, int, dict[str, str]] | None = None
        self.token = TOKEN
        self.url = ""
        self.webhook: Callable[[], str] = lambda: ""
        self._numbers = itertools.count(1)
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/cdn/{id}", self._content)
        app.router.add_get("/v23.0/{id}", self._about)
        app.router.add_post(f"/v23.0/{NUMBER}/media", self._upload)
        app.router.add_post(f"/v23.0/{NUMBER}/messages", self._message)
        async with listening(app, "127.0.0.1", 0, shutdown_s=0.1) as self.url:
            calling = asyncio.ensure_future(self._call())
            try:
                yield
            finally:
                await end_tasks(calling)

    def write(self, **content: Any) -> dict[str, Any]:
        """Anna sends a message, such as `type="text", text={"body": "hello"}`. Returns it, for `notify`."""
        message = self.message(**content)
        self.notify(messages=[message])
        return message

    def message(self, **content: Any) -> dict[str, Any]:
        """Return a message of Anna, which is not sent yet."""
        number = next(self._numbers)
        return {"from": ANNA, "id": f"wamid.{number}", "timestamp": f"{1_700_000_000 + number}", **content}

    def notify(self, number: str = NUMBER, **value: Any) -> None:
        metadata = {"display_phone_number": "15550783881", "phone_number_id": number}
        contacts = [{"profile": {"name": "Anna"}, "wa_id": ANNA}]
        value = {"messaging_product": "whatsapp", "metadata": metadata, "contacts": contacts, **value}
        entry = {"id": "102290129340398", "changes": [{"value": value, "field": "messages"}]}
        self._waiting.put_nowait(json.dumps({"object": "whatsapp_business_account", "entry": [entry]}).encode())

    async def _call(self) -> None:
        """Call the webhook for each event, again and again until it is confirmed."""
        async with aiohttp.ClientSession() as client:
            while True:
                body = await self._waiting.get()
                while not (self.webhook() and await self._confirmed(client, body)):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    async def _confirmed(self, client: aiohttp.ClientSession, body: bytes) -> bool:
        signature = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        headers = {"X-Hub-Signature-256": f"sha256={signature}", "Content-Type": "application/json"}
        try:
            async with client.post(f"{self.webhook()}/webhook", data=body, headers=headers) as reply:
                return reply.status == 200
        except aiohttp.ClientError:
            return False

    async def _about(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _refused(401, 190)
        number = request.match_info["id"]
        if number == NUMBER:
            return web.json_response({"id": NUMBER})
        media_type, data = self.media[number]
        place = {"messaging_product": "whatsapp", "url": f"{self.url}/cdn/{number}", "mime_type": media_type}
        return web.json_response({**place, "sha256": "", "file_size": len(data), "id": number})

    async def _content(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=403)
        return web.Response(body=self.media[request.match_info["id"]][1])

    def add_media(self, media_type: str, data: bytes) -> str:
        number = f"{next(self._numbers)}"
        self.media[number] = media_type, data
        return number

    async def _upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        file = form["file"]
        assert isinstance(file, web.FileField)
        assert (form["messaging_product"], form["type"]) == ("whatsapp", file.content_type)
        return web.json_response({"id": self.add_media(file.content_type, file.file.read())})

    async def _message(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _refused(401, 190)
        if self.failing is not None:
            return _refused(*self.failing)
        body = await request.json()
        kind = body["type"]
        # An id for one business contains a dot, and goes into another field than a telephone number.
        field = "recipient" if "." in body.get("recipient", "") else "to"
        assert set(body) == {"messaging_product", "recipient_type", field, "type", kind}
        assert (body["messaging_product"], body["recipient_type"]) == ("whatsapp", "individual")
        if field == "to" and body["to"] != ANNA:
            return _refused(400, 131026)
        if kind == "text":
            assert 0 < len(body["text"]["body"].encode("utf-16-le")) // 2 <= 4096
        else:
            assert body[kind]["id"] in self.media
            media_type, _ = self.media[body[kind]["id"]]
            assert kind == "document" or media_type in ("image/png", "image/jpeg")
        self.sent.append(body)
        contacts = [{"input": body[field], "wa_id": body[field]}]
        messages = [{"id": f"wamid.{next(self._numbers)}"}]
        return web.json_response({"messaging_product": "whatsapp", "contacts": contacts, "messages": messages})


def _refused(status: int, code: int, headers: dict[str, str] | None = None) -> web.Response:
    error = {"message": "(#1) refused", "type": "OAuthException", "code": code, "fbtrace_id": "x"}
    return web.json_response({"error": error}, status=status, headers=headers)
