"""`palaestra tasks build terminal`: generate terminal tasks from a seed and check each of them.

Each task must pass its triple check in slots. A task that fails, or that needs a program which the slots lack, is
dropped and reported. So two machines write the same file if their slots have the same programs. Rows are in the order
of their numbers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from palaestra.core.errors import TaskError
from palaestra.core.io.append_file import writing
from palaestra.core.io.atomic_file import replaced
from palaestra.sandbox.slot import SlotSource, SlotSpec
from palaestra.suites.endless_terminals.compose_tasks import TaskSelection, generate
from palaestra.suites.endless_terminals.generated_task import GeneratedTask, to_line
from palaestra.suites.endless_terminals.triple_check import prove

_PROGRESS = 100
"""Report progress after this many tasks."""


@dataclass(frozen=True, slots=True)
class TerminalBuild:
    """The tasks in order, and why others were dropped."""

    tasks: tuple[GeneratedTask, ...]
    problems: tuple[str, ...]

    def counts(self) -> str:
        """The number of tasks of each level as text."""
        levels = Counter(task.level for task in self.tasks)
        return ", ".join(f"{levels[level]} of level {level}" for level in sorted(levels))


async def build(
    selection: TaskSelection,
    count: int,
    slots: SlotSource,
    *,
    parallel: int,
    image: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> TerminalBuild:
    """Generate `count` tasks and keep those that pass their check; `parallel` are checked at a time.

    `image` is the root file system of the slots, None the host's. Raises `ConfigError` for a bad selection,
    `InfraError` if slots fail.
    """
    spec = SlotSpec(image=image)
    tasks = list(generate(selection, count))
    missing = await _missing(slots, spec, sorted({need for task in tasks for need in task.needs}))
    problems: dict[int, str] = {}
    done = 0
    waiting = iter(enumerate(tasks))

    async def worker() -> None:
        nonlocal done
        for number, task in waiting:
            lacks = [need for need in task.needs if need in missing]
            try:
                if lacks:
                    raise TaskError(f"{task.id}: it needs {', '.join(lacks)}, which the slots do not have")
                await prove(task, slots, spec)
            except TaskError as error:
                problems[number] = str(error)
                progress(f"dropped: {error}")
            done += 1
            if done % _PROGRESS == 0:
                progress(f"{done} of {count} checked")

    async with asyncio.TaskGroup() as group:
        for _ in range(parallel):
            group.create_task(worker())
    kept = tuple(task for number, task in enumerate(tasks) if number not in problems)
    return TerminalBuild(kept, tuple(problems[number] for number in sorted(problems)))


async def _missing(slots: SlotSource, spec: SlotSpec, needs: Iterable[str]) -> frozenset[str]:
    """The programs that the slots do not have."""
    slot = await slots.acquire("look-for-programs", spec=spec)
    try:
        found = {need: await slot.execute(["sh", "-c", f"command -v {need}"]) for need in needs}
    finally:
        await slots.release(slot)
    return frozenset(need for need, done in found.items() if not done.success)


def write_tasks(out: Path, tasks: Iterable[GeneratedTask]) -> None:
    """Replace the file with all tasks at once; an interrupted build keeps the old file."""
    with writing(out), replaced(out) as lines:
        lines.writelines(map(to_line, tasks))
