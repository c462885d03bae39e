"""Matrix, with matrix-nio, on any homeserver.

Settings: `token` is the access token of the bot's account; `extra.homeserver` is the homeserver's address, such as
`https://matrix.example.org`. The bot joins rooms that it is invited to; a room with at most two members is a `dm`, any
other room is a `group`.

The bot's read position is stored on the homeserver, in the bot's account data (`SYNCED`), so that no message is missed
after a restart. The homeserver leaves out older messages if there are many; these are read from the room's history,
beginning at the read position. The mailbox recognises messages that are read twice. Messages from before the first
start are not read, but invitations are accepted.

Encrypted rooms need the extra `gateway-e2ee` (`matrix_encryption`). `extra.device_trust` is `first_use` or `verified`.
Without the extra, the bot reports in an encrypted room that it cannot read it, and sends nothing else there.

Format: https://spec.matrix.org/latest/client-server-api/
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from nio import (
    AsyncClient,
    Event,
    JoinError,
    MatrixRoom,
    MegolmEvent,
    MessageDirection,
    RoomEncryptedMedia,
    RoomMessage,
    RoomMessageFormatted,
    RoomMessageMedia,
    RoomMessageNotice,
    SyncResponse,
)
from nio.exceptions import EncryptionError
from nio.responses import ErrorResponse

from palaestra.core.cancel_scope import end_tasks
from palaestra.core.errors import ConfigError, PlatformError, PlatformRefused, PlatformUnavailable
from palaestra.core.printable import without_middle
from palaestra.core.types import JSON
from palaestra.doors.gateway.config import PlatformConfig
from palaestra.doors.gateway.platform import (
    Answers,
    Attachment,
    ChatAddress,
    Deliver,
    Incoming,
    PlatformLimits,
    PlatformNotes,
)
from palaestra.doors.gateway.platforms.matrix_encryption import (
    UNREADABLE,
    RoomEncryption,
    TrustPolicy,
    decrypted_file,
    encrypted_file,
    make_client,
)

logger = logging.getLogger(__name__)

SYNCED = "palaestra.synced"
"""The type of the account data that holds the sync token."""
ENCRYPTED = (
    "I cannot read this room, because it is encrypted. Please talk to me in a room without encryption, or ask my owner "
    "to install the extra gateway-e2ee."
)

_LONG_POLL_MS = 30_000
_SHORT_POLL_MS = 2_000
"""The time to wait for events while a message waits for its key."""
_TYPING_MS = 8_000
_REQUEST_S = 30.0
_PAGE = 100
"""The number of events to request at once from a room's history."""
_FOR_LATER = frozenset({"M_LIMIT_EXCEEDED", "M_UNKNOWN", "M_RESOURCE_LIMIT_EXCEEDED"})
_FILE = re.compile(r"mxc://([A-Za-z0-9\[][A-Za-z0-9.:\[\]-]*)/([A-Za-z0-9_-]+)")
_MEDIA_TYPES = {"m.image": "image/png", "m.audio": "audio/ogg", "m.video": "video/mp4"}


