"""Run named pytest tests in a slot and return the status of each.

Every named test gets a status. A test that was not reported is `MISSING` and counts as not passed. If pytest starts but
does not end its session (a crash, `os._exit`, a timeout, a broken import in a conftest), this module runs a trivial
test, the canary, in the same slot. If the canary passes, code of the workspace has ended the session, and the missing
tests count as not passed. If the canary does not pass, the slot is broken, and `GraderError` is raised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from palaestra.core.errors import GraderError
from palaestra.core.types import JSON
from palaestra.sandbox.slot import ExecutionResult, Slot
from palaestra.suites.grading.harness import Alarm, alarms_in, run_harness
from palaestra.suites.toolchain.toolchain import Toolchain

HARNESS_DIR = "/tmp/.palaestra-grade"  # noqa: S108  a path in the grading slot
CANARY_TIMEOUT_S = 60.0

HARNESS_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": "",
    "PYTEST_ADDOPTS": "",
    "PYTEST_PLUGINS": "",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
}
_ARGUMENTS = (
    "-p",
    "no:cacheprovider",
    "--continue-on-collection-errors",
    "--maxfail=0",
    "--color=no",
    "--tb=short",
    "-q",
)
_CANARY = "def test_canary():\n    assert 1 + 1 == 2\n"


class TestsTimedOut(GraderError):
    """Raised if a test session did not end in time. A second session can show whether the work or a slow machine is the
    cause."""

    __test__: ClassVar[bool] = False  # pytest: not a test class


def enough_time(usual_s: float, least_s: float = 1.0) -> float:
    """Return the time limit of a repeated session whose tests usually take `usual_s` seconds."""
    return least_s + 3 * usual_s


class Status(StrEnum):
    """The outcome of one test over all its phases."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    """The test is marked `xfail` and failed."""
    XFAIL_CALLED = "xfail called"
    """The test, or the code under test, called `pytest.xfail`."""
    XPASSED = "xpassed"
    MISSING = "missing"


FAILED = frozenset({Status.FAILED, Status.ERROR})
"""The statuses of tests that failed in one of their phases."""

_WORST_FIRST = (
    Status.ERROR,
    Status.FAILED,
    Status.XFAIL_CALLED,
    Status.XFAILED,
    Status.XPASSED,
    Status.PASSED,
    Status.SKIPPED,
)
"""A skipped tear-down or subtest does not make a passed test a skipped one: pytest lists it as passed."""


@dataclass(frozen=True, slots=True)
class FailedTest:
    """The exception of a failed test, and the last line in its traceback that belongs to the test's function.

    `path` is the file of the test's code, which for an inherited test differs from its node id. `line` is 0 if the
    traceback does not contain that file. `params` holds the `repr` of each parameter of the test.
    """

    exception: str
    message: str
    path: str
    line: int
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TestRun:
    """One run of pytest. `complete` means that pytest ended its session by itself, after a report on each collected
    test.

    `alarms` are what the audit hook reported, and `output` is what pytest printed. `known_as` are further names of
    tests, as a runner other than pytest prints them.
    """

    __test__: ClassVar[bool] = False  # pytest: not a test class

    statuses: Mapping[str, Status]
    complete: bool
    timed_out: bool = False
    exit_status: int | None = None
    failures: Mapping[str, FailedTest] = field(default_factory=dict)
    collect_errors: Mapping[str, str] = field(default_factory=dict)
    durations_s: Mapping[str, float] = field(default_factory=dict)
    output: str = ""
    alarms: frozenset[Alarm] = frozenset()
    known_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def check_ended(self, what: str) -> None:
        """Raise `TestsTimedOut` if the time limit ended the session, because such a run gives no verdict."""
        if self.timed_out:
            raise TestsTimedOut(f"{what}: its tests timed out:\n{self.output[-1500:]}")

    def passed(self, node_ids: Collection[str]) -> int:
        """Return how many of these tests passed. Skipped, xfailed and missing tests do not count."""
        return sum(self.statuses.get(node_id) is Status.PASSED for node_id in node_ids)


async def run_tests(
    slot: Slot,
    toolchain: Toolchain,
    repo_dir: str,
    node_ids: Sequence[str],
    *,
    timeout_s: float,
    watching: bool = True,
) -> TestRun:
    """Run the files of these tests and return the status of each; node ids may have any length and any characters.

    The process that runs the tests does not get their names. Raises `GraderError` if the harness or the slot failed
    rather than the tests.
    """
    files = sorted({node_id.split("::", 1)[0] for node_id in node_ids})
    run = await run_files(slot, toolchain, repo_dir, files, timeout_s=timeout_s, watching=watching)
    named = {node_id: run.statuses.get(node_id, Status.MISSING) for node_id in node_ids}
    return replace(run, statuses=named)


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
    """Run all tests of these files or directories. Raises `GraderError` as `run_tests` does.

    `watching` reports the calls of `in_slot/audit_hook.py`. With `brief`, pytest prints no tracebacks.
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
    plan = {
        "root": root,
        "files": list(files),
        "python_path": [f"{root}/{path}".removesuffix("/.") for path in toolchain.python_path],
        "dependencies": list(toolchain.dependencies),
        "arguments": [*_ARGUMENTS, *toolchain.pytest_args, *(("--tb=no", "-rN") if brief else ())],
        "watching": watching,
        "pycache": f"{HARNESS_DIR}/pycache",
    }
    records, result = await run_harness(
        slot,
        toolchain.command,
        "pytest_reporter.py",
        plan,
        folder=HARNESS_DIR,
        env=HARNESS_ENVIRONMENT,
        timeout_s=timeout_s,
    )
    run = read_run(records, result)
    if run.exit_status == 0 and result.exit_code:  # code that runs at the end of the process has failed
        run = replace(run, exit_status=result.exit_code)
    return run


