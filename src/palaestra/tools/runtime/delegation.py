"""What `delegate_task` needs of whoever runs the agent: somebody to give work to. No I/O.

Tools lie below the agent, and a sub-agent is one. So the tool says what is to be done (`Assignment`), and what runs the
rollout puts a `Delegation` into its tools that has it done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from palaestra.tools.runtime.runtime import ToolRuntime


@dataclass(frozen=True, slots=True)
class Assignment:
    """One piece of work. `toolsets` None: the tools of who gives it; `max_turns` None: as many model calls as that."""

    goal: str
    context: str = ""
    toolsets: tuple[str, ...] | None = None
    max_turns: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What came of one: the sub-agent's last words, and why it ended (`outcome`, as a rollout's)."""

    summary: str
    outcome: str
    turns: int
    tool_calls: int
    error: str = ""


Work: TypeAlias = Callable[[Sequence[Assignment]], Awaitable[list[Report]]]
"""Has all of them done at the same time; the reports are in their order. Raises `ToolMistake` where one cannot be done
as asked, and `PalaestraError` for the world's failure."""


@dataclass(slots=True)
class Delegation:
    """Who does the work of one rollout; None where there is nobody, and `missing` says why."""

    work: Work | None = None
    missing: str = "no agent is at work here whose model sub-agents could ask"


class DelegationSource(Protocol):
    """Who does work for tasks whose agent is elsewhere, such as those of a `ToolExecutor`."""

    def work(self, tools: ToolRuntime) -> Work:
        """Who does it for the task that has these tools."""
        ...

    async def aclose(self) -> None:
        """Let go of what the work has opened. Later work opens it anew. Idempotent."""
        ...
