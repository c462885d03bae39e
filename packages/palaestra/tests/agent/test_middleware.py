"""A conversation asks its server through the middleware, and has the server's own capabilities."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from palaestra.agent.middleware import Ask, ChatCall, ChatMiddleware, MiddlewareServer
from palaestra_slots.core.errors import EngineError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.ledger import Ledger


class Exact(ChatServer):
    """Keeps a ledger, and a conversation apart for each sub-agent."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._ledger = Ledger()

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def segments(self) -> Sequence[int]:
        return (self.number,)

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        return ChatCompletion(id=f"{self.number}", choices=[])

    def child(self, number: int = 0) -> Exact:
        return Exact(number)

    def get_state(self) -> dict[str, JSON]:
        return {"ledger": self._ledger}


def noting(name: str, seen: list[tuple[str, int]]) -> ChatMiddleware:
    async def note(call: ChatCall, ask: Ask) -> ChatCompletion:
        seen.append((name, call.branch))
        return await ask(call)

    return note


async def test_the_first_middleware_is_the_outermost_and_sub_agents_go_through_the_same() -> None:
    seen: list[tuple[str, int]] = []
    server = Exact()
    conversation = MiddlewareServer(server, [noting("a", seen), noting("b", seen)])
    assert conversation.ledger is server.ledger
    assert conversation.get_state() == {"ledger": server.ledger}
    child = conversation.child(2)
    assert child.segments == (2,)
    result = [(await each.chat_completion(messages=[])).id for each in (conversation, child)]
    assert result == ["0", "2"]
    assert seen == [("a", 0), ("b", 0), ("a", 2), ("b", 2)]


async def test_a_foreign_server_only_chats_and_fails_as_a_server() -> None:
    class Client:
        async def chat_completion(self, **request: JSON) -> JSON:
            raise KeyError("choices")

    conversation = MiddlewareServer(Client(), [])
    assert conversation.ledger is None
    assert conversation.get_state() is None
    with pytest.raises(EngineError, match="KeyError"):
        await conversation.chat_completion(messages=[])
