"""Mattermost: API v4 and its websocket, so no address of this machine needs to be public.

Settings: `token` is the access token of a bot account; `extra.url` is the server's address. In direct chats the bot
answers every message; in channels and groups, messages that mention it. There, it answers in a thread, and each thread
is a session.

The websocket has no acknowledgements, and skips events for a client that is too slow. So the mailbox stores for each
channel up to which time its posts are accepted. After each connection, and after a gap in the events' numbers, the
channels' posts after that time are read; the mailbox recognises known posts.

Format: https://api.mattermost.com (`api/v4/source` in the server's repository)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from typing import Any

import aiohttp

from palaestra.core.cancel_scope import end_tasks
from palaestra.core.errors import ConfigError, PlatformError, PlatformRefused, PlatformUnavailable
from palaestra.doors.gateway.config import PlatformConfig
from palaestra.doors.gateway.platform import (
    Answers,
    Attachment,
    ChatAddress,
    ChatType,
    Deliver,
    Incoming,
    PlatformLimits,
    PlatformNotes,
)
from palaestra.doors.gateway.platforms.http_api import HttpApi

logger = logging.getLogger(__name__)

_PAGE = 200
_MOST_BYTES = 20 << 20
_START, _CHANNEL = "started", "channel "
"""Names of notes: the time of the first start, and the prefix of the notes with the positions of channels, all in
milliseconds."""
_OVERLAP_MS = 5_000
"""Posts of several servers of a cluster may be stored out of order by less than this."""
_MOST_TAKEN = 1000
"""How many delivered posts are remembered: those in the overlap, and those that also the websocket sends."""
_LONGEST_WAIT_S = 60.0
_CHATS: dict[str, ChatType] = {"D": "dm", "G": "group", "P": "group", "O": "channel"}


class Mattermost:
    """One bot account of one server."""

    extra_settings = ("url",)
    limits = PlatformLimits(max_text=16_000, max_file_bytes=50 << 20, edits=True, typing=True)

    def __init__(self, name: str, config: PlatformConfig) -> None:
        self.name = name
        self.notes: PlatformNotes | None = None
        url, token = config.extra.get("url"), config.secret(name)
        if not isinstance(url, str) or not url.startswith(("http://", "https://")) or not token:
            raise ConfigError(
                f"platforms.{name} needs token, the bot's access token, and extra.url, the server's address"
            )
        self._token = token
        self._api = HttpApi(name, f"{url.rstrip('/')}/api/v4", {"Authorization": f"Bearer {token}"})
        self._me: dict[str, Any] = {}
        self._types: dict[str, str] = {}
        self._positions: dict[str, int] = {}
        self._taken: dict[str, None] = {}
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._following: asyncio.Task[None] | None = None

    async def start(self, deliver: Deliver) -> None:
        await self.stop()
        self._api.open()
        try:
            self._me = await self._api.json("GET", "/users/me")
            kept = {} if self.notes is None else await self.notes.read()
            prefix = len(_CHANNEL)
            self._positions = {name[prefix:]: int(at) for name, at in kept.items() if name.startswith(_CHANNEL)}
            if _START in kept:
                self._positions[""] = int(kept[_START])
            else:
                await self._begin_now()
            await self._connect()
        except BaseException:
            await self.stop()
            raise
        self._api.accepted = True
        self._following = asyncio.create_task(self._follow(deliver), name=f"follow {self.name}")

    async def _begin_now(self) -> None:
        """Read no posts from before the first start."""
        self._positions[""] = max((at for _, at in await self._channels()), default=int(time.time() * 1000)) + 1
        if self.notes is not None:
            await self.notes.write(_START, str(self._positions[""]))

    async def stop(self) -> None:
        following, self._following = self._following, None
        await end_tasks(following)
        await self._disconnect()
        await self._api.aclose()

    # Incoming messages

    async def _connect(self) -> None:
        """Open the websocket. Returns once the server accepted the token and sends events."""
        url = f"{self._api.url.replace('http', 'ws', 1)}/websocket"
        challenge = {"seq": 1, "action": "authentication_challenge", "data": {"token": self._token}}
        async with self._api.failures(), asyncio.timeout(30):
            self._socket = socket = await self._api.client.ws_connect(url, heartbeat=30.0, max_msg_size=16 << 20)
            await socket.send_json(challenge)
            async for frame in socket:
                said = json.loads(frame.data)
                if said.get("event") == "hello":
                    return
                if said.get("status") == "FAIL":
                    break
        raise PlatformUnavailable(f"{self.name}: the websocket refuses the token")

    async def _disconnect(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _follow(self, deliver: Deliver) -> None:
        """Deliver posts as they arrive. After an error, connect again and read what is missing."""
        wait_s = 1.0
        while True:
            try:
                if self._socket is None:
                    await self._connect()
                await self._catch_up(deliver)
                wait_s = 1.0
                await self._read(deliver)
                logger.info("%s: the connection ended", self.name)
            except PlatformError as error:
                logger.warning("%s; trying again in %.0f s", error, wait_s)
            except Exception:  # an error of the gateway, such as a full disk
                logger.exception("%s: a message could not be accepted; it will be read again", self.name)
            await self._disconnect()
            await asyncio.sleep(wait_s)
            wait_s = min(_LONGEST_WAIT_S, wait_s * 2)

    async def _read(self, deliver: Deliver) -> None:
        """Deliver the posts of the websocket until it ends."""
        assert self._socket is not None
        number = 0  # that of `hello`
        async for frame in self._socket:
            event = json.loads(frame.data)
            if "event" not in event:
                continue
            missing, number = event.get("seq") != number + 1, event.get("seq", 0)
            if missing:
                await self._catch_up(deliver)
            elif event["event"] == "posted":
                post = json.loads(event["data"]["post"])
                self._types[post["channel_id"]] = str(event["data"].get("channel_type", ""))
                await self._take(deliver, post)

    async def _channels(self) -> list[tuple[str, int]]:
        """Return the bot's channels, each with the time of its last post, and remember their types."""
        found = await self._api.json("GET", f"/users/{self._me['id']}/channels", most_bytes=64 << 20)
        self._types |= {each["id"]: each["type"] for each in found}
        return [(each["id"], int(each.get("last_post_at") or 0)) for each in found]

    async def _catch_up(self, deliver: Deliver) -> None:
        """Deliver the posts that are not accepted yet, the oldest first."""
        posts: list[dict[str, Any]] = []
        read: dict[str, int] = {}
        for channel, last_at in await self._channels():
            since = self._positions.get(channel, self._positions[""])
            if last_at >= since:
                read[channel] = last_at
                posts += await self._posts(channel, max(self._positions[""], since - _OVERLAP_MS))
        for post in sorted(posts, key=lambda each: int(each["create_at"])):
            await self._take(deliver, post)
        for channel, last_at in read.items():  # also channels in which nobody mentions the bot are not read again
            await self._advance(channel, last_at)

    async def _posts(self, channel: str, since: int) -> list[dict[str, Any]]:
        """Return the posts of a channel that were made at the time `since` or later. Posts that arrive meanwhile move
        others to a later page, so a post may occur twice, and none is missing."""
        found: dict[str, dict[str, Any]] = {}
        page = 0
        while True:
            path = f"/channels/{channel}/posts?page={page}&per_page={_PAGE}"
            answer = await self._api.json("GET", path, most_bytes=64 << 20)
            posts = [answer["posts"][each] for each in answer["order"]]
            found |= {post["id"]: post for post in posts if int(post["create_at"]) >= since}
            if len(posts) < _PAGE or int(posts[-1]["create_at"]) < since:
                return list(found.values())
            page += 1

    async def _take(self, deliver: Deliver, post: dict[str, Any]) -> None:
        channel, at = post["channel_id"], int(post["create_at"])
        message = None if post["id"] in self._taken else await self._incoming(post)
        if message is None:
            self._positions[channel] = max(at, self._positions.get(channel, 0))
            return
        await deliver(message)
        self._taken = dict([*self._taken.items(), (post["id"], None)][-_MOST_TAKEN:])
        await self._advance(channel, at)

    async def _advance(self, channel: str, at: int) -> None:
        """Record that the posts of a channel up to a time are accepted."""
        self._positions[channel] = at = max(at, self._positions.get(channel, 0))
        if self.notes is not None:
            await self.notes.write(f"{_CHANNEL}{channel}", str(at))

    async def _incoming(self, post: dict[str, Any]) -> Incoming | None:
        """Return the message of a post. Returns None if it is not a message from a person to the bot."""
        props, text = post.get("props") or {}, str(post.get("message", ""))
        automatic = props.get("from_bot") or props.get("from_webhook")
        if post["user_id"] == self._me["id"] or post.get("type") or post.get("delete_at") or automatic:
            return None
        kind = _CHATS.get(self._types.get(post["channel_id"], ""), "channel")
        mention = re.compile(rf"(?<![\w.@-])@{re.escape(self._me['username'])}(?![\w-])", re.IGNORECASE)
        if kind != "dm" and not mention.search(text):
            return None
        thread = str(post.get("root_id") or ("" if kind == "dm" else post["id"]))
        files, problem = [], ""
        known = {each["id"]: each for each in (post.get("metadata") or {}).get("files") or ()}
        for number in post.get("file_ids") or ():
            try:
                about = known.get(number) or await self._api.json("GET", f"/files/{number}/info")
                if int(about.get("size") or 0) > _MOST_BYTES:
                    problem = f"{about.get('name')} is too large; at most {_MOST_BYTES >> 20} MB are accepted."
                    continue
                data = await self._api.call("GET", f"/files/{number}", most_bytes=_MOST_BYTES)
                media_type = str(about.get("mime_type") or "application/octet-stream")
                files.append(Attachment(str(about.get("name") or "file"), media_type, data))
            except PlatformRefused as error:  # a later try would keep the messages after this one waiting
                problem = f"A file could not be read: {error}"
        address = ChatAddress(self.name, post["channel_id"], kind, thread)
        text = mention.sub("", text).strip() if kind != "dm" else text
        return Incoming(address, post["id"], post["user_id"], text, tuple(files), problem=problem)

    # Outgoing messages

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        return await self._post(address, text, [])

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        where = {"channel_id": address.chat_id, "filename": file.name}
        headers = {"Content-Type": file.media_type}
        sent = await self._api.json("POST", "/files", params=where, data=file.data, headers=headers)
        return await self._post(address, "", [sent["file_infos"][0]["id"]])

    async def _post(self, address: ChatAddress, text: str, files: list[str]) -> str:
        body = {"channel_id": address.chat_id, "message": text, "root_id": address.thread_id, "file_ids": files}
        sent = await self._api.json("POST", "/posts", json=body)
        return str(sent["id"])

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        await self._api.call("PUT", f"/posts/{message_id}/patch", json={"message": text})

    async def stream_text(self, message: Incoming, text: str) -> None:
        raise NotImplementedError("this platform cannot stream answers")

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        if typing:
            body = {"channel_id": address.chat_id, "parent_id": address.thread_id}
            with contextlib.suppress(PlatformError):
                await self._api.call("POST", f"/users/{self._me['id']}/typing", json=body)
