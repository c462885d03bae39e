"""The model servers that the agent calls, and the engines that open a session for each rollout."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from palaestra_slots.core.errors import ConfigError, EngineError
from palaestra_slots.core.types import JSON, Message, Task
from palaestra_slots.core.user_code import ForeignError, foreign
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import ChatCompletion, TextCompletion
from palaestra_tokens.ledger import Ledger, Piece, SegmentReason


@dataclass(frozen=True, slots=True)
class SessionContext:
    """The rollout that a session belongs to. A token-exact engine uses only `rollout_id`, and other engines that call a
    model use none of these fields. A scripted engine plays `task`. `branch` is 0 for the rollout's own conversation and
    the number of the sub-agent otherwise. `tools` are the names of the agent's tools, or None if they are unknown."""

    rollout_id: str = ""
    task: Task | None = None
    index: int = 0
    seeded: Callable[[], random.Random] = random.Random
    branch: int = 0
    tools: Collection[str] | None = None

    @property
    def rng(self) -> random.Random:
        return self.seeded()


class ChatServer:
    """The interface of a model server for the agent loop. Environments call it as `self.server`.

    `ledger` has the exact tokens of the server's conversations; it is None for a server without exact tokens. A resumed
    rollout sets `recorded`, which returns the recorded sample for a prompt's checksum; only servers with a ledger use
    it. `segments` are the ledger segments of this server's own conversation.
    """

    recorded: Callable[[int], list[Piece] | None] | None = None
    features: frozenset[str] = frozenset()
    """The inputs accepted in addition to text, tools and sampling settings: `images`, `response_format`, `tool_choice`,
    and `on_delta`, a hook that gets the reply as it is written. Engines may also accept `on_ids`, a hook that gets
    token ids."""

    @property
    def ledger(self) -> Ledger | None:
        return None

    @property
    def segments(self) -> Sequence[int]:
        return ()

    async def chat_completion(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        n: int = 1,
        extra_body: Mapping[str, JSON] | None = None,
        **sampling: JSON,
    ) -> ChatCompletion:
        """Sample `n` replies. Raises `EngineError` after the retries."""
        raise NotImplementedError

    async def completion(self, *, prompt: str, **request: JSON) -> TextCompletion:
        """Continue a text. Raises `ConfigError` for a server that supports only chat completions."""
        raise ConfigError(f"{type(self).__name__} supports only chat completions and cannot continue a text")

    def is_over(self, messages: Sequence[Message]) -> bool:
        """Return whether the conversation ends with its last reply, whatever a user would answer: a scripted policy has
        nothing more to do. Asked only after a reply without tool calls, if there is a user."""
        return False

    def child(self, number: int = 0) -> ChatServer:
        """Return the server for the sub-agent with this number. A server that records tokens returns a new object, so
        that the sub-agent's conversation is separate from this one."""
        return self

    def declare(self, reason: SegmentReason) -> None:
        """Record why the next request does not continue the history. A server without a ledger ignores the reason."""

    def get_state(self) -> dict[str, JSON] | None:
        """Return the token record, a dict with `ledger` and `nodes`, or None for a server without exact tokens."""
        return None


class ForeignChat(ChatServer):
    """A chat server from outside this package, such as an environment's own client. If it has a method `get_state`, the
    state that the method returns is the rollout's token record."""

    def __init__(self, server: object) -> None:
        self.server: Any = server

    async def chat_completion(self, **request: JSON) -> ChatCompletion:
        asked = self.server.chat_completion(**request)
        try:
            completion: ChatCompletion = await foreign(asked, expected=(NotImplementedError,))
        except ForeignError as error:
            raise EngineError(f"The model server raised {error}") from error.__cause__
        return completion

    def get_state(self) -> dict[str, JSON] | None:
        get_state = getattr(self.server, "get_state", None)
        return get_state() if callable(get_state) else None


def chat_server(server: object) -> ChatServer:
    return server if isinstance(server, ChatServer) else ForeignChat(server)


class Engine(Protocol):
    """Samples replies. An engine is opened once per run, and every rollout gets its own session."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Connect to the server and check it. Raises `EngineUnavailable`, `EngineRefused` or `ConfigError`, which name
        the fix."""
        ...

    async def aclose(self) -> None: ...

    def session(self, context: SessionContext) -> ChatServer: ...


class ServerEngine(ChatServer):
    """The engine of one configured model server, which can also be called directly. Implements `Engine`. If
    `token_exact` is true, the engine continues token ids, and its `managed_server` opens token-exact chat."""

    config: APIServerConfig
    token_exact = False
    window_tokens: int | None = None
    """The size of the model's window, if the server has reported it."""

    @property
    def name(self) -> str:
        return self.config.model_name

    async def start(self) -> None:
        raise NotImplementedError

    async def probe(self, tools: Sequence[Mapping[str, JSON]]) -> None:
        """Send one request with these tools if the server might refuse them. Raises `EngineRefused`, which names the
        fix."""

    async def aclose(self) -> None:
        raise NotImplementedError

    def session(self, context: SessionContext) -> ChatServer:
        """Return the engine itself, because a conversation's whole state is its messages."""
        return self
