"""End-to-end encryption of Matrix rooms, with the Olm and Megolm implementation vodozemac (extra `gateway-e2ee`).

The keys of the bot's device are in an SQLite file in the gateway's home, which only the owner may read. The device
belongs to the access token, so it stays the same over restarts.

Trust: a device's keys are pinned when the device is first seen. With the policy `first_use`, such a device may read and
write until the owner blocks it; with `verified`, only after the owner verified it. A message is accepted only if it was
encrypted by a device that its sender's device list contains.

A message whose key is missing is kept in the mailbox until the key arrives. Its key is requested from the sender's
device. If the key does not come within `KEY_PATIENCE_S`, the sender gets a notice.

Format: https://spec.matrix.org/latest/client-server-api/#end-to-end-encryption
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from nio import (
    Api,
    AsyncClient,
    AsyncClientConfig,
    Event,
    KeysUploadResponse,
    MatrixRoom,
    MegolmEvent,
    RoomEncryptedMedia,
    SyncResponse,
)
from nio.crypto import ENCRYPTION_ENABLED
from nio.exceptions import EncryptionError, LocalProtocolError

from palaestra_gateway.platform import PlatformNotes
from palaestra_gateway.platforms.cross_signing import CrossSigning
from palaestra_gateway.platforms.devices import DeviceState, KnownDevice, known_devices, remember
from palaestra_slots.core.errors import PlatformRefused, PlatformUnavailable

logger = logging.getLogger(__name__)

TrustPolicy: TypeAlias = Literal["first_use", "verified"]
Asked: TypeAlias = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Awaits a request, and raises a `PlatformError` if it fails."""

KEY_PATIENCE_S = 10.0
"""How long to wait for the key of a message before its sender gets a notice, in seconds."""
MOST_UNREAD = 500
"""The maximum number of messages that wait for their key; the oldest ones are then dropped, after their notice."""
UNREADABLE = (
    "I cannot decrypt your message, because your device did not send me its key. I requested the key, and will answer "
    "if it arrives. Otherwise please send the message again."
)
NOT_ENCRYPTED = "This room is encrypted, but your message was not, so I did not accept it."
UNKNOWN_SENDER = "Your message was encrypted by a device that is not in your list of devices, so I did not accept it."
_UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class _OwnKeys:
    """What the homeserver knows of the bot's device, and of the account's master key (or the empty string)."""

    device: dict[str, Any]
    master_key: str


class EncryptedClient(AsyncClient):  # type: ignore[misc]
    """A client that keeps its keys consistent when it is killed."""

    async def receive_response(self, response: Any) -> None:
        """Store everything that a response changes in one transaction: otherwise, a key could be lost between the
        decryption of the message that brings it and its storing."""
        if self.store is None or not isinstance(response, SyncResponse):
            await super().receive_response(response)
            return
        with self.store.database.atomic():  # without callbacks, nothing else runs in between
            await super().receive_response(response)

    async def keys_upload(self) -> Any:
        """Upload keys, after their secret parts are stored."""
        content = self.olm.share_keys()
        self.olm.save_account()
        method, path, data = Api.keys_upload(self.access_token, content)
        return await self._send(KeysUploadResponse, method, path, data)


def make_client(homeserver: str, folder: Path | None, *, timeout_s: float) -> AsyncClient:
    """Return a client without retries of its own. It can encrypt if `folder` is set and the extra is installed."""
    given: dict[str, Any] = {"max_timeouts": 0, "max_limit_exceeded": 0, "request_timeout": timeout_s}
    if folder is None or not ENCRYPTION_ENABLED:
        return AsyncClient(homeserver, config=AsyncClientConfig(encryption_enabled=False, store=None, **given))
    from nio.store import SqliteStore

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    settings = AsyncClientConfig(encryption_enabled=True, store=SqliteStore, pickle_key="palaestra", **given)
    return EncryptedClient(homeserver, store_path=str(folder), config=settings)


