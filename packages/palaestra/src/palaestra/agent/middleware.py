"""Chat middleware: a list of functions that can change an agent's model calls.

Each function gets the call and the next step, and returns the reply; the first function in the list is the outermost.
Tool calls have the same kind of middleware (`tools/runtime/runtime.py`). Recording, the freezing of slots and tracing
are implemented as middleware; code that only follows a run subscribes to its events instead (`events.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from palaestra_slots.core.errors import SandboxError
from palaestra_slots.core.types import JSON, Message
from palaestra_slots.sandbox.slot import Slot
from palaestra_tokens.chat_server import ChatServer, chat_server
from palaestra_tokens.engine import ChatCompletion, TextCompletion
from palaestra_tokens.ledger import Ledger

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ChatCall:
    """One model call. `branch` is 0 for the rollout's own conversation, else the sub-agent's number; `request` has the
    other arguments of `chat_completion`. The caller may extend `messages` once it has the reply."""

    branch: int
    messages: Sequence[Message]
    request: Mapping[str, JSON]


Ask: TypeAlias = Callable[[ChatCall], Awaitable[ChatCompletion]]
ChatMiddleware: TypeAlias = Callable[[ChatCall, Ask], Awaitable[ChatCompletion]]


def _before(middleware: ChatMiddleware, ask: Ask) -> Ask:
    def run(call: ChatCall) -> Awaitable[ChatCompletion]:
        return middleware(call, ask)

    return run


class MiddlewareServer(ChatServer):
    """The model server of one conversation of a rollout, wrapped in the middleware."""

    def __init__(self, server: object, middleware: Sequence[ChatMiddleware], branch: int = 0) -> None:
        self.server = chat_server(server)
        self.features = self.server.features
        self.branch = branch
        self._middleware = middleware
        ask: Ask = self._ask_server
        for each in reversed(middleware):
            ask = _before(each, ask)
        self._ask = ask

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        return await self._ask(ChatCall(self.branch, messages, request))

    async def completion(self, *, prompt: str, **request: JSON) -> TextCompletion:
        return await self.server.completion(prompt=prompt, **request)

    def _ask_server(self, call: ChatCall) -> Awaitable[ChatCompletion]:
        return self.server.chat_completion(messages=call.messages, **call.request)

    def is_over(self, messages: Sequence[Message]) -> bool:
        return self.server.is_over(messages)

    @property
    def ledger(self) -> Ledger | None:
        return self.server.ledger

    @property
    def segments(self) -> Sequence[int]:
        return self.server.segments

    def child(self, number: int = 0) -> MiddlewareServer:
        return MiddlewareServer(self.server.child(number), self._middleware, number)

    def get_state(self) -> dict[str, JSON] | None:
        return self.server.get_state()


def freezing(slot: Callable[[], Slot | None]) -> ChatMiddleware:
    """Return middleware that freezes a slot while the model thinks, so that the slot's background processes use no CPU.
    `slot` returns the slot, or None if there is nothing to freeze.

    The next call to the slot resumes it. A program that cannot be stopped keeps running. If the slot is lost, the next
    call to it fails.
    """

    async def freeze_slot(call: ChatCall, ask: Ask) -> ChatCompletion:
        to_freeze = slot()
        if to_freeze is not None:
            try:
                await to_freeze.freeze()
            except (SandboxError, OSError) as error:
                logger.warning("slot %s keeps running while the model thinks: %s", to_freeze.slot_id, error)
        return await ask(call)

    return freeze_slot