class Matrix:
    """One account."""

    extra_settings = ("homeserver", "device_trust")
    limits = PlatformLimits(
        max_text=20_000, unit="utf8", max_file_bytes=20 << 20, edits=True, typing=True, idempotent=True
    )

    def __init__(self, name: str, config: PlatformConfig) -> None:
        self.name = name
        self._token = config.secret(name)
        homeserver = config.extra.get("homeserver")
        if not isinstance(homeserver, str) or not homeserver.startswith(("http://", "https://")) or not self._token:
            raise ConfigError(
                f"platforms.{name} needs token, the bot's access token, and extra.homeserver, such as "
                "https://matrix.example.org"
            )
        self._homeserver = homeserver.rstrip("/")
        policy = config.extra.get("device_trust", "first_use")
        if policy not in ("first_use", "verified"):
            raise ConfigError(f"platforms.{name}.extra.device_trust is {policy!r}; use first_use or verified")
        self._policy: TrustPolicy = policy
        self.notes: PlatformNotes | None = None
        self.folder: Path | None = None
        self._client: AsyncClient | None = None
        self._encryption: RoomEncryption | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._largest = self.limits.max_file_bytes

    async def start(self, deliver: Deliver) -> None:
        await self.stop()
        folder = None if self.notes is None else self.folder
        self._client = client = make_client(self._homeserver, folder, timeout_s=_REQUEST_S)
        assert self._token is not None  # checked above
        client.access_token = self._token
        try:
            who = await self._asked(client.whoami())
            client.user_id, client.device_id = who.user_id, who.device_id or ""
            await self._begin_encryption(client)
            since = await self._read_position()
            first = await self._sync(client, since, full=True)
            if since is None:
                await self._join(client, first.rooms.invite)
                await self._write_position(first.next_batch)
        except BaseException:
            await self.stop()
            raise
        self._syncing = asyncio.create_task(
            self._follow(client, deliver, since, first if since is not None else None, first.next_batch),
            name=f"sync {self.name}",
        )

    async def _begin_encryption(self, client: AsyncClient) -> None:
        if not client.config.encryption_enabled or self.notes is None:
            return
        if not client.device_id:
            logger.warning("%s: the access token has no device, so encrypted rooms cannot be read", self.name)
            return
        self._encryption = RoomEncryption(self.name, client, self.notes, self._policy, self._asked)
        await self._encryption.begin()

    async def stop(self) -> None:
        syncing, self._syncing = self._syncing, None
        await end_tasks(syncing)
        client, self._client, self._encryption = self._client, None, None
        if client is not None:
            await client.close()
            if client.store is not None:
                client.store.database.close()

    # Incoming messages

    async def _follow(
        self, client: AsyncClient, deliver: Deliver, since: str | None, first: SyncResponse | None, position: str
    ) -> None:
        """Deliver messages as they arrive; a message that could not be delivered is read again."""
        response, wait_s = first, 1.0
        if since is not None:
            position = since
        while True:
            try:
                if response is None:
                    response = await self._sync(client, position)
                if self._encryption is not None:
                    await self._encryption.tend(response)
                if await self._take(client, deliver, position, response):
                    await self._write_position(response.next_batch)
                if self._encryption is not None:
                    await self._deliver_late(client, deliver, self._encryption)
                    await self._encryption.tend(None)
                position, response, wait_s = response.next_batch, None, 1.0
            except PlatformError as error:
                logger.warning("%s; trying again in %.0f s", error, wait_s)
                await asyncio.sleep(wait_s)
                response, wait_s = None, min(60.0, wait_s * 2)
            except Exception:  # an error of the gateway, such as a full disk
                logger.exception("%s: a message could not be accepted; it will be read again", self.name)
                await asyncio.sleep(wait_s)
                wait_s = min(60.0, wait_s * 2)

    async def _sync(self, client: AsyncClient, since: str | None, *, full: bool = False) -> SyncResponse:
        waits = self._encryption is not None and self._encryption.waits
        wait_ms = 0 if full else _SHORT_POLL_MS if waits else _LONG_POLL_MS
        request = client.sync(timeout=wait_ms, since=since, full_state=full, set_presence="online")
        response: SyncResponse = await self._asked(request)
        return response

    async def _take(self, client: AsyncClient, deliver: Deliver, since: str, response: SyncResponse) -> bool:
        """Deliver messages, and join the rooms to which the bot is invited. Return False if there were neither
        messages nor invitations."""
        found = bool(response.rooms.invite)
        for room_id, info in response.rooms.join.items():
            timeline = info.timeline
            if timeline.limited and timeline.prev_batch:
                newer = {_id(event) for event in timeline.events} - {""}
                async for events in self._left_out(client, room_id, since, timeline.prev_batch, newer):
                    found |= await self._deliver(client, deliver, room_id, events)
            found |= await self._deliver(client, deliver, room_id, timeline.events)
        await self._join(client, response.rooms.invite)  # after the messages, so that no invitation holds them up
        return found

    async def _join(self, client: AsyncClient, rooms: Iterable[str]) -> None:
        for room_id in rooms:
            async with self._failures():
                joined = await client.join(room_id)
            if isinstance(joined, JoinError):
                if joined.status_code == "M_LIMIT_EXCEEDED":
                    raise self._failure(joined)
                logger.warning("%s: cannot join %s: %s", self.name, room_id, joined.message)

    async def _left_out(
        self, client: AsyncClient, room_id: str, since: str, until: str, newer: Collection[str]
    ) -> AsyncIterator[list[Event]]:
        """Yield the events of a room after the position `since` that a response left out, oldest first, in pages. They
        end at the position `until` or, if the homeserver ignores that, at an event in `newer`."""
        start: str | None = since
        while start is not None:
            page = await self._asked(client.room_messages(room_id, start, until, MessageDirection.front, _PAGE))
            known = [number for number, event in enumerate(page.chunk) if _id(event) in newer]
            yield page.chunk[: known[0]] if known else page.chunk
            start = None if known or page.end == start else page.end

    async def _deliver(self, client: AsyncClient, deliver: Deliver, room_id: str, events: Sequence[Event]) -> bool:
        """Deliver the messages among events. Return whether there were any."""
        found, room = False, client.rooms[room_id]
        for event in events:
            try:
                message = await self._incoming(client, room, event)
            except PlatformUnavailable:
                raise
            except Exception:  # anyone may send an invalid event, which must not block other events
                logger.exception("%s: the event %s cannot be read and is skipped", self.name, _id(event))
                continue
            if message is not None:
                found = True
                await deliver(message)
        return found

    async def _deliver_late(self, client: AsyncClient, deliver: Deliver, encryption: RoomEncryption) -> None:
        """Deliver messages whose key arrived after them, and notices about messages whose key does not arrive."""
        for room_id, event, readable in await encryption.late():
            room = client.rooms.get(room_id)
            if readable and room is not None:
                await self._deliver(client, deliver, room_id, [event])
            elif room is not None:
                notice = self._message(room, event, problem=UNREADABLE)
                await deliver(replace(notice, message_id=f"{event.event_id}/unreadable"))
            await encryption.settle(event, readable)

    def _message(self, room: MatrixRoom, event: Event, text: str = "", **more: Any) -> Incoming:
        relation = event.source.get("content", {}).get("m.relates_to") or {}
        thread = str(relation.get("event_id", "")) if relation.get("rel_type") == "m.thread" else ""
        address = ChatAddress(self.name, room.room_id, "dm" if room.member_count <= 2 else "group", thread)
        name = room.user_name(event.sender) or event.sender
        return Incoming(address, event.event_id, event.sender, text, user_name=name, **more)

    async def _incoming(self, client: AsyncClient, room: MatrixRoom, event: Event) -> Incoming | None:
        """Return the message of an event; None if it is not a message from a person, or waits for its key."""
        if event.sender == client.user_id:
            return None
        if isinstance(event, MegolmEvent):
            if self._encryption is None:
                return self._message(room, event, problem=ENCRYPTED)
            event = await self._encryption.decrypted(event, room.room_id)
        if event is None or isinstance(event, RoomMessageNotice):
            return None
        relation = event.source.get("content", {}).get("m.relates_to") or {}
        if relation.get("rel_type") == "m.replace" or not isinstance(event, RoomMessage):
            return None
        if self._encryption is not None and (problem := await self._encryption.objection(room, event)):
            return self._message(room, event, problem=problem)
        if isinstance(event, RoomMessageFormatted):
            return self._message(room, event, event.body)
        if isinstance(event, RoomMessageMedia | RoomEncryptedMedia):
            file, problem = await self._download(event)
            text = event.body if event.source["content"].get("filename", event.body) != event.body else ""
            return self._message(room, event, text, attachments=() if file is None else (file,), problem=problem)
        problem = "Messages of this kind are not supported. Send text, an image or a file."
        return self._message(room, event, problem=problem)

    async def _download(self, event: RoomMessageMedia | RoomEncryptedMedia) -> tuple[Attachment | None, str]:
        """Return the file of a message, or the problem with it."""
        content = event.source["content"]
        info = content.get("info") or {}
        name = str(content.get("filename") or event.body or "file")
        stated = info.get("size")
        size = stated if isinstance(stated, int) else 0
        if size > self._largest:
            return None, f"{name} has {size >> 20} MB; at most {self._largest >> 20} MB are accepted."
        place = _FILE.fullmatch(event.url)
        if place is None:  # not a media address; a request to it would send the bot's token elsewhere
            return None, f"{name} has no usable address, so it cannot be read."
        try:
            status, data = await self._request("GET", f"/_matrix/client/v1/media/download/{place[1]}/{place[2]}")
        except PlatformRefused:
            return None, f"{name} is larger than its message states; at most {self._largest >> 20} MB are accepted."
        if status != 200:
            return None, f"{name} could not be read from the homeserver (HTTP {status}); send it again."
        if isinstance(event, RoomEncryptedMedia):
            try:
                data = await asyncio.to_thread(decrypted_file, event, data)
            except (EncryptionError, KeyError, TypeError, ValueError):
                return None, f"{name} could not be decrypted; send it again."
        media_type = str(info.get("mimetype") or _MEDIA_TYPES.get(content.get("msgtype"), "application/octet-stream"))
        return Attachment(name, media_type, data), ""

    # Outgoing messages

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        return await self._send(address, {"msgtype": "m.text", "body": text}, key)

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        new = {"msgtype": "m.text", "body": text}
        relation = {"rel_type": "m.replace", "event_id": message_id}
        await self._send(address, {**new, "body": f"* {text}", "m.new_content": new, "m.relates_to": relation}, None)

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        room = self._running().rooms.get(address.chat_id)
        place: dict[str, JSON]
        if room is not None and room.encrypted and self._encryption is not None:
            data, keys = await asyncio.to_thread(encrypted_file, file.data)
            place = {"file": {**keys, "url": await self._upload("", "application/octet-stream", data)}}
        else:
            place = {"url": await self._upload(file.name, file.media_type, file.data)}
        content: dict[str, JSON] = {
            "msgtype": "m.image" if file.is_image else "m.file",
            "body": file.name,
            "filename": file.name,
            **place,
            "info": {"mimetype": file.media_type, "size": len(file.data)},
        }
        return await self._send(address, content, key)

    async def _upload(self, name: str, media_type: str, data: bytes) -> str:
        path = f"/_matrix/media/v3/upload?filename={quote(name)}" if name else "/_matrix/media/v3/upload"
        status, reply = await self._request("POST", path, data, {"Content-Type": media_type})
        if status != 200:
            raise self._status_failure(status, reply)
        return str(json.loads(reply)["content_uri"])

    async def stream_text(self, message: Incoming, text: str) -> None:
        raise NotImplementedError("this platform cannot stream answers")

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        if self._client is not None:
            with contextlib.suppress(PlatformError):
                async with self._failures():
                    await self._client.room_typing(address.chat_id, typing, timeout=_TYPING_MS)

    async def _send(self, address: ChatAddress, content: dict[str, JSON], key: str | None) -> str:
        client = self._running()
        room = client.rooms.get(address.chat_id)
        encryption = self._encryption if room is not None and room.encrypted else None
        if room is None and self._encryption is not None:
            raise PlatformRefused(f"{self.name}: the bot is not in the room {address.chat_id}")
        if room is not None and room.encrypted and encryption is None and content["body"] != ENCRYPTED:
            raise PlatformRefused(f"{self.name}: the room {address.chat_id} is encrypted, but the message would not be")
        if address.thread_id and "m.relates_to" not in content:
            content = {**content, "m.relates_to": {"rel_type": "m.thread", "event_id": address.thread_id}}
        async with contextlib.nullcontext() if encryption is None else encryption.sending(room):
            sent = await self._asked(client.room_send(address.chat_id, "m.room.message", content, tx_id=key))
        return str(sent.event_id)

    # The homeserver

    def _running(self) -> AsyncClient:
        if self._client is None:
            raise PlatformUnavailable(f"{self.name} is not connected")
        return self._client

    async def _read_position(self) -> str | None:
        status, data = await self._request("GET", self._position_path())
        if status == 404:
            return None
        if status != 200:
            raise self._status_failure(status, data)
        return str(json.loads(data).get("since") or "") or None

    async def _write_position(self, since: str) -> None:
        status, data = await self._request("PUT", self._position_path(), json.dumps({"since": since}).encode())
        if status != 200:
            raise self._status_failure(status, data)

    def _position_path(self) -> str:
        return f"/_matrix/client/v3/user/{quote(self._running().user_id)}/account_data/{SYNCED}"

    async def _request(
        self, method: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        client = self._running()
        given = {"Authorization": f"Bearer {client.access_token}", **(headers or {})}
        async with self._failures():
            reply = await client.send(method, path, data, given, timeout=120.0)
            async with reply:
                content = bytearray()
                async for chunk in reply.content.iter_any():
                    content += chunk
                    if len(content) > self._largest + (1 << 20):
                        raise PlatformRefused(f"{self.name}: the homeserver sends more than {self._largest >> 20} MB")
                return reply.status, bytes(content)

    async def _asked(self, request: Awaitable[Any]) -> Any:
        """Return the response to a request. Raises `PlatformError` if it fails."""
        async with self._failures():
            response = await request
        if isinstance(response, ErrorResponse):
            raise self._failure(response)
        return response

    @contextlib.asynccontextmanager
    async def _failures(self) -> AsyncIterator[None]:
        """Turn connection errors into `PlatformUnavailable`."""
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error, PlatformError):
                raise
            raise PlatformUnavailable(f"{self.name}: {self._homeserver} does not answer: {error!r:.200}") from error

    def _failure(self, error: ErrorResponse | object) -> PlatformError:
        code, message = getattr(error, "status_code", None), getattr(error, "message", str(error))
        problem = f"{self.name}: {self._homeserver} answers {code}: {message}"
        withdrawn = code == "M_UNKNOWN_TOKEN" and self._syncing is not None
        if withdrawn or code in _FOR_LATER or not isinstance(code, str) or not code.startswith("M_"):
            wait_ms = getattr(error, "retry_after_ms", None)
            return PlatformUnavailable(problem, wait_ms / 1000 if wait_ms else None)
        return PlatformRefused(problem)

    def _status_failure(self, status: int, data: bytes) -> PlatformError:
        said = without_middle(data.decode(errors="replace"), 200)
        problem = f"{self.name}: {self._homeserver} answers HTTP {status}: {said}"
        return PlatformUnavailable(problem) if status == 429 or status >= 500 else PlatformRefused(problem)


def _id(event: Event) -> str:
    """Return the id of an event, or the empty string: an invalid event may have none."""
    return str(getattr(event, "event_id", ""))
