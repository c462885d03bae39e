"""A strict stand-in for Twilio's Programmable Messaging, as its documentation describes it: the REST resources that the
gateway uses, and one signed request to the webhook for each message, which is not repeated."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from palaestra.core.io.http_server import listening

ACCOUNT, TOKEN = "AC0123", "auth token"
NUMBER, ANNA = "+15550002", "+15550001"
PUBLIC = "https://agent.example.org/sms"


class TwilioAPI:
    """`messages` are all messages, oldest first. Sends fail with the status and headers of `failing`. `webhook` returns
    the gateway's address, or the empty string while it does not run."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.media: dict[str, tuple[str, bytes]] = {}
        self.failing: tuple[int, dict[str, str]] | None = None
        self.token = TOKEN
        self.url = ""
        self.webhook: Callable[[], str] = lambda: ""
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(middlewares=[self._checked])
        base = f"/2010-04-01/Accounts/{ACCOUNT}"
        app.router.add_get(f"{base}.json", self._account)
        app.router.add_get(f"{base}/Messages.json", self._list)
        app.router.add_post(f"{base}/Messages.json", self._create)
        app.router.add_get(f"{base}/Messages/{{sid}}/Media.json", self._media_list)
        app.router.add_get(f"{base}/Messages/{{sid}}/Media/{{media}}", self._media)
        app.router.add_get("/cdn/{media}", self._content)
        async with listening(app, "127.0.0.1", 0, shutdown_s=0.1) as self.url:
            yield

    def sent(self) -> list[str]:
        return [each["body"] for each in self.messages if each["direction"] == "outbound-api"]

    async def write(self, text: str, *files: tuple[str, bytes]) -> dict[str, str]:
        """Anna sends a message. Returns the form of the webhook request, for `call`."""
        sid = f"SM{next(self._numbers):032}"
        self._add(sid, ANNA, NUMBER, text, "inbound", len(files))
        for media_type, data in files:
            self.media[f"ME{next(self._numbers)}:{sid}"] = media_type, data
        form = {"MessageSid": sid, "From": ANNA, "To": NUMBER, "Body": text, "NumMedia": str(len(files))}
        await self.call(form)
        return form

    async def call(self, form: dict[str, str], token: str = TOKEN) -> int:
        """Call the webhook once; returns the status, or 0 if nobody answers."""
        signed = PUBLIC + "".join(name + form[name] for name in sorted(form))
        signature = base64.b64encode(hmac.new(token.encode(), signed.encode(), hashlib.sha1).digest()).decode()
        if not self.webhook():
            return 0
        try:
            async with (
                aiohttp.ClientSession() as client,
                client.post(f"{self.webhook()}/sms", data=form, headers={"X-Twilio-Signature": signature}) as reply,
            ):
                assert reply.status != 200 or reply.content_type == "text/xml"
                return reply.status
        except aiohttp.ClientError:
            return 0

    def _add(self, sid: str, sender: str, to: str, text: str, direction: str, media: int = 0) -> dict[str, Any]:
        message = {
            "sid": sid, "account_sid": ACCOUNT, "from": sender, "to": to, "body": text, "direction": direction,
            "num_media": str(media), "date_created": email.utils.formatdate(time.time() + 5), "status": "received",
        }  # fmt: skip
        self.messages.append(message)
        return message

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        right = f"Basic {base64.b64encode(f'{ACCOUNT}:{self.token}'.encode()).decode()}"
        if not request.path.startswith("/cdn/") and request.headers.get("Authorization") != right:
            return web.json_response({"code": 20003, "message": "Authenticate", "status": 401}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def _account(self, request: web.Request) -> web.Response:
        return web.json_response({"sid": ACCOUNT, "status": "active"})

    async def _list(self, request: web.Request) -> web.Response:
        assert set(request.query) <= {"To", "DateSent>", "PageSize", "Page"}
        page, size = int(request.query.get("Page", 0)), int(request.query["PageSize"])
        newest = [each for each in reversed(self.messages) if each["to"] == request.query["To"]]
        more = len(newest) > (page + 1) * size
        following = request.rel_url.update_query(Page=str(page + 1))
        shown = newest[page * size : (page + 1) * size]
        return web.json_response({"messages": shown, "next_page_uri": str(following) if more else None})

    async def _create(self, request: web.Request) -> web.Response:
        if self.failing is not None:
            status, headers = self.failing
            return web.json_response(
                {"code": 20429, "message": "Too many", "status": status}, status=status, headers=headers
            )
        form = await request.post()
        assert set(form) == {"To", "From", "Body"}
        text = str(form["Body"])
        if form["To"] != ANNA or form["From"] != NUMBER or not 0 < len(text) <= 1600:
            return web.json_response({"code": 21211, "message": "Invalid 'To'", "status": 400}, status=400)
        message = self._add(f"SM{next(self._numbers):032}", NUMBER, ANNA, text, "outbound-api")
        return web.json_response(message, status=201)

    async def _media_list(self, request: web.Request) -> web.Response:
        sid = request.match_info["sid"]
        found = [(name.partition(":")[0], kind) for name, (kind, _) in self.media.items() if name.endswith(f":{sid}")]
        return web.json_response({"media_list": [{"sid": name, "content_type": kind} for name, kind in found]})

    async def _media(self, request: web.Request) -> web.Response:
        name = f"{request.match_info['media']}:{request.match_info['sid']}"
        raise web.HTTPTemporaryRedirect(f"{self.url}/cdn/{name}")

    async def _content(self, request: web.Request) -> web.Response:
        return web.Response(body=self.media[request.match_info["media"]][1])
