"""A strict stand-in for a Mattermost server: the parts of API v4 and of its websocket that the gateway uses, as the
OpenAPI description in the server's repository gives them. Anna and the bot share the direct channel `dm1` and the
public channel `town`."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web

from palaestra.core.io.http_server import listening

TOKEN = "9xuqwrwgstrb3mzrxb83nb357a"
BOT, ANNA = "botbotbot", "annaannaanna"
CHANNELS = {"dm1": "D", "town": "O"}
_POST_FIELDS = {"channel_id", "message", "root_id", "file_ids"}


class MattermostAPI:
    """`posts` are all posts, oldest first, and `pages` counts the pages of them that were read. Sends are refused with
    the status `failing`. While `silent`, the websocket skips events, as a server does for a slow client."""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.files: dict[str, tuple[dict[str, Any], bytes]] = {}
        self.failing = 0
        self.silent = False
        self.token = TOKEN
        self.url = ""
        self.typing = self.pages = 0
        self._numbers = itertools.count(1)
        self._at = itertools.count(1_700_000_000_000, 100)
        self._sockets: dict[web.WebSocketResponse, int] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=64 << 20, middlewares=[self._checked])
        app.router.add_get("/api/v4/websocket", self._websocket)
        app.router.add_get("/api/v4/users/me", self._me)
        app.router.add_get(f"/api/v4/users/{BOT}/channels", self._channels)
        app.router.add_post(f"/api/v4/users/{BOT}/typing", self._typing)
        app.router.add_get("/api/v4/channels/{id}/posts", self._page)
        app.router.add_post("/api/v4/posts", self._create)
        app.router.add_put("/api/v4/posts/{id}/patch", self._patch)
        app.router.add_post("/api/v4/files", self._upload)
        app.router.add_get("/api/v4/files/{id}", self._file)
        app.router.add_get("/api/v4/files/{id}/info", self._info)
        async with listening(app, "127.0.0.1", 0, shutdown_s=0.1) as self.url:
            yield
            await self.drop()

    async def drop(self) -> None:
        """Close all websockets."""
        for socket in list(self._sockets):
            await socket.close()

    def add_file(self, name: str, media_type: str, data: bytes) -> str:
        number = f"file{next(self._numbers)}"
        about = {"id": number, "name": name, "mime_type": media_type, "size": len(data)}
        self.files[number] = about, data
        return number

    async def write(self, text: str, channel: str = "dm1", user: str = ANNA, **more: Any) -> dict[str, Any]:
        """A user writes a post; the websockets get the event."""
        at = next(self._at)
        post = {
            "id": f"post{next(self._numbers)}", "create_at": at, "update_at": at, "delete_at": 0, "user_id": user,
            "channel_id": channel, "root_id": "", "message": text, "type": "", "props": {}, "metadata": {}, **more,
        }  # fmt: skip
        self.posts.append(post)
        data = {"channel_type": CHANNELS[channel], "sender_name": "@anna", "post": json.dumps(post)}
        await self.send("posted", data)
        return post

    async def again(self, post: dict[str, Any]) -> None:
        """The websockets get the event of a post once more."""
        await self.send("posted", {"channel_type": CHANNELS[post["channel_id"]], "post": json.dumps(post)})

    async def send(self, event: str, data: Any) -> None:
        for socket, number in list(self._sockets.items()):
            self._sockets[socket] = number + 1
            if not (self.silent or socket.closed):
                body = {"event": event, "data": data, "broadcast": {"omit_users": None}, "seq": number}
                await socket.send_json(body)

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not request.path.endswith("/websocket") and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _refused(401, "api.context.session_expired.app_error")
        response: web.StreamResponse = await handler(request)
        return response

    async def _websocket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        said = await socket.receive_json()
        assert (said["seq"], said["action"]) == (1, "authentication_challenge")
        if said["data"]["token"] != self.token:
            await socket.close()
            return socket
        await socket.send_json({"status": "OK", "seq_reply": 1})
        await socket.send_json({"event": "hello", "data": {"server_version": "10.0"}, "broadcast": {}, "seq": 0})
        self._sockets[socket] = 1
        try:
            async for message in socket:
                assert message.type is WSMsgType.TEXT
        finally:
            self._sockets.pop(socket, None)
        return socket

    async def _me(self, request: web.Request) -> web.Response:
        return web.json_response({"id": BOT, "username": "helper", "is_bot": True})

    async def _channels(self, request: web.Request) -> web.Response:
        last = {post["channel_id"]: post["create_at"] for post in self.posts}
        found = [{"id": name, "type": kind, "last_post_at": last.get(name, 0)} for name, kind in CHANNELS.items()]
        return web.json_response(found)

    async def _typing(self, request: web.Request) -> web.Response:
        assert set(await request.json()) == {"channel_id", "parent_id"}
        self.typing += 1
        return web.json_response({"status": "OK"})

    async def _page(self, request: web.Request) -> web.Response:
        self.pages += 1
        page, size = int(request.query["page"]), min(200, int(request.query["per_page"]))
        newest = [each for each in reversed(self.posts) if each["channel_id"] == request.match_info["id"]]
        shown = newest[page * size : (page + 1) * size]
        return web.json_response(
            {"order": [each["id"] for each in shown], "posts": {each["id"]: each for each in shown}}
        )

    async def _create(self, request: web.Request) -> web.Response:
        if self.failing:
            return _refused(self.failing, "limit exceeded", {"X-RateLimit-Reset": "4"})
        body = await request.json()
        roots = {each["id"] for each in self.posts if each["channel_id"] == body["channel_id"]} | {""}
        if not set(body) <= _POST_FIELDS or body["channel_id"] not in CHANNELS or body["root_id"] not in roots:
            return _refused(403, "api.context.permissions.app_error")
        if len(body["message"]) > 16_383 or len(body["file_ids"]) > 5 or not (body["message"] or body["file_ids"]):
            return _refused(400, "model.post.is_valid.msg.app_error")
        assert all(each in self.files for each in body["file_ids"])
        post = await self.write(
            body["message"], body["channel_id"], BOT, root_id=body["root_id"], file_ids=body["file_ids"]
        )
        return web.json_response(post, status=201)

    async def _patch(self, request: web.Request) -> web.Response:
        body = await request.json()
        (post,) = [each for each in self.posts if each["id"] == request.match_info["id"]]
        assert set(body) == {"message"}
        assert post["user_id"] == BOT
        post["message"] = body["message"]
        return web.json_response(post)

    async def _upload(self, request: web.Request) -> web.Response:
        assert request.query["channel_id"] in CHANNELS
        number = self.add_file(request.query["filename"], request.content_type, await request.read())
        return web.json_response({"file_infos": [self.files[number][0]], "client_ids": []}, status=201)

    async def _file(self, request: web.Request) -> web.Response:
        return web.Response(body=self.files[request.match_info["id"]][1])

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(self.files[request.match_info["id"]][0])


def _refused(status: int, problem: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"id": problem, "message": problem, "status_code": status}, status=status, headers=headers)
