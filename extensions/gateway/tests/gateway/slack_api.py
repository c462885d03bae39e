"""A strict stand-in for Slack: the Web API methods that the gateway uses and Socket Mode, as docs.slack.dev describes
them. A direct chat `D1` of the user `U1`. An event that is not acknowledged is sent again to the next connection."""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web

from palaestra_slots.core.io.http_server import listening

_ARGUMENTS = {
    "auth.test": set(),
    "apps.connections.open": set(),
    "chat.postMessage": {"channel", "text", "thread_ts", "unfurl_links", "unfurl_media", "mrkdwn"},
    "chat.update": {"channel", "ts", "text"},
    "files.getUploadURLExternal": {"filename", "length"},
    "files.completeUploadExternal": {"files", "channel_id", "thread_ts", "initial_comment"},
    "files.info": {"file"},
}
"""The documented arguments of the methods (docs.slack.dev/reference/methods) that the gateway may use."""
TOKEN, APP_TOKEN = "xoxb-secret", "xapp-secret"


class SlackAPI:
    """`sent` are the bot's messages, `files` all files by id, and `shared` the file objects of `files.info`. `failing`
    is a status for every send."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.shared: dict[str, dict[str, Any]] = {}
        self.failing = 0
        self.token = TOKEN
        self.url = ""
        self._numbers = itertools.count(1)
        self._open: dict[str, Any] = {}
        self._sockets: list[web.WebSocketResponse] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/api/{method}", self._call)
        app.router.add_get("/api/{method:files.info}", self._call)
        app.router.add_get("/link", self._link)
        app.router.add_get("/files/{id}", self._file)
        app.router.add_post("/upload/{id}", self._upload)
        async with listening(app, "127.0.0.1", 0, shutdown_s=0.1) as self.url:
            yield
            for socket in self._sockets:
                await socket.close()

    async def write(self, **event: Any) -> None:
        """A person writes in the direct chat."""
        await self.deliver(self._written(**event))

    async def disordered(self, *texts: str) -> None:
        """A person writes several texts; the app gets the last one first, and each in two envelopes."""
        payloads = [self._written(text=text) for text in texts]
        for payload in reversed([*payloads, *payloads]):
            await self.deliver(payload)

    def _written(self, **event: Any) -> dict[str, Any]:
        number = next(self._numbers)
        basic: dict[str, Any] = {
            "type": "message",
            "channel": "D1",
            "channel_type": "im",
            "user": "U1",
            "ts": f"17.{number:06}",
        }
        return {"type": "event_callback", "event": {**basic, **event}}

    async def deliver(self, payload: Any) -> None:
        """The app gets an event, until it acknowledges it."""
        envelope = f"e{next(self._numbers)}"
        self._open[envelope] = {
            "type": "events_api", "envelope_id": envelope, "accepts_response_payload": False, "payload": payload,
            "retry_attempt": 0, "retry_reason": "",
        }  # fmt: skip
        for socket in self._sockets:
            await socket.send_json(self._open[envelope])

    @property
    def unacknowledged(self) -> int:
        """The number of events that the app has not acknowledged."""
        return len(self._open)

    async def _link(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_json({"type": "hello", "num_connections": 1, "connection_info": {"app_id": "A1"}})
        for envelope in self._open.values():
            await socket.send_json(envelope)
        self._sockets.append(socket)
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT and message.data.startswith("{"):
                    self._open.pop(json.loads(message.data).get("envelope_id", ""), None)
        finally:
            self._sockets.remove(socket)
        return socket

    async def _file(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=403)
        name = request.match_info["id"]
        if name == "login":  # the page to which Slack redirects a token without the scope files:read
            return web.Response(text="<html>Sign in</html>", content_type="text/html")
        return web.Response(body=self.files[name]) if name in self.files else web.Response(status=404)

    async def _upload(self, request: web.Request) -> web.Response:
        self.files[request.match_info["id"]] = await _content(request)
        return web.Response(text="OK")

    async def _call(self, request: web.Request) -> web.Response:
        method = request.match_info["method"]
        wanted = APP_TOKEN if method == "apps.connections.open" else self.token
        if request.headers.get("Authorization") != f"Bearer {wanted}":
            return _refused("invalid_auth")
        sent = request.content_type == "application/json"
        form = {**request.query, **(await request.json() if sent else dict(await request.post()))}
        if method.startswith("chat.") and self.failing:
            return web.json_response(
                {"ok": False, "error": "ratelimited"}, status=self.failing, headers={"Retry-After": "4"}
            )
        assert {name for name, value in form.items() if value is not None} <= _ARGUMENTS[method], form
        found: web.Response = getattr(self, f"_{method.replace('.', '_')}")(form)
        return found

    def _auth_test(self, form: Any) -> web.Response:
        return _ok(user_id="UBOT", bot_id="B1")

    def _apps_connections_open(self, form: Any) -> web.Response:
        return _ok(url=f"{self.url.replace('http', 'ws')}/link?ticket=1")

    def _chat_postMessage(self, form: Any) -> web.Response:
        if problem := _problem(form):
            return _refused(problem)
        ts = f"18.{next(self._numbers):06}"
        self.sent.append({"ts": ts, "text": html.unescape(form["text"]), "thread_ts": form.get("thread_ts")})
        return _ok(ts=ts, channel=form["channel"])

    def _chat_update(self, form: Any) -> web.Response:
        if problem := _problem(form):
            return _refused(problem)
        for message in self.sent:
            if message["ts"] == form["ts"]:
                message["text"] = html.unescape(form["text"])
                return _ok(ts=form["ts"])
        return _refused("message_not_found")

    def _files_info(self, form: Any) -> web.Response:
        return _ok(file=self.shared[form["file"]]) if form["file"] in self.shared else _refused("file_not_found")

    def _files_getUploadURLExternal(self, form: Any) -> web.Response:
        name = f"F{next(self._numbers)}"
        return _ok(upload_url=f"{self.url}/upload/{name}", file_id=name)

    def _files_completeUploadExternal(self, form: Any) -> web.Response:
        if form.get("channel_id") != "D1":
            return _refused("channel_not_found")
        files = form["files"] if isinstance(form["files"], list) else json.loads(form["files"])
        for file in files:
            self.sent.append({"ts": "0", "file": self.files[file["id"]]})
        return _ok(files=files)


async def _content(request: web.Request) -> bytes:
    if request.content_type.startswith("multipart/"):
        return b"".join([field.file.read() for field in (await request.post()).values() if not isinstance(field, str)])
    return await request.read()


def _problem(form: Any) -> str:
    if form.get("channel") != "D1":
        return "channel_not_found"
    return "no_text" if not form.get("text") else "msg_too_long" if len(form["text"]) > 40_000 else ""


def _ok(**body: Any) -> web.Response:
    return web.json_response({"ok": True, **body})


def _refused(error: str) -> web.Response:
    return web.json_response({"ok": False, "error": error})
