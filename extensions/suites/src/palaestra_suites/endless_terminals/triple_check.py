"""Check a generated task in real slots: its initial state, trivial attempts to solve it, and its reference solution.

    prepare  write the files and run the set-up; every check of the initial state holds
    trivial  in a fork, the final checks fail after doing nothing, and with an empty file or a copy of an input at every
             output path
    oracle   in a fork, run the reference solution; every final check holds in a fresh slot with its changes

The fresh slot contains only the solution's changes to the workspace, as in grading. Checks of running processes are
made in the solution's own slot.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence
from contextlib import AsyncExitStack

from palaestra_slots.core.errors import TaskError
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.sandbox.slot import WORKSPACE, Slot, SlotSource, SlotSpec, Snapshot, View
from palaestra_suites.endless_terminals.checks.all_checks import first_fault, live_faults
from palaestra_suites.endless_terminals.generated_task import GeneratedTask

GRADED = View(only=(WORKSPACE,))
"""The part of an agent's changes that a grader sees: the workspace."""

_TIMEOUT_S = 120.0


async def prove(task: GeneratedTask, slots: SlotSource, spec: SlotSpec) -> None:
    """Run the three checks. Raises `TaskError` if a check fails, and `InfraError` if a slot fails."""
    async with AsyncExitStack() as stack:
        snapshot = await _prepared(task, slots, spec)
        stack.push_async_callback(slots.snapshots.forget, snapshot)
        await _check_trivial(task, slots, snapshot)
        await _check_oracle(task, slots, snapshot)


async def _leased(stack: AsyncExitStack, slots: SlotSource, task: GeneratedTask, snapshot: Snapshot) -> Slot:
    slot = await slots.acquire(f"prove-{task.id}", snapshot=snapshot)
    stack.push_async_callback(slots.release, slot)
    return slot


async def _prepared(task: GeneratedTask, slots: SlotSource, spec: SlotSpec) -> Snapshot:
    slot = await slots.acquire(f"prove-{task.id}", spec=spec)
    try:
        for path, text in task.files.items():
            await slot.write_text(path, text)
        if task.setup:
            await _run_script(slot, task, task.setup, "its set-up fails")
        if wrong := await first_fault(task.initial, slot):
            raise TaskError(f"{task.id}: its initial state is wrong: {wrong}")
    except BaseException:
        await slots.release(slot)
        raise
    return await slots.seal(slot)


async def _check_trivial(task: GeneratedTask, slots: SlotSource, snapshot: Snapshot) -> None:
    """Make every trivial attempt in one slot. Each attempt overwrites the files of the attempt before it."""
    async with AsyncExitStack() as stack:
        slot = await _leased(stack, slots, task, snapshot)
        for name, script in (("doing nothing", ""), *trivial_attempts(task)):
            if script:
                await slot.execute(script, timeout_s=_TIMEOUT_S)
            if not await first_fault(task.final, slot):
                raise TaskError(f"{task.id}: it is solved by {name}")


def trivial_attempts(task: GeneratedTask) -> list[tuple[str, str]]:
    """Return the name and the shell script of each attempt: empty files, or copies of the first input, at every output
    path."""
    paths = list(dict.fromkeys(path for check in task.final for path in check.made()))
    sources = {"empty files": "/dev/null", **{f"copies of {source}": source for source in list(task.files)[:1]}}
    targets = {name: [path for path in paths if path != source] for name, source in sources.items()}
    return [(name, _copy_script(source, targets[name])) for name, source in sources.items() if targets[name]]


def _copy_script(source: str, paths: Sequence[str]) -> str:
    """Return a shell script that copies `source` to these paths with few processes and ignores errors."""
    folders = sorted({posixpath.dirname(path) for path in paths})
    targets = shlex.join(f"./{path}" for path in paths)
    return (
        f"mkdir -p {shlex.join(f'./{folder}' for folder in folders)}\n"
        f"tee {targets} < {shlex.quote(source)} > /dev/null 2>&1\n"
    )


async def _check_oracle(task: GeneratedTask, slots: SlotSource, snapshot: Snapshot) -> None:
    async with AsyncExitStack() as stack:
        slot = await _leased(stack, slots, task, snapshot)
        await _run_script(slot, task, task.solution, "its solution fails")

        async def sealed() -> Slot:
            snapshot = await slots.seal(slot, GRADED)
            stack.push_async_callback(slots.snapshots.forget, snapshot)
            return await _leased(stack, slots, task, snapshot)

        wrong = await live_faults(task.final, slot, sealed)
        if any(wrong):
            raise TaskError(f"{task.id}: its solution does not pass: {next(filter(None, wrong))}")


async def _run_script(slot: Slot, task: GeneratedTask, script: str, problem: str) -> None:
    await check_execute(slot, script, f"{task.id}: {problem}", cwd=WORKSPACE, timeout_s=_TIMEOUT_S, error=TaskError)
