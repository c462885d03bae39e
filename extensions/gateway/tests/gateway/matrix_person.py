"""A person in an encrypted Matrix room, with a client and a device of their own."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nio import AsyncClient, AsyncClientConfig, MegolmEvent, RoomMessage
from nio.crypto.attachments import decrypt_attachment, encrypt_attachment
from nio.store import SqliteStore

from gateway.synapse import Account
from palaestra_gateway.platform import Attachment


class MatrixPerson:
    """`account` is logged in with a device. `read` follows the room; `messages` are the decrypted contents of others'
    messages by event id, edited ones as they are now; `undecrypted` counts the rest."""

    def __init__(self, account: Account, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.account = account
        self.messages: dict[str, Any] = {}
        self.undecrypted: set[str] = set()
        self.client = AsyncClient(
            account.url, store_path=str(folder), config=AsyncClientConfig(encryption_enabled=True, store=SqliteStore)
        )
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def online(self):
        who = await asyncio.to_thread(self.account.call, "GET", "/account/whoami")
        self.client.restore_login(who["user_id"], who["device_id"], self.account.token)
        try:
            await self.read()
            yield self
        finally:
            await self.client.close()
            self.client.store.database.close()

    @property
    def fingerprint(self) -> str:
        return str(self.client.olm.account.identity_keys["ed25519"])

    async def read(self) -> None:
        """Read what is new, and send the keys that are due."""
        async with self._lock:
            response = await self.client.sync(
                timeout=0, full_state=not self.client.next_batch, sync_filter={"room": {"timeline": {"limit": 1000}}}
            )
            if self.client.should_upload_keys:
                await self.client.keys_upload()
            if self.client.should_query_keys:
                await self.client.keys_query()
            await self.client.send_to_device_messages()
            for room in response.rooms.join.values():
                for event in room.timeline.events:
                    self._note(event)

    def _note(self, event: Any) -> None:
        if event.sender == self.client.user_id:
            return
        if isinstance(event, MegolmEvent):
            self.undecrypted.add(event.event_id)
        elif isinstance(event, RoomMessage):
            content = event.source["content"]
            relation = content.get("m.relates_to") or {}
            replaces = relation.get("rel_type") == "m.replace"
            self.messages[relation["event_id"] if replaces else event.event_id] = (
                content["m.new_content"] if replaces else {**content, "encrypted": event.decrypted}
            )

    async def say(self, room: str, text: str, **more: Any) -> str:
        return await self.send(room, {"msgtype": "m.text", "body": text, **more})

    async def send(self, room: str, content: dict[str, Any]) -> str:
        if room not in self.client.rooms or self.client.should_query_keys:
            await self.read()
        async with self._lock:
            sent = await self.client.room_send(room, "m.room.message", content, ignore_unverified_devices=True)
        return str(sent.event_id)

    async def send_file(self, room: str, file: Attachment, text: str) -> str:
        data, keys = encrypt_attachment(file.data)
        uri = await asyncio.to_thread(self.account.upload, "", data)
        info = {"mimetype": file.media_type, "size": len(file.data)}
        kind = "m.image" if file.is_image else "m.file"
        content = {"msgtype": kind, "body": text, "filename": file.name, "info": info, "file": {**keys, "url": uri}}
        return await self.send(room, content)

    async def file(self, content: dict[str, Any]) -> bytes:
        """Return the content of an encrypted file."""
        file = content["file"]
        data = await asyncio.to_thread(self.account.download, file["url"])
        plain: bytes = decrypt_attachment(data, file["key"]["k"], file["hashes"]["sha256"], file["iv"])
        return plain

    async def wait_for(self, count: int) -> list[Any]:
        """Wait for a number of messages of others, and return their contents in order."""
        async with asyncio.timeout(60):
            while len(self.messages) < count:
                await asyncio.sleep(0.1)
                await self.read()
        return list(self.messages.values())
