"""The world as one rollout sees it: each call named, then answered by the run's recording or by the world itself.

Not for files (`recording.py`) or for what a run is told to do (`modes.py`). Invariant: the name of a call depends only
on what this rollout did before it, so a rollout that does the same again is told the same, whatever runs beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias

from palaestra.core.types import JSON
from palaestra.rollouts.recorded_tools.recording_file import Heard
from palaestra.tools.runtime.recorded_calls import call_key, failed, with_defaults
from palaestra.tools.runtime.runtime import CheckedCall, Next
from palaestra.tools.tool import Tool, ToolOutcome, ToolReply

Ask: TypeAlias = Callable[[], Awaitable[ToolOutcome]]
"""Runs the call itself. The tool's mistakes and failures are outcomes too."""


class Answers(Protocol):
    """Where a run's replies come from."""

    async def reply(self, call: Call, ask: Ask) -> ToolOutcome:
        """The reply to one call. Raises `InfraError`."""
        ...


class Call:
    """One call, named: the `n`th of its key in its rollout."""

    __slots__ = ("arguments", "key", "n", "rollout", "session", "tool")

    def __init__(self, rollout: str, tool: Tool, arguments: Mapping[str, JSON], key: str, n: int) -> None:
        self.rollout = rollout
        self.tool = tool.name
        self.session = tool.world_session
        self.arguments = arguments
        self.key = key
        self.n = n

    def heard(self, reply: ToolReply) -> Heard:
        """The line that records the call."""
        return Heard(
            rollout=self.rollout,
            tool=self.tool,
            arguments=dict(self.arguments),
            key=self.key,
            n=self.n,
            session=self.session,
            failed=failed(reply),
            reply=reply,
        )


class RolloutWorld:
    """Names the calls of one rollout: a `ToolMiddleware`. Each of its conversations counts its calls apart."""

    def __init__(self, rollout: str, answers: Answers, *, replayed: bool = False) -> None:
        self.rollout = rollout
        self.replayed = replayed
        self._answers = answers
        self._made: Counter[tuple[str, str]] = Counter()
        self._sessions: dict[tuple[str, str], str] = {}

    async def __call__(self, call: CheckedCall, then: Next) -> ToolOutcome:
        """Answer a call of a tool that touches the world. Raises `InfraError` if a strict recording lacks it."""
        tool = call.tool
        if not tool.touches_world:
            return await then(call)
        what = await tool.world_key(with_defaults(call.arguments, tool.schema.parameters), call.run)
        session = (call.conversation, tool.world_session)
        key = call_key(tool.name, what, self._sessions.get(session, ""))
        if tool.world_session:
            self._sessions[session] = key
        n = self._made[call.conversation, key]
        self._made[call.conversation, key] += 1
        name = f"{self.rollout}:{call.conversation}" if call.conversation else self.rollout
        return await self._answers.reply(Call(name, tool, call.arguments, key, n), lambda: then(call))
