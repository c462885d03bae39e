"""`palaestra tasks build terminal`: generate terminal tasks from a seed and check each of them.

Unless `--no-check` is given, each task must pass the check of `triple_check.py` in slots. A task that fails, or that
needs a program that the slots lack, is dropped and reported. Two machines therefore write the same file if their slots
have the same programs. Rows are ordered by task number.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from palaestra.envs.config.build import make_pool
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.io.durable_files import replaced, writing
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import SlotSource, SlotSpec
from palaestra_suites.endless_terminals.compose_tasks import TaskSelection, generate
from palaestra_suites.endless_terminals.generated_task import GeneratedTask, to_line
from palaestra_suites.endless_terminals.triple_check import prove
from palaestra_suites.out_option import out_option

_PROGRESS = 100
"""The number of tasks between two reports of progress."""


@dataclass(frozen=True, slots=True)
class TerminalBuild:
    """The tasks in order, and the reasons why other tasks were dropped."""

    tasks: tuple[GeneratedTask, ...]
    problems: tuple[str, ...]

    def counts(self) -> str:
        """Return the number of tasks of each level as text."""
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
    """Generate `count` tasks and keep those that pass their check, with at most `parallel` concurrent checks.

    `image` is the root file system of the slots; None means the host's system directories. Raises `ConfigError` for a
    bad selection. If slots fail, raises `InfraError`, alone or in an exception group.
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
    """Return the programs that the slots do not have."""
    slot = await slots.acquire("look-for-programs", spec=spec)
    try:
        found = {need: await slot.execute(["sh", "-c", f"command -v {need}"]) for need in needs}
    finally:
        await slots.release(slot)
    return frozenset(need for need, done in found.items() if not done.success)


def write_tasks(out: Path, tasks: Iterable[GeneratedTask]) -> None:
    """Write all tasks to the file, which is replaced atomically: an interrupted build keeps the old file."""
    with writing(out), replaced(out) as lines:
        lines.writelines(map(to_line, tasks))


@click.command("terminal")
@click.option(
    "--tasks", "--n", "count", type=click.IntRange(min=1), default=100, show_default=True, help="Number of tasks."
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same tasks.")
@click.option("--level", "levels", type=int, multiple=True, help="Only this level, 1 to 5; repeatable. [default: all]")
@click.option("--area", "areas", multiple=True, metavar="NAME", help="Only this area of work; repeatable.")
@click.option("--family", "families", multiple=True, metavar="NAME", help="Only this kind of work; repeatable.")
@out_option
@click.option("--image", metavar="ROOT", help="A root file system for the slots instead of the host's.")
@click.option(
    "--concurrency",
    "--parallel",
    "parallel",
    type=click.IntRange(min=1),
    help="Number of concurrent checks. [default: two per processor]",
)
@click.option("--check/--no-check", default=True, show_default=True, help="Whether to check each task in slots.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    count: int, out: Path, image: str | None, parallel: int | None, check: bool, as_json: bool, **selected: JSON
) -> None:
    """Generate terminal tasks from a seed.

    \b
      palaestra tasks build terminal --tasks 1000 --seed 7 --out tasks.jsonl
      palaestra tasks build terminal --tasks 50 --level 3 --area git --area text --out git.jsonl

    Areas: files, text, logs, tables, formats, archives, permissions, processes, git, databases and scripts. A task of
    level k combines k kinds of work. The same options and seed give the same file. Unless you pass --no-check, each
    task is checked in slots before it is written: its initial state must be right, the oracle must get the full
    score, and doing nothing or merely creating the files must get none. No network is used.
    """
    selection = TaskSelection(**selected)

    async def checked() -> TerminalBuild:
        async with make_pool(HermesAgentEnvConfig()) as pool:
            # A check uses several slots, one after the other.
            at_once = parallel or max(2, 2 * len(os.sched_getaffinity(0)))
            return await build(
                selection, count, pool, parallel=at_once, image=image, progress=lambda line: click.echo(line, err=True)
            )

    report = asyncio.run(checked()) if check else TerminalBuild(tuple(generate(selection, count)), ())
    if not report.tasks:
        raise ConfigError("no task was built; the reasons are above")
    write_tasks(out, report.tasks)
    state = "checked" if check else "unchecked"
    dropped = len(report.problems)
    click.echo(f"{len(report.tasks)} {state} tasks in {out}: {report.counts()}; {dropped} dropped", err=True)
    facts = {"path": str(out), "tasks": len(report.tasks), "checked": check, "dropped": dropped}
    click.echo(json.dumps(facts) if as_json else out)
