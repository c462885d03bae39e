"""How a task folder's own tests prepare and grade: pytest files, run by our harness in slots.

The tests of the first state run when the workspace is prepared, and so do those of the last state once: they must be
found, and must not all pass yet. Every name found then must pass when the agent's work is graded. Tests lie in `/tmp`
of the slot that runs them, which no layer keeps, so no agent meets them.
"""

from __future__ import annotations

from palaestra.core.errors import GraderError, PrepareError, TaskError
from palaestra.core.types import Score
from palaestra.sandbox.slot import Slot, View
from palaestra.suites.endless_terminals.task_folders import FolderTask
from palaestra.suites.swe.install import Toolchain
from palaestra.suites.swe.run_tests import Status, TestRun, run_files

HOME = "/home/user"
"""Where the recipe's tasks happen."""

GRADED = View(without=("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/root", f"{HOME}/.local"))
"""What of an agent's change these tests see: all but the system's programs, libraries and settings."""

_TESTS = "/tmp/palaestra-tests"  # noqa: S108  in the slot
_SETUP_TIMEOUT_S = 300.0


async def prepare_folder(task: FolderTask, slot: Slot, toolchain: Toolchain, timeout_s: float) -> frozenset[str]:
    """Make the first state, prove it, and give the names of the tests that will decide.

    Raises `PrepareError` or `TaskError` for a task that cannot be used here.
    """
    await slot.execute(["mkdir", "-p", HOME], cwd="/")
    if task.setup:
        done = await slot.execute(["bash", "-e", "-c", task.setup], cwd="/", timeout_s=_SETUP_TIMEOUT_S)
        if not done.success:
            raise PrepareError(f"{task.id}: its %post script fails here ({done.error}): {done.output[-1000:].strip()}")
    if task.initial_tests:
        first = await _run(task.initial_tests, slot, toolchain, timeout_s)
        if bad := _not_passed(first):
            raise PrepareError(
                f"{task.id}: its first state cannot be had here; {bad[0]} does not pass:\n{first.output[-1000:]}"
            )
    last = await _run(task.final_tests, slot, toolchain, timeout_s)
    if not last.statuses or last.collect_errors:
        raise PrepareError(f"{task.id}: its tests of the last state cannot be run here:\n{last.output[-1000:]}")
    if not _not_passed(last):
        raise TaskError(f"{task.id}: its tests pass before anything was done")
    return frozenset(last.statuses)


async def score_folder(
    task: FolderTask, names: frozenset[str], slot: Slot, toolchain: Toolchain, timeout_s: float
) -> Score:
    """1.0 when every one of these tests passes, else 0.0. Raises `GraderError` when they did not run."""
    run = await _run(task.final_tests, slot, toolchain, timeout_s)
    if run.collect_errors and not run.statuses:
        raise GraderError(f"{task.id}: its tests were not found again:\n{run.output[-1000:]}")
    passed = run.passed(names)
    bad = {name: run.statuses.get(name, Status.MISSING).value for name in sorted(names)}
    return Score(
        float(run.complete and passed == len(names)),
        {"passed": passed, "tests": len(names)},
        {"not_passed": {name: status for name, status in bad.items() if status != Status.PASSED.value}},
    )


async def _run(tests: str, slot: Slot, toolchain: Toolchain, timeout_s: float) -> TestRun:
    await slot.remove(_TESTS)
    await slot.write_text(f"{_TESTS}/test_state.py", tests)
    await slot.write_text(f"{_TESTS}/pytest.ini", "[pytest]\n")
    try:
        return await run_files(slot, toolchain, _TESTS, ["test_state.py"], timeout_s=timeout_s)
    finally:
        await slot.remove(_TESTS)


def _not_passed(run: TestRun) -> list[str]:
    bad = [name for name, status in run.statuses.items() if status is not Status.PASSED]
    return [*run.collect_errors, *bad] or ([] if run.complete and run.statuses else ["the test session"])
