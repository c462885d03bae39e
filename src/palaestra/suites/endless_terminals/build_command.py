"""`palaestra tasks build terminal`: from a seed to a file of proved tasks.

Tasks are generated from the seed alone; then each is held to its triple check in slots of its own, and what does not
hold is left out and named. Tasks that need a program which the slots do not have are left out with that reason, so two
machines write the same file when their slots have the same programs. Invariant: the rows stand in the order of their
numbers, whatever finishes first.
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
from palaestra.suites.endless_terminals.compose_tasks import Choice, generate
from palaestra.suites.endless_terminals.generated_task import TerminalTask, to_line
from palaestra.suites.endless_terminals.triple_check import prove

_PROGRESS = 100
"""After how many tasks it says how far it is."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What was built: the tasks in order, and what was left out and why."""

    tasks: tuple[TerminalTask, ...]
    problems: tuple[str, ...]

    def counts(self) -> str:
        """How many tasks there are of each level, for a person."""
        levels = Counter(task.level for task in self.tasks)
        return ", ".join(f"{levels[level]} of level {level}" for level in sorted(levels))


async def build(
    choice: Choice,
    count: int,
    slots: SlotSource,
    *,
    parallel: int,
    image: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> BuildReport:
    """Generate `count` tasks and keep those that hold, `parallel` of them under check at a time.

    `image` is the root file system of their slots; None is the host's. Raises `ConfigError` for a choice that cannot
    be, `InfraError` when slots fail.
    """
    spec = SlotSpec(image=image)
    tasks = list(generate(choice, count))
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
                progress(f"left out: {error}")
            done += 1
            if done % _PROGRESS == 0:
                progress(f"{done} of {count} checked")

    async with asyncio.TaskGroup() as group:
        for _ in range(parallel):
            group.create_task(worker())
    kept = tuple(task for number, task in enumerate(tasks) if number not in problems)
    return BuildReport(kept, tuple(problems[number] for number in sorted(problems)))


async def _missing(slots: SlotSource, spec: SlotSpec, needs: Iterable[str]) -> frozenset[str]:
    """Which of these programs the slots do not have."""
    slot = await slots.acquire("look-for-programs", spec=spec)
    try:
        found = {need: await slot.execute(["sh", "-c", f"command -v {need}"]) for need in needs}
    finally:
        await slots.release(slot)
    return frozenset(need for need, done in found.items() if not done.success)


def write_tasks(out: Path, tasks: Iterable[TerminalTask]) -> None:
    """All tasks or the old file: a build that is broken off leaves no half of one."""
    with writing(out), replaced(out) as lines:
        lines.writelines(map(to_line, tasks))
