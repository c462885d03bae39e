"""Runs named tests in a slot and says what became of each of them.

`run_tests` sends `reporter.py` into the slot and reads its records from the verdict channel. Every named test gets a
status; one that was not reported is `MISSING` and counts as not passed.

Whose fault is silence? Until the reporter's `start` record nothing of the workspace has run, so without it the harness
failed: `GraderError`. If pytest did not end its session afterwards (a crash, `os._exit`, a timeout, a broken import in
a conftest's module), a canary test of our own runs in the same slot: when it passes, the workspace silenced its own
tests, which is a failure of those tests; when it does not, the slot is broken: `GraderError`.

Not covered: code under test runs in the process that reports on it. The channel's nonce comes by standard input and is
in no file, argument or variable, but code that searches its own interpreter's memory can find it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import resources
from typing import ClassVar

from palaestra.core.errors import GraderError
from palaestra.core.types import JSON
from palaestra.sandbox.slot import ExecutionResult, Slot
from palaestra.suites.swe.install import Toolchain
from palaestra.suites.swe.swe_rows import SweRow

HARNESS_DIR = "/tmp/.palaestra-grade"  # noqa: S108  # a path in the slot, which is nobody else's
CANARY_TIMEOUT_S = 60.0

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


class Status(StrEnum):
    """What became of one test, all its phases together."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"
    MISSING = "missing"


_WORST_FIRST = (Status.ERROR, Status.FAILED, Status.SKIPPED, Status.XFAILED, Status.XPASSED, Status.PASSED)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a test did not pass: the exception, and the last line of the test's own file that it passed through.

    `path` is the file of the test's code, which for an inherited test is not that of its name; `line` 0 means that the
    exception did not pass through it. `params` are the parameters of the test as `repr` shows them.
    """

    exception: str
    message: str
    path: str
    line: int
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TestRun:
    """One run of pytest. `complete` means that pytest ended its session by itself; `output` is its printed text."""

    __test__: ClassVar[bool] = False  # not a test class, in spite of the name

    statuses: Mapping[str, Status]
    complete: bool
    timed_out: bool = False
    exit_status: int | None = None
    failures: Mapping[str, Failure] = field(default_factory=dict)
    collect_errors: Mapping[str, str] = field(default_factory=dict)
    durations_s: Mapping[str, float] = field(default_factory=dict)
    output: str = ""

    def passed(self, node_ids: Collection[str]) -> int:
        """How many of these tests passed. Skipped, expected to fail and missing ones did not."""
        return sum(self.statuses.get(node_id) is Status.PASSED for node_id in node_ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A run held against the tests of a row. `not_passed` names the others with their status, in the row's order."""

    fail_to_pass: tuple[int, int]
    pass_to_pass: tuple[int, int]
    complete: bool
    not_passed: Mapping[str, Status]

    @property
    def resolved(self) -> bool:
        """Every named test passed, in a session that ended by itself."""
        return self.complete and not self.not_passed


def verdict(run: TestRun, row: SweRow) -> Verdict:
    """Count F2P and P2P apart, as (passed, named)."""
    bad = {name: run.statuses.get(name, Status.MISSING) for name in row.node_ids}
    return Verdict(
        fail_to_pass=(run.passed(row.fail_to_pass), len(row.fail_to_pass)),
        pass_to_pass=(run.passed(row.pass_to_pass), len(row.pass_to_pass)),
        complete=run.complete,
        not_passed={name: status for name, status in bad.items() if status is not Status.PASSED},
    )


async def run_tests(
    slot: Slot, toolchain: Toolchain, repo_dir: str, node_ids: Sequence[str], *, timeout_s: float
) -> TestRun:
    """Run exactly these tests. Ids travel on standard input: any length, any characters, no shell.

    Raises `GraderError` when the harness or the slot failed rather than the tests.
    """
    files = sorted({node_id.split("::", 1)[0] for node_id in node_ids})
    run = await _run(slot, toolchain, repo_dir, files, node_ids, timeout_s)
    named = {node_id: run.statuses.get(node_id, Status.MISSING) for node_id in node_ids}
    return replace(run, statuses=named)


async def run_files(
    slot: Slot, toolchain: Toolchain, repo_dir: str, files: Sequence[str], *, timeout_s: float
) -> TestRun:
    """Run whatever tests these files (or directories) hold. Raises `GraderError` as `run_tests` does."""
    return await _run(slot, toolchain, repo_dir, files, (), timeout_s)