async def _check_canary(slot: Slot, toolchain: Toolchain) -> None:
    """Run the canary, a test that cannot fail. Raises `GraderError` if it does not pass."""
    root = f"{HARNESS_DIR}/canary"
    await slot.write_text(f"{root}/test_canary.py", _CANARY)
    await slot.write_text(f"{root}/pytest.ini", "[pytest]\n")
    canary = await _pytest(slot, toolchain, root, ["test_canary.py"], CANARY_TIMEOUT_S)
    if not canary.complete or list(canary.statuses.values()) != [Status.PASSED]:
        raise GraderError(
            f"the tests did not finish in {slot.slot_id}, and neither did a canary test, so the slot is broken.\n"
            f"{canary.output[-2000:]}"
        )


def read_run(records: Sequence[Mapping[str, JSON]], result: ExecutionResult) -> TestRun:
    """Return the test run that the records of one command describe; the command may have started pytest several
    times."""
    phases: dict[str, list[Mapping[str, JSON]]] = {}
    for record in records:
        if record["kind"] == "test":
            phases.setdefault(record["node_id"], []).append(record)
    collected = {name for record in records if record["kind"] == "collected" for name in record["node_ids"]}
    finish = next((record for record in records if record["kind"] == "finish"), None)
    failures = {
        name: FailedTest(**phase["failure"])
        for name, reports in phases.items()
        for phase in reports
        if phase["failure"]
    }
    return TestRun(
        statuses={name: _status(reports) for name, reports in phases.items() if name in collected},
        complete=finish is not None and collected <= phases.keys(),
        timed_out=bool(result.metadata.get("timeout")),
        exit_status=finish["exit_status"] if finish else None,
        failures=failures,
        collect_errors={record["node_id"]: record["message"] for record in records if record["kind"] == "collect"},
        durations_s={name: sum(phase["duration_s"] for phase in reports) for name, reports in phases.items()},
        output=result.output,
        alarms=alarms_in(records),
    )


def _status(phases: Sequence[Mapping[str, JSON]]) -> Status:
    """Return the worst outcome of a test's phases: a failing teardown overrides a passing call."""
    return min((_phase_status(phase) for phase in phases), key=_WORST_FIRST.index)


def _phase_status(phase: Mapping[str, JSON]) -> Status:
    outcome, expected = phase["outcome"], phase["wasxfail"]
    if outcome == "passed":
        return Status.XPASSED if expected else Status.PASSED
    if outcome == "skipped" and expected:
        return Status.XFAILED if phase.get("marked") else Status.XFAIL_CALLED
    if outcome == "skipped":
        return Status.SKIPPED
    return Status.FAILED if phase["when"] == "call" else Status.ERROR