class RoomEncryption:
    """The keys and devices of one account. `asked` sends the requests."""

    def __init__(self, name: str, client: AsyncClient, notes: PlatformNotes, policy: TrustPolicy, asked: Asked) -> None:
        self._name, self._client, self._notes, self._policy, self._asked = name, client, notes, policy, asked
        self._rooms: dict[str, asyncio.Lock] = {}
        self._unread: dict[str, dict[str, Any]] = {}

    @property
    def waits(self) -> bool:
        """Whether a message waits for its key, and its sender has no notice yet."""
        return any(not each["noticed"] for each in self._unread.values())

    async def begin(self) -> None:
        """Load the keys of the device, or make them. Raises `PlatformRefused` if the device has other keys, because
        people's devices would not accept new ones."""
        client = self._client
        client.restore_login(client.user_id, client.device_id, client.access_token)
        for file in Path(client.store_path).iterdir():
            file.chmod(0o600)
        self._unread = json.loads((await self._notes.read()).get(_UNREAD, "{}"))
        own = client.olm.account.identity_keys["ed25519"]
        found = await self._own_keys()
        known = found.device.get("keys", {}).get(f"ed25519:{client.device_id}")
        if known is not None and known != own:
            raise PlatformRefused(
                f"{self._name}: device {client.device_id} already has other encryption keys than those in "
                f"{client.store_path}. Restore that folder, or log in again and set the new access token"
            )
        if known is None:
            client.olm.account.shared = False
        if client.should_upload_keys:
            await self._asked(client.keys_upload())
        await remember(self._notes, KnownDevice(client.user_id, client.device_id, own, "own", "this gateway"))
        await self._cross_sign(found.master_key)

    async def _own_keys(self) -> _OwnKeys:
        user_id = self._client.user_id
        path = "/_matrix/client/v3/keys/query"
        status, found = await self._post(path, {"device_keys": {user_id: []}})
        if status != 200:
            raise PlatformUnavailable(f"{self._name}: the homeserver answers HTTP {status} to {path}")
        device = found.get("device_keys", {}).get(user_id, {}).get(self._client.device_id, {})
        keys = found.get("master_keys", {}).get(user_id, {}).get("keys", {})
        return _OwnKeys(device, next(iter(keys.values()), ""))

    async def _cross_sign(self, master_key: str) -> None:
        """Sign the bot's device with the account's keys, and make these if the account has none."""
        signing = CrossSigning(self._client.user_id, Path(self._client.store_path))
        if not master_key:
            if not signing.exists:
                signing.make()
            status, _ = await self._post("/_matrix/client/v3/keys/device_signing/upload", signing.upload())
            if status != 200:
                logger.warning(
                    "%s: the homeserver does not accept keys for cross-signing (HTTP %d)", self._name, status
                )
                return
        elif not signing.exists or signing.public("master") != master_key:
            logger.info("%s: another client of the account has its keys; verify the device there", self._name)
            return
        device = (await self._own_keys()).device
        if not signing.has_signed(device):
            body = {self._client.user_id: {self._client.device_id: signing.signed_device(device)}}
            status, _ = await self._post("/_matrix/client/v3/keys/signatures/upload", body)
            if status != 200:
                logger.warning("%s: the device was not cross-signed (HTTP %d)", self._name, status)

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self._client.access_token}", "Content-Type": "application/json"}
        reply = await self._asked(self._client.send("POST", path, json.dumps(body), headers, timeout=30.0))
        async with reply:
            found: dict[str, Any] = await reply.json() if reply.status == 200 else {}
            return reply.status, found

    async def tend(self, response: SyncResponse | None) -> None:
        """Send what a response makes necessary: new one-time keys, requests for device lists, and key requests."""
        client = self._client
        if response is not None:
            client.olm.uploaded_key_count = response.device_key_count.signed_curve25519 or 0
        if client.should_upload_keys:
            await self._asked(client.keys_upload())
        await self._query()
        if client.should_claim_keys:
            await self._asked(client.keys_claim(client.get_users_for_key_claiming()))
        for message in list(client.outgoing_to_device_messages):
            await self._asked(client.to_device(message))

    async def _query(self) -> None:
        if self._client.should_query_keys:
            await self._asked(self._client.keys_query())

    # Incoming messages

    async def decrypted(self, event: MegolmEvent, room_id: str) -> Event | None:
        """Return a decrypted event; None if its key is missing. Then it waits for the key."""
        if (read := self._decrypt(event, room_id)) is not None:
            return read
        if event.event_id not in self._unread:
            row = {"room_id": room_id, "event": event.source, "since": time.time(), "noticed": False}
            self._unread = dict([*self._unread.items(), (event.event_id, row)][-MOST_UNREAD:])
            await self._store_unread()
            self._request_key(event)
        return None

    def _decrypt(self, event: MegolmEvent, room_id: str) -> Event | None:
        event.room_id = room_id
        with contextlib.suppress(EncryptionError):
            return self._client.decrypt_event(event)
        return None

    def _request_key(self, event: MegolmEvent) -> None:
        """Queue a request for a key, which `tend` sends, unless there is one."""
        client = self._client
        queued = {getattr(each, "request_id", "") for each in client.outgoing_to_device_messages}
        if event.session_id not in {*client.outgoing_key_requests, *queued}:
            client.outgoing_to_device_messages.append(
                event.as_key_request(event.sender, client.device_id, event.session_id, event.device_id)
            )

    async def late(self) -> list[tuple[str, MegolmEvent, bool]]:
        """Return the room and the event of each message that can be decrypted now (true), or whose sender must get a
        notice (false). Call `settle` once a message, or its notice, is delivered."""
        found = []
        for row in self._unread.values():
            event, room_id = MegolmEvent.from_dict(row["event"]), row["room_id"]
            if self._decrypt(event, room_id) is not None:
                found.append((room_id, event, True))
            elif not row["noticed"] and time.time() - row["since"] >= KEY_PATIENCE_S:
                found.append((room_id, event, False))
        return found

    async def settle(self, event: MegolmEvent, read: bool) -> None:
        """Record that a message, or its notice, is delivered."""
        if read:
            self._unread.pop(event.event_id, None)
        elif event.event_id in self._unread:
            self._unread[event.event_id]["noticed"] = True
        await self._store_unread()

    async def _store_unread(self) -> None:
        await self._notes.write(_UNREAD, json.dumps(self._unread))

    async def objection(self, room: MatrixRoom, event: Event) -> str:
        """Return why a message of an encrypted room must not be accepted, or the empty string."""
        if not room.encrypted:
            return ""
        if not event.decrypted:
            return NOT_ENCRYPTED
        client = self._client
        device = client.device_store.device_from_sender_key(event.sender, event.sender_key)
        if device is None:
            client.users_for_key_query.add(event.sender)
            await self._query()
            device = client.device_store.device_from_sender_key(event.sender, event.sender_key)
        session = client.olm.inbound_group_store.get(room.room_id, event.sender_key, event.session_id)
        if device is None or session is None or session.forwarding_chain or session.ed25519 != device.ed25519:
            return UNKNOWN_SENDER
        state = (await self._states([device]))[0]
        if state == "blocked" or (self._policy == "verified" and state != "verified"):
            verify = f"palaestra gateway verify {self._name} {event.sender} {device.id}"
            return f"Your device {device.id} is not trusted. The owner can run: {verify}"
        return ""

    async def _states(self, devices: Sequence[Any]) -> list[DeviceState]:
        """Return what the owner decided about devices; a device that was not seen before is remembered."""
        known = await known_devices(self._notes)
        states: list[DeviceState] = []
        for each in devices:
            row = known.get((each.user_id, each.id))
            if row is None:
                row = KnownDevice(each.user_id, each.id, each.ed25519, name=each.display_name or "")
                await remember(self._notes, row)
                logger.warning("%s: %s uses the device %s for the first time", self._name, each.user_id, each.id)
            states.append(row.state if row.fingerprint == each.ed25519 else "blocked")
        return states

    # Outgoing messages

    @contextlib.asynccontextmanager
    async def sending(self, room: MatrixRoom) -> Any:
        """Share the room's current key with the devices that may read, so that a message can be sent in the block.
        Raises `PlatformUnavailable` if a device did not get the key."""
        client, room_id = self._client, room.room_id
        async with self._rooms.setdefault(room_id, asyncio.Lock()):
            if not room.members_synced:
                await self._asked(client.joined_members(room_id))
            await self._query()
            await self._apply_decisions(room)
            if client.olm.should_share_group_session(room_id):
                await self._share(room)
            try:
                yield
            except (EncryptionError, LocalProtocolError) as error:
                raise PlatformUnavailable(f"{self._name}: a message was not encrypted: {error}") from error

    async def _apply_decisions(self, room: MatrixRoom) -> None:
        devices = list(self._devices(room))
        for device, state in zip(devices, await self._states(devices), strict=True):
            allowed = state == "verified" or (self._policy == "first_use" and state == "seen")
            if allowed == self._client.olm.is_device_blacklisted(device):  # a change ends the room's key
                change = self._client.unblacklist_device if allowed else self._client.blacklist_device
                change(device)

    def _devices(self, room: MatrixRoom) -> Iterable[Any]:
        """The devices of the room's members, without the bot's own one."""
        for user_id in room.users:
            for device in self._client.device_store.active_user_devices(user_id):
                if (user_id, device.id) != (self._client.user_id, self._client.device_id):
                    yield device

    async def _share(self, room: MatrixRoom) -> None:
        client, room_id = self._client, room.room_id
        if missing := client.get_missing_sessions(room_id):
            await self._asked(client.keys_claim(missing))
        try:
            await self._asked(client.share_group_session(room_id, ignore_unverified_devices=True))
        finally:
            client.sharing_session.pop(room_id, None)  # the client leaves it behind if a request fails
        session = client.olm.outbound_group_sessions[room_id]
        reached = session.users_shared_with | session.users_ignored
        for device in self._devices(room):  # the client does not report that a device was not reached
            if (device.user_id, device.id) not in reached and client.olm.session_store.get(device.curve25519):
                client.invalidate_outbound_session(room_id)
                raise PlatformUnavailable(f"{self._name}: the key of {room_id} was not sent to {device.id}")


def encrypted_file(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """Return an encrypted file, and the keys that the message about it contains."""
    from nio.crypto.attachments import encrypt_attachment

    encrypted, keys = encrypt_attachment(data)
    return encrypted, keys


def decrypted_file(event: RoomEncryptedMedia, data: bytes) -> bytes:
    """Return the content of an encrypted file. Raises `EncryptionError` if its hash is wrong."""
    from nio.crypto.attachments import decrypt_attachment

    plain: bytes = decrypt_attachment(data, event.key["k"], event.hashes["sha256"], event.iv)
    return plain
