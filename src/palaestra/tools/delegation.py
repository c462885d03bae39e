"""What `delegate_task` needs of whoever runs the agent: somebody to give work to. No I/O.

Tools lie below the agent, and a sub-agent is one. So the tool says what is to be done (`Assignment`), and what runs the
rollout puts a `Delegation` into its tools that has it done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


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
    """Who does the work of one rollout; None where there is nobody."""

    work: Work | None = None
