"""The triple check of a task, in real slots: its first state, its oracle, and what must not be paid.

    prepare  files and set-up run, and every check of the first state holds
    unpaid   in a fork: doing nothing fails the checks of the last state; so do files that are merely there, empty or
             copied from an input, at every path that is to be made
    oracle   in a fork: the solution runs, its slot is sealed, and every check holds in a fresh slot over that

Sealing shows the workspace alone, as an environment's grading does. Raises `TaskError` for a task that does not hold.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence
from contextlib import AsyncExitStack

from palaestra.core.errors import TaskError
from palaestra.sandbox.slot import WORKSPACE, Slot, SlotSource, SlotSpec, Snapshot, View
from palaestra.suites.endless_terminals.checks.all_checks import first_fault, live_faults
from palaestra.suites.endless_terminals.generated_task import TerminalTask

GRADED = View(only=(WORKSPACE,))
"""What of an agent's change a grader sees: no tool, library or setting outside the workspace."""

_TIMEOUT_S = 120.0


async def prove(task: TerminalTask, slots: SlotSource, spec: SlotSpec) -> None:
    """Raises `TaskError` with what does not hold, `InfraError` when a slot failed."""
    async with AsyncExitStack() as stack:
        snapshot = await _prepared(task, slots, spec)
        stack.push_async_callback(slots.forget, snapshot)
        await _unpaid(task, slots, snapshot)
        await _oracle(task, slots, snapshot)


async def _leased(stack: AsyncExitStack, slots: SlotSource, task: TerminalTask, snapshot: Snapshot) -> Slot:
    slot = await slots.acquire(f"prove-{task.id}", snapshot=snapshot)
    stack.push_async_callback(slots.release, slot)
    return slot


async def _prepared(task: TerminalTask, slots: SlotSource, spec: SlotSpec) -> Snapshot:
    slot = await slots.acquire(f"prove-{task.id}", spec=spec)
    try:
        for path, text in task.files.items():
            await slot.write_text(path, text)
        if task.setup:
            await _run(slot, task, task.setup, "its set-up fails")
        if wrong := await first_fault(task.initial, slot):
            raise TaskError(f"{task.id}: its first state is not what it should be: {wrong}")
    except BaseException:
        await slots.release(slot)
        raise
    return await slots.seal(slot)


async def _unpaid(task: TerminalTask, slots: SlotSource, snapshot: Snapshot) -> None:
    """One slot for all of them: what the earlier ones leave is overwritten by the later."""
    async with AsyncExitStack() as stack:
        slot = await _leased(stack, slots, task, snapshot)
        for name, script in (("doing nothing", ""), *cheats(task)):
            if script:
                await slot.execute(script, timeout_s=_TIMEOUT_S)
            if not await first_fault(task.final, slot):
                raise TaskError(f"{task.id}: it is paid for {name}")


def cheats(task: TerminalTask) -> list[tuple[str, str]]:
    """Shell that puts something at every path that is to be made: nothing at all, or the first input."""
    paths = list(dict.fromkeys(path for check in task.final for path in check.made()))
    sources = {"empty files": "/dev/null", **{f"copies of {source}": source for source in list(task.files)[:1]}}
    targets = {name: [path for path in paths if path != source] for name, source in sources.items()}
    return [(name, _put(source, targets[name])) for name, source in sources.items() if targets[name]]


def _put(source: str, paths: Sequence[str]) -> str:
    """Shell that writes what is in `source` to these paths, as far as that goes, with as few processes as can be."""
    folders = sorted({posixpath.dirname(path) for path in paths})
    targets = shlex.join(f"./{path}" for path in paths)
    return (
        f"mkdir -p {shlex.join(f'./{folder}' for folder in folders)}\n"
        f"tee {targets} < {shlex.quote(source)} > /dev/null 2>&1\n"
    )


async def _oracle(task: TerminalTask, slots: SlotSource, snapshot: Snapshot) -> None:
    async with AsyncExitStack() as stack:
        slot = await _leased(stack, slots, task, snapshot)
        await _run(slot, task, task.solution, "its solution fails")

        async def sealed() -> Slot:
            snapshot = await slots.seal(slot, GRADED)
            stack.push_async_callback(slots.forget, snapshot)
            return await _leased(stack, slots, task, snapshot)

        wrong = await live_faults(task.final, slot, sealed)
        if any(wrong):
            raise TaskError(f"{task.id}: its solution is not paid: {next(filter(None, wrong))}")


async def _run(slot: Slot, task: TerminalTask, script: str, problem: str) -> None:
    done = await slot.execute(script, timeout_s=_TIMEOUT_S)
    if not done.success:
        raise TaskError(f"{task.id}: {problem} ({done.error}): {done.output[-500:].strip()}")
