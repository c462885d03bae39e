"""The `delegate_task` tool: gives work to sub-agents, which have their own conversations and report results.

The agent gives its tools a `Delegation`, which runs the sub-agents (`agent/subagents.py`). A sub-agent sees only its
goal and context; it works in the same slot with the same files and background processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from palaestra.tools import parameters
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON, Outcome

MAX_TASKS = 3
"""The maximum number of sub-agents that one call may start; they work concurrently."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One piece of work. If `toolsets` is None, the sub-agent has all of the delegating agent's tools that sub-agents
    may use. `max_turns` can only lower that agent's limit."""

    goal: str
    context: str = ""
    toolsets: tuple[str, ...] | None = None
    max_turns: int | None = None


@dataclass(frozen=True, slots=True)
class SubagentReport:
    """The result of one assignment: the sub-agent's last reply, and its `outcome`, like that of a rollout."""

    summary: str
    outcome: str
    turns: int
    tool_calls: int
    error: str = ""


Work: TypeAlias = Callable[[Sequence[Assignment]], Awaitable[list[SubagentReport]]]
"""Runs all assignments concurrently, and reports in their order. Raises `ToolMistake` for an assignment that
cannot be carried out as requested, and `PalaestraError`."""


@dataclass(slots=True)
class Delegation:
    """The work function of one rollout. If it is None, `missing` is the reason."""

    work: Work | None = None
    missing: str = "no agent is running whose model sub-agents could use"


_PART: Mapping[str, JSON] = {
    "goal": parameters.text(
        "The task, self-contained: the sub-agent does not see this conversation.", {"minLength": 1}
    ),
    "context": parameters.text("Background information: file paths, findings, constraints."),
    "toolsets": {
        "type": "array",
        "items": {"type": "string"},
        "description": "Toolsets available to the sub-agent, a subset of yours. Omit for all of them.",
    },
}

SCHEMA = ToolSchema(
    name="delegate_task",
    description=(
        f"Delegate work to sub-agents, each with its own conversation: one `goal`, or up to {MAX_TASKS} independent "
        "`tasks` in parallel. Use it for self-contained work whose intermediate steps you do not need to see. "
        "Sub-agents share your files and background processes, and cannot ask you questions. You get only their "
        "final message."
    ),
    parameters={
        **_PART,
        "tasks": {
            "type": "array",
            "items": {"type": "object", "properties": dict(_PART), "required": ["goal"]},
            "minItems": 1,
            "maxItems": MAX_TASKS,
            "description": "Independent tasks to run in parallel.",
        },
        "model": parameters.text("Omit: sub-agents use the model of this conversation."),
        "max_iterations": parameters.integer(
            "Maximum model calls of each sub-agent. Default and maximum: your own limit.", {"minimum": 1}
        ),
    },
)


async def run_delegate_task(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Delegate `goal` or `tasks`; the reply's `results` has one entry for each, in order."""
    delegation = run.state(Delegation)
    if delegation.work is None:
        raise ToolMistake(f"delegate_task cannot be used here: {delegation.missing}. Do the work yourself")
    if arguments.get("model"):
        raise ToolMistake("Sub-agents use the model of this conversation; omit model. Nothing was started")
    reports = await delegation.work(_assignments(arguments))
    return {"results": [_result(index, report) for index, report in enumerate(reports)]}


def _assignments(arguments: Mapping[str, JSON]) -> Sequence[Assignment]:
    if ("goal" in arguments) == ("tasks" in arguments):
        raise ToolMistake("Give either goal or tasks, not both. Nothing was started")
    parts = arguments.get("tasks") or [arguments]
    return [
        Assignment(
            part["goal"],
            part.get("context", ""),
            None if part.get("toolsets") is None else tuple(part["toolsets"]),
            arguments.get("max_iterations"),
        )
        for part in parts
    ]


def _result(index: int, report: SubagentReport) -> dict[str, JSON]:
    done = report.outcome == Outcome.NATURAL
    result: dict[str, JSON] = {"task_index": index, "status": "completed" if done else "stopped"}
    if not done:
        result |= {"outcome": report.outcome, "error": report.error or None}
    return {**result, "summary": report.summary, "api_calls": report.turns, "tool_calls": report.tool_calls}


DELEGATE_TASK = FunctionTool(schema=SCHEMA, run=run_delegate_task, toolset="delegation")
