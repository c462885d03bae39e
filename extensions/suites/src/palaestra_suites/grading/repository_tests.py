"""Run test files of a repository in a slot, with pytest or with the runner of Django's own suite.

If pytest starts but does not end its session (a crash, `os._exit`, a timeout, a broken import in a conftest), this
module runs a trivial test, the canary, in the same slot. If the canary passes, code of the workspace has ended the
session, and tests that were not reported count as not passed. If the canary does not pass, the slot is broken, and
`GraderError` is raised.

Compiled files of the workspace count, so a graded view must not show those of the agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from palaestra_slots.core.errors import GraderError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import ExecutionResult, Slot
from palaestra_suites.grading.harness import (
    FOLDER,
    PYTEST,
    FailedTest,
    Status,
    TestRun,
    alarms_in,
    read_run,
    run_harness,
)
from palaestra_suites.toolchain.toolchain import Toolchain

_CANARY_TIMEOUT_S = 60.0
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": "",
    "PYTEST_ADDOPTS": "",
    "PYTEST_PLUGINS": "",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
}
_PYTEST = (
    "-p",
    "no:cacheprovider",
    "--continue-on-collection-errors",
    "--maxfail=0",
    "--color=no",
    "--tb=short",
    "-q",
)
_DJANGO = ("--verbosity=2", "--settings=test_sqlite", "--parallel=1")
_CANARY = "def test_canary():\n    assert 1 + 1 == 2\n"


async def run_files(
    slot: Slot,
    toolchain: Toolchain,
    repo_dir: str,
    files: Sequence[str],
    *,
    timeout_s: float,
    watching: bool = True,
    brief: bool = False,
) -> TestRun:
    """Run all tests of these files or directories with pytest. The process that runs them gets no names of tests.

    `watching` reports the calls that `watch` of `in_slot/verdict_channel.py` describes. With `brief`, pytest prints no
    tracebacks. Raises `GraderError` if the harness or the slot failed rather than the tests.
    """
    run = await _pytest(slot, toolchain, repo_dir, files, timeout_s, watching=watching, brief=brief)
    if not run.complete and not run.timed_out:
        await _check_canary(slot, toolchain)
    return run


async def _pytest(
    slot: Slot,
    toolchain: Toolchain,
    root: str,
    files: Sequence[str],
    timeout_s: float,
    *,
    watching: bool = False,
    brief: bool = False,
) -> TestRun:
    arguments = [*_PYTEST, *toolchain.pytest_args, *(("--tb=no", "-rN") if brief else ())]
    plan = {"files": list(files), "arguments": arguments, "watching": watching}
    records, result = await _run_plan(slot, toolchain, root, PYTEST, plan, timeout_s)
    run = read_run(records, result)
    if run.exit_status == 0 and result.exit_code:  # code that runs at the end of the process has failed
        run = replace(run, exit_status=result.exit_code)
    return run


async def _run_plan(
    slot: Slot, toolchain: Toolchain, root: str, script: str, plan: Mapping[str, JSON], timeout_s: float
) -> tuple[list[Mapping[str, JSON]], ExecutionResult]:
    plan = {
        **plan,
        "root": root,
        "python_path": list(toolchain.python_path),
        "dependencies": list(toolchain.dependencies),
    }
    return await run_harness(slot, toolchain.command, script, plan, env=_ENVIRONMENT, timeout_s=timeout_s)


async def _check_canary(slot: Slot, toolchain: Toolchain) -> None:
    """Run the canary, a test that cannot fail. Raises `GraderError` if it does not pass."""
    root = f"{FOLDER}/canary"
    await slot.write_text(f"{root}/test_canary.py", _CANARY)
    # With settings of its own, pytest looks for none in the directories above, where the work could have put some.
    await slot.write_text(f"{root}/pytest.ini", "[pytest]\n")
    canary = await _pytest(slot, toolchain, root, ["test_canary.py"], _CANARY_TIMEOUT_S)
    if not canary.complete or list(canary.statuses.values()) != [Status.PASSED]:
        what = f"pytest cannot run in {slot.slot_id}, not even a test that cannot fail (the canary)"
        raise GraderError(f"{what}: {canary.output[-2000:].strip()}")


async def run_django(
    slot: Slot,
    toolchain: Toolchain,
    repo_dir: str,
    files: Sequence[str],
    names: Sequence[str],
    *,
    timeout_s: float,
    watching: bool = True,
) -> TestRun:
    """Run the modules of these test files with Django's `tests/runtests.py`. Return the status of each of the `names`
    and of each node id that ran.

    Dataset rows name a test as the runner prints it: as `test_a (module.Class)`, as `test_a (module.Class.test_a)`
    (Python 3.11 and newer), or by the first line of the test's docstring. Source: `parse_log_django` in
    `swebench.harness.log_parsers`. Raises `GraderError`.
    """
    paths = {path.removeprefix("tests/").removesuffix(".py").replace("/", "."): path for path in files}
    plan = {
        "script": "tests/runtests.py",
        "arguments": [*_DJANGO, *paths],
        "files": list(files),
        "watching": watching,
    }
    records, result = await _run_plan(slot, toolchain, repo_dir, "unittest_reporter.py", plan, timeout_s)
    reported: dict[str, Status] = {}
    known_as: dict[str, tuple[str, ...]] = {}
    failures: dict[str, FailedTest] = {}
    for record in records:
        if record["kind"] == "test":
            module, _, rest = str(record.get("test_id", "")).partition("::")
            node_id = f"{paths[module]}::{rest}" if module in paths else ""
            for name in [*record["names"], *filter(None, [node_id])]:
                if record.get("error"):
                    failures[name] = FailedTest(message=str(record["error"]))
                # A name may stand for several records: each failed subtest is one, and tests may share the first line
                # of a docstring. The first that did not pass decides.
                known = reported.get(name)
                if known is None or known is Status.PASSED:
                    reported[name] = Status(record["status"])
            if node_id:
                known_as[node_id] = tuple(map(str, record["names"]))
    finish = next((record for record in records if record["kind"] == "finish"), None)
    return TestRun(
        statuses={name: reported.get(name, Status.MISSING) for name in (*names, *known_as)},
        complete=finish is not None,
        exit_status=None if finish is None else int(bool(finish.get("exit_status"))) or result.exit_code,
        timed_out=bool(result.metadata.get("timeout")),
        failures=failures,
        output=result.output,
        alarms=alarms_in(records),
        known_as=known_as,
    )
