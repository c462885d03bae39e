"""Slots that stand still while the model thinks: what an agent left running costs nothing then, and changes nothing.

Not for how a slot is stopped (`sandbox/slotd/freezing`). Any call to the slot lets it go on. Invariant: nothing is
stopped while a tool call is under way, a sub-agent's model included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from palaestra.core.errors import SandboxError
from palaestra.core.types import JSON, Message
from palaestra.inference.engine import ChatCompletion, ChatServer
from palaestra.sandbox.slot import Slot

logger = logging.getLogger(__name__)


class FreezingServer:
    """A chat server that stops the slot it is told, if any, before each request. Whatever else it has is the server's.

    A program that will not stop goes on; a slot that is lost is found out by the next call to it.
    """

    def __init__(self, server: ChatServer, slot: Callable[[], Slot | None]) -> None:
        self._server = server
        self._slot = slot

    def __getattr__(self, name: str) -> JSON:
        return getattr(self._server, name)

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        """One reply, as the server's."""
        slot = self._slot()
        if slot is not None:
            try:
                await slot.freeze()
            except (SandboxError, OSError) as error:
                logger.warning("slot %s goes on while the model thinks: %s", slot.slot_id, error)
        return await self._server.chat_completion(messages=messages, **request)
