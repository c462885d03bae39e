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
import logging
import re
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

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

from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import (
    Answers,
    Attachment,
    ChatAddress,
    Deliver,
    Incoming,
    PlatformLimits,
    PlatformNotes,
    with_quote,
)
from palaestra_gateway.platforms.matrix_encryption import (
    UNREADABLE,
    RoomEncryption,
    TrustPolicy,
    decrypted_file,
    encrypted_file,
)
from palaestra_gateway.platforms.matrix_server import MatrixServer
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import ConfigError, PlatformError, PlatformRefused, PlatformUnavailable
from palaestra_slots.core.types import JSON

logger = logging.getLogger(__name__)

ENCRYPTED = (
    "I cannot read this room, because it is encrypted. Please talk to me in a room without encryption, or ask my owner "
    "to install the extra gateway-e2ee."
)

_LONG_POLL_MS = 30_000
_SHORT_POLL_MS = 2_000
"""The time to wait for events while a message waits for its key."""
_TYPING_MS = 8_000
_QUOTED = re.compile(r"> (?:\* )?<@[^>]+>")
"""The beginning of a quoted message, which names its sender."""
_PAGE = 100
"""The number of events to request at once from a room's history."""
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
        token, homeserver = config.secret(name), config.extra.get("homeserver")
        if not isinstance(homeserver, str) or not homeserver.startswith(("http://", "https://")) or not token:
            raise ConfigError(
                f"platforms.{name} needs token, the bot's access token, and extra.homeserver, such as "
                "https://matrix.example.org"
            )
        self._largest = self.limits.max_file_bytes
        self._server = MatrixServer(name, homeserver.rstrip("/"), token, self._largest + (1 << 20))
        policy = config.extra.get("device_trust", "first_use")
        if policy not in ("first_use", "verified"):
            raise ConfigError(f"platforms.{name}.extra.device_trust is {policy!r}; use first_use or verified")
        self._policy: TrustPolicy = policy
        self.notes: PlatformNotes | None = None
        self.folder: Path | None = None
        self._encryption: RoomEncryption | None = None
        self._syncing: asyncio.Task[None] | None = None

    async def start(self, deliver: Deliver) -> None:
        await self.stop()
        client = self._server.open(None if self.notes is None else self.folder)
        try:
            who = await self._server.ask(client.whoami())
            client.user_id, client.device_id = who.user_id, who.device_id or ""
            await self._begin_encryption(client)
            since = await self._server.read_position()
            first = await self._sync(client, since, full=True)
            if since is None:
                await self._join(client, first.rooms.invite)
                await self._server.write_position(first.next_batch)
        except BaseException:
            await self.stop()
            raise
        self._server.accepted = True
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
        self._encryption = RoomEncryption(self.name, client, self.notes, self._policy, self._server.ask)
        await self._encryption.begin()

    async def stop(self) -> None:
        syncing, self._syncing = self._syncing, None
        await end_tasks(syncing)
        self._encryption = None
        await self._server.aclose()

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
                if await self._take_response(client, deliver, position, response):
                    await self._server.write_position(response.next_batch)
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
        response: SyncResponse = await self._server.ask(request)
        return response

    async def _take_response(self, client: AsyncClient, deliver: Deliver, since: str, response: SyncResponse) -> bool:
        """Deliver messages, and join the rooms to which the bot is invited. Return False if there were neither
        messages nor invitations."""
        found = bool(response.rooms.invite)
        for room_id, info in response.rooms.join.items():
            timeline = info.timeline
            if timeline.limited and timeline.prev_batch:
                newer = {_id(event) for event in timeline.events} - {""}
                async for events in self._left_out(client, room_id, since, timeline.prev_batch, newer):
                    found |= await self._deliver_events(client, deliver, room_id, events)
            found |= await self._deliver_events(client, deliver, room_id, timeline.events)
        await self._join(client, response.rooms.invite)  # after the messages, so that no invitation holds them up
        return found

    async def _join(self, client: AsyncClient, rooms: Iterable[str]) -> None:
        for room_id in rooms:
            async with self._server.failures():
                joined = await client.join(room_id)
            if isinstance(joined, JoinError):
                if joined.status_code == "M_LIMIT_EXCEEDED":
                    raise self._server.failure(joined)
                logger.warning("%s: cannot join %s: %s", self.name, room_id, joined.message)

    async def _left_out(
        self, client: AsyncClient, room_id: str, since: str, until: str, newer: Collection[str]
    ) -> AsyncIterator[list[Event]]:
        """Yield the events of a room after the position `since` that a response left out, oldest first, in pages. They
        end at the position `until` or, if the homeserver ignores that, at an event in `newer`."""
        start: str | None = since
        while start is not None:
            page = await self._server.ask(client.room_messages(room_id, start, until, MessageDirection.front, _PAGE))
            known = [number for number, event in enumerate(page.chunk) if _id(event) in newer]
            yield page.chunk[: known[0]] if known else page.chunk
            start = None if known or page.end == start else page.end

    async def _deliver_events(
        self, client: AsyncClient, deliver: Deliver, room_id: str, events: Sequence[Event]
    ) -> bool:
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
                await self._deliver_events(client, deliver, room_id, [event])
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
            return self._message(
                room, event, _with_quote_last(event.body) if "m.in_reply_to" in relation else event.body
            )
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
            status, data = await self._server.request("GET", f"/_matrix/client/v1/media/download/{place[1]}/{place[2]}")
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
        return await self._send_event(address, {"msgtype": "m.text", "body": text}, key)

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        new = {"msgtype": "m.text", "body": text}
        relation = {"rel_type": "m.replace", "event_id": message_id}
        await self._send_event(
            address, {**new, "body": f"* {text}", "m.new_content": new, "m.relates_to": relation}, None
        )

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        room = self._server.running().rooms.get(address.chat_id)
        place: dict[str, JSON]
        if room is not None and room.encrypted and self._encryption is not None:
            data, keys = await asyncio.to_thread(encrypted_file, file.data)
            place = {"file": {**keys, "url": await self._server.upload("", "application/octet-stream", data)}}
        else:
            place = {"url": await self._server.upload(file.name, file.media_type, file.data)}
        content: dict[str, JSON] = {
            "msgtype": "m.image" if file.is_image else "m.audio" if file.is_audio else "m.file",
            "body": file.name,
            "filename": file.name,
            **place,
            "info": {"mimetype": file.media_type, "size": len(file.data)},
        }
        return await self._send_event(address, content, key)

    async def stream_text(self, message: Incoming, text: str) -> None:
        raise NotImplementedError("this platform cannot stream answers")

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        with contextlib.suppress(PlatformError):
            client = self._server.running()
            await self._server.ask(client.room_typing(address.chat_id, typing, timeout=_TYPING_MS))

    async def _send_event(self, address: ChatAddress, content: dict[str, JSON], key: str | None) -> str:
        client = self._server.running()
        room = client.rooms.get(address.chat_id)
        encryption = self._encryption if room is not None and room.encrypted else None
        if room is None and self._encryption is not None:
            raise PlatformRefused(f"{self.name}: the bot is not in the room {address.chat_id}")
        if room is not None and room.encrypted and encryption is None and content["body"] != ENCRYPTED:
            raise PlatformRefused(f"{self.name}: the room {address.chat_id} is encrypted, but the message would not be")
        if address.thread_id and "m.relates_to" not in content:
            content = {**content, "m.relates_to": {"rel_type": "m.thread", "event_id": address.thread_id}}
        async with contextlib.nullcontext() if encryption is None else encryption.sending(room):
            sent = await self._server.ask(client.room_send(address.chat_id, "m.room.message", content, tx_id=key))
        return str(sent.event_id)


def _with_quote_last(body: str) -> str:
    """Return the body of a reply with the quoted message after the person's text. Some programs put it before the text,
    as https://spec.matrix.org/v1.12/client-server-api/#fallbacks-for-rich-replies describes."""
    if not _QUOTED.match(body):
        return body
    lines = body.split("\n")
    quoted = list(takewhile(lambda line: line.startswith(">"), lines))
    text = "\n".join(lines[len(quoted) :]).removeprefix("\n")
    return with_quote(
        text, "\n".join(line[1:].removeprefix(" ") for line in [_QUOTED.sub(">", quoted[0]), *quoted[1:]])
    )


def _id(event: Event) -> str:
    """Return the id of an event, or the empty string: an invalid event may have none."""
    return str(getattr(event, "event_id", ""))