async def _run(
    slot: Slot, toolchain: Toolchain, repo_dir: str, files: Sequence[str], names: Sequence[str], timeout_s: float
) -> TestRun:
    nonce = secrets.token_hex(16)
    result = await _pytest(slot, toolchain, repo_dir, files, names, nonce, timeout_s)
    records = read_records(result.verdict, nonce)
    if not any(record["kind"] == "start" for record in records):
        raise GraderError(f"the test harness did not start in {slot.slot_id}: {result.error}\n{result.output[-2000:]}")
    run = read_run(records, result)
    if not run.complete:
        await _check_canary(slot, toolchain)
    return run


async def _pytest(
    slot: Slot,
    toolchain: Toolchain,
    root: str,
    files: Sequence[str],
    names: Sequence[str],
    nonce: str,
    timeout_s: float,
) -> ExecutionResult:
    script = f"{HARNESS_DIR}/reporter.py"
    await slot.write_bytes(script, resources.files(__package__).joinpath("reporter.py").read_bytes())
    plan = {
        "nonce": nonce,
        "root": root,
        "files": list(files),
        "names": list(names),
        "python_path": [f"{root}/{path}".removesuffix("/.") for path in toolchain.python_path],
        "dependencies": list(toolchain.dependencies),
        "arguments": [*_ARGUMENTS, *toolchain.pytest_args],
        "pycache": f"{HARNESS_DIR}/pycache",
    }
    return await slot.execute(
        [*toolchain.command, script],
        cwd=root,
        env=_ENVIRONMENT,
        stdin=json.dumps(plan).encode(),
        timeout_s=timeout_s,
        verdict=True,
    )


async def _check_canary(slot: Slot, toolchain: Toolchain) -> None:
    """Raises `GraderError` unless a test that cannot fail passes here."""
    root, nonce = f"{HARNESS_DIR}/canary", secrets.token_hex(16)
    await slot.write_text(f"{root}/test_canary.py", _CANARY)
    await slot.write_text(f"{root}/pytest.ini", "[pytest]\n")
    result = await _pytest(slot, toolchain, root, ["test_canary.py"], (), nonce, CANARY_TIMEOUT_S)
    canary = read_run(read_records(result.verdict, nonce), result)
    if not canary.complete or list(canary.statuses.values()) != [Status.PASSED]:
        raise GraderError(
            f"the tests did not finish in {slot.slot_id}, and neither does a canary test: the slot is broken. "
            f"{result.error}\n{result.output[-2000:]}"
        )


def read_records(data: bytes, nonce: str) -> list[Mapping[str, JSON]]:
    """The reporter's records of one run. Torn, foreign and unsigned lines are dropped."""
    records: list[Mapping[str, JSON]] = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("nonce") == nonce:
            records.append(record)
    return records


def read_run(records: Sequence[Mapping[str, JSON]], result: ExecutionResult) -> TestRun:
    """What the records say of one command, or of several that it started one after another."""
    phases: dict[str, list[Mapping[str, JSON]]] = {}
    for record in records:
        if record["kind"] == "test":
            phases.setdefault(record["node_id"], []).append(record)
    collected = {name for record in records if record["kind"] == "collected" for name in record["node_ids"]}
    finish = next((record for record in records if record["kind"] == "finish"), None)
    failures = {
        name: Failure(**phase["failure"]) for name, reports in phases.items() for phase in reports if phase["failure"]
    }
    return TestRun(
        statuses={name: _status(reports) for name, reports in phases.items() if name in collected},
        complete=finish is not None,
        timed_out=bool(result.metadata.get("timeout")),
        exit_status=finish["exit_status"] if finish else None,
        failures=failures,
        collect_errors={record["node_id"]: record["message"] for record in records if record["kind"] == "collect"},
        durations_s={name: sum(phase["duration_s"] for phase in reports) for name, reports in phases.items()},
        output=result.output,
    )


def _status(phases: Sequence[Mapping[str, JSON]]) -> Status:
    """The worst of a test's phases: a failing teardown spoils a passing call."""
    return min((_phase_status(phase) for phase in phases), key=_WORST_FIRST.index)


def _phase_status(phase: Mapping[str, JSON]) -> Status:
    outcome, expected = phase["outcome"], phase["wasxfail"]
    if outcome == "passed":
        return Status.XPASSED if expected else Status.PASSED
    if outcome == "skipped":
        return Status.XFAILED if expected else Status.SKIPPED
    return Status.FAILED if phase["when"] == "call" else Status.ERROR
