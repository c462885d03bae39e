"""The `todo` tool: a list of a task's steps. Each rollout has its own list, and needs no slot for it.

The project's interface contract fixes the parameters and the reply. Invariant: every reply is the whole list after the
call; a refused call changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from palaestra.tools import parameters
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON

STATES = ("pending", "in_progress", "completed", "cancelled")

SCHEMA = ToolSchema(
    name="todo",
    description=(
        "Manage the task list of this session. Call without `todos` to read the list, or with `todos` to write "
        "it. Use it for tasks with three or more steps: list the steps first, in order of priority, keep "
        "exactly one in_progress, and mark each step completed as soon as it is done. Always returns the full "
        "list."
    ),
    parameters={
        "todos": {
            "type": "array",
            "description": "The steps to write. Omit to read the list.",
            "items": {
                "type": "object",
                "properties": {
                    "id": parameters.text("A short name that stays the same, such as 1."),
                    "content": parameters.text("What is to be done."),
                    "status": parameters.choice("How far it is.", list(STATES)),
                },
                "required": ["id", "content", "status"],
            },
        },
        "merge": parameters.flag(
            "true: update steps with matching ids and append the others. false: replace the whole list."
        ),
    },
)


class TodoList:
    """The steps of one rollout, in order."""

    def __init__(self) -> None:
        self._steps: dict[str, dict[str, JSON]] = {}

    def write(self, steps: Sequence[Mapping[str, JSON]], *, merge: bool) -> None:
        """Replace the list or, with `merge`, change and add steps. Raises `ToolMistake` for an id given twice."""
        given = {str(step["id"]): {name: step[name] for name in ("id", "content", "status")} for step in steps}
        if len(given) != len(steps):
            twice, _ = Counter(str(step["id"]) for step in steps).most_common(1)[0]
            raise ToolMistake(f"Two of the todos have the id '{twice}'; nothing was written. Give each its own id")
        self._steps = {**self._steps, **given} if merge else given

    def read(self) -> dict[str, JSON]:
        """Return all steps, and the count of each state."""
        steps = [dict(step) for step in self._steps.values()]
        counts = {state: sum(step["status"] == state for step in steps) for state in STATES}
        return {"todos": steps, "summary": {"total": len(steps), **counts}}


async def run_todo(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Write the list if `todos` are given, and show it."""
    steps = run.state(TodoList)
    if "todos" in arguments:
        steps.write(arguments["todos"], merge=bool(arguments.get("merge", False)))
    return steps.read()


TODO = FunctionTool(schema=SCHEMA, run=run_todo, toolset="todo")
