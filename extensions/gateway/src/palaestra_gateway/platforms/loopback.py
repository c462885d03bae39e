"""The loopback platform: a chat inside this process, for programs that embed a gateway, and for tests and benchmarks.

    platform = Loopback()
    await platform.say("hello", chat_id="anna")
    reply = await platform.receive("anna")

`outage` makes every send fail as if the platform's server did not answer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from palaestra_gateway.platform import (
    Answers,
    Attachment,
    ChatAddress,
    ChatType,
    Deliver,
    Incoming,
    PlatformLimits,
)
from palaestra_slots.core.errors import PlatformUnavailable

LIMITS = PlatformLimits(max_text=4000, edits=True, typing=True, streams=True, idempotent=True)


@dataclass(frozen=True, slots=True)
class Received:
    """A message that the gateway sent. `text` is its latest version; a file has no text."""

    message_id: str
    address: ChatAddress
    key: str
    text: str = ""
    file: Attachment | None = None
    answers: Answers | None = None


class Loopback:
    """Chats by id. `sent` contains every message from the gateway, in order. `typing` contains the chats that show a
    typing notice. `streamed` maps the id of a message to the streamed text of its answer."""

    def __init__(self, name: str = "loopback", limits: PlatformLimits = LIMITS) -> None:
        self.name = name
        self.limits = limits
        self.outage = False
        self.sent: list[Received] = []
        self.typing: set[str] = set()
        self.streamed: dict[str, str] = {}
        self._by_key: dict[str, Received] = {}
        self._deliver: Deliver | None = None
        self._numbers = itertools.count(1)
        self._arrived: dict[str, asyncio.Queue[Received]] = {}

    async def start(self, deliver: Deliver) -> None:
        self._deliver = deliver

    async def stop(self) -> None:
        self._deliver = None

    async def say(
        self,
        text: str,
        *,
        chat_id: str = "me",
        user_id: str = "me",
        message_id: str | None = None,
        attachments: Sequence[Attachment] = (),
        chat_type: ChatType = "dm",
        thread_id: str = "",
    ) -> str:
        """Send a message as a person; returns its id once the gateway has it on the disk. Raises
        `PlatformUnavailable` while the gateway is stopped."""
        if self._deliver is None:
            raise PlatformUnavailable(f"the gateway of {self.name} is not running")
        number = message_id or f"m{next(self._numbers)}"
        address = ChatAddress(self.name, chat_id, chat_type, thread_id)
        await self._deliver(Incoming(address, number, user_id, text, tuple(attachments), user_name=user_id))
        return number

    async def receive(self, chat_id: str = "me", timeout_s: float = 30.0) -> Received:
        """Return the gateway's next message to a chat. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            return await self._queue(chat_id).get()

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        return self._send_once(Received(f"g{next(self._numbers)}", address, key, text=text, answers=answers))

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        return self._send_once(Received(f"g{next(self._numbers)}", address, key, file=file, answers=answers))

    async def stream_text(self, message: Incoming, text: str) -> None:
        self.streamed[message.message_id] = self.streamed.get(message.message_id, "") + text

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        self._check_outage()
        for place, message in enumerate(self.sent):
            if message.message_id == message_id:
                self.sent[place] = replace(message, text=text)

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        if typing:
            self.typing.add(address.chat_id)
        else:
            self.typing.discard(address.chat_id)

    def _send_once(self, message: Received) -> str:
        self._check_outage()
        earlier = self._by_key.setdefault(message.key, message)
        if earlier is not message:
            return earlier.message_id
        self.sent.append(message)
        self._queue(message.address.chat_id).put_nowait(message)
        return message.message_id

    def _check_outage(self) -> None:
        if self.outage:
            raise PlatformUnavailable(f"{self.name} does not answer")

    def _queue(self, chat_id: str) -> asyncio.Queue[Received]:
        return self._arrived.setdefault(chat_id, asyncio.Queue())
