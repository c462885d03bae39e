"""An engine whose replies the program supplies one at a time, for external agent loops that call the model themselves.

The program sets `PLAYER` and starts a rollout, which takes its replies from that `Player`. Everything else is as in any
rollout: the calls are checked and run by the tool runtime, and the result is sealed and graded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer, ServerEngine, SessionContext
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import AssistantMessage, ChatChoice, ChatCompletion, CompletionUsage

PLAYER: ContextVar[Player | None] = ContextVar("player", default=None)


class Player(ChatServer):
    """The replies of one rollout. `asked` receives the conversation when a reply is needed; the program puts the reply
    into `replies`. Once it is `over`, the program has said its last word, and no user answers it."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.replies: asyncio.Queue[AssistantMessage] = asyncio.Queue()
        self.over = False

    def is_over(self, messages: Sequence[Message]) -> bool:
        return self.over

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
        """Wait for the program's reply, without a time limit."""
        self.asked.put_nowait(list(messages))
        message = await self.replies.get()
        choice = ChatChoice(message=message, finish_reason="tool_calls" if message.tool_calls else "stop")
        return ChatCompletion(choices=[choice], usage=CompletionUsage())


class CallerEngine(ServerEngine):
    """The engine of a run in which the program supplies the replies."""

    def __init__(self) -> None:
        self.config = APIServerConfig(model_name="caller")

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    def session(self, context: SessionContext) -> ChatServer:
        player = PLAYER.get()
        assert player is not None, "this engine works only in a rollout with a player"
        return player
