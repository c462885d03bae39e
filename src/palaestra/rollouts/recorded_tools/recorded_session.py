"""The world as one rollout sees it: each call named, then answered by the run's recording or by the world itself.

Not for files (`recording.py`) or for what a run is told to do (`modes.py`). Invariant: the name of a call depends only
on what this rollout did before it, so a rollout that does the same again is told the same, whatever runs beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from palaestra.core.types import JSON
from palaestra.rollouts.recorded_tools.recording_file import Heard
from palaestra.tools.runtime.recorded_calls import Ask, call_key, failed, with_defaults
from palaestra.tools.tool import Tool, ToolReply, ToolRun


class Answers(Protocol):
    """Where a run's replies come from."""

    async def reply(self, call: Call, ask: Ask) -> ToolReply:
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
    """Names the calls of one rollout. Implements `World`."""

    def __init__(self, rollout: str, answers: Answers, *, replayed: bool = False) -> None:
        self.rollout = rollout
        self.replayed = replayed
        self._answers = answers
        self._made: Counter[str] = Counter()
        self._sessions: dict[str, str] = {}

    async def call(self, tool: Tool, arguments: Mapping[str, JSON], run: ToolRun, ask: Ask) -> ToolReply:
        """The reply to a call. Raises `InfraError` where the run is to end on what a recording lacks."""
        what = await tool.world_key(with_defaults(arguments, tool.schema.parameters), run)
        key = call_key(tool.name, what, self._sessions.get(tool.world_session, ""))
        if tool.world_session:
            self._sessions[tool.world_session] = key
        n = self._made[key]
        self._made[key] += 1
        return await self._answers.reply(Call(self.rollout, tool, arguments, key, n), ask)

    def beside(self, name: str) -> RolloutWorld:
        """The same world for another part of the rollout, such as its grading or a sub-agent: its calls count apart."""
        return RolloutWorld(f"{self.rollout}:{name}", self._answers, replayed=self.replayed)
