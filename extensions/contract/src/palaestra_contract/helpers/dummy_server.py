"""`DummyManagedServer`: what `managed_server()` of a chat server returns if `allow_placeholder_tokens` is set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from palaestra.agent.result import SequenceData
from palaestra_contract.scored_data import placeholder_tokens
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.engine import ChatCompletion, TextCompletion


class DummyManagedServer(ChatServer):
    """Chats with a server that returns no tokens. Each reply adds a node with placeholder tokens to the state. All of
    them are masked, so they train nothing."""

    def __init__(self, server: ChatServer) -> None:
        self._server = server
        self._nodes: list[SequenceData] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: the nodes stay readable."""

    async def chat_completion(self, **request: JSON) -> ChatCompletion:
        reply = await self._server.chat_completion(**request)
        for choice in reply.choices:
            self._add_sequence([*request["messages"], {"role": "assistant", "content": choice.message.content}])
        return reply

    async def completion(self, *, prompt: str, **request: JSON) -> TextCompletion:
        reply = await self._server.completion(prompt=prompt, **request)
        for choice in reply.choices:
            self._add_sequence([{"role": "user", "content": prompt}, {"role": "assistant", "content": choice.text}])
        return reply

    def get_state(self) -> dict[str, JSON]:
        """Return `{"nodes"}`, the nodes of all replies."""
        return {"nodes": list(self._nodes)}

    def reset(self) -> None:
        """Forget the nodes."""
        self._nodes.clear()

    def _add_sequence(self, messages: Iterable[Message]) -> None:
        said = list(messages)
        tokens = placeholder_tokens(said) or [0]
        text = "\n".join(str(message.get("content") or "") for message in said)
        self._nodes.append(SequenceData(text, tokens, [-100] * len(tokens), [1.0] * len(tokens)))
