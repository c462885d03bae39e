"""Run a test harness in a slot and return what it reports on the verdict channel.

No workspace code runs before the harness sends the record `start`. If the record is missing, the grader has failed and
not the agent.

Invariant: the harness holds no secret. The harness gets the files to run, but neither test names nor a key; this module
interprets the records.

Not covered: code under test shares the process of the harness and can write records (see `falsified.py`).
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
from typing import ClassVar

from palaestra.rollouts.grading.grader import Way, note_way
from palaestra_slots.core.errors import GraderError, InfraError
from palaestra_slots.core.types import JSON, Label
from palaestra_slots.sandbox.slot import WORKSPACE, ExecutionResult, Slot

FOLDER = "/tmp/.palaestra-grade"  # noqa: S108  in the slot; saved file systems do not contain it
"""The folder of the harness in the slot."""
PYTEST = "pytest_reporter.py"
"""The script that runs pytest, which reports what it reads for its own output."""


class TestsTimedOut(GraderError):
    """Raised if a test session did not end in time. A second session can show whether the work or a slow machine is the
    cause."""

    __test__: ClassVar[bool] = False  # pytest: not a test class


class Status(StrEnum):
    """The outcome of one test over all its phases, the worst first. A skipped tear-down or subtest does not make a
    passed test a skipped one: pytest lists it as passed."""

    ERROR = "error"
    FAILED = "failed"
    XFAIL_CALLED = "xfail called"
    """The test, or the code under test, called `pytest.xfail`."""
    XFAILED = "xfailed"
    """The test is marked `xfail` and failed."""
    XPASSED = "xpassed"
    PASSED = "passed"
    SKIPPED = "skipped"
    MISSING = "missing"


FAILED = frozenset({Status.FAILED, Status.ERROR})
"""The statuses of tests that failed in one of their phases."""


@dataclass(frozen=True, slots=True)
class FailedTest:
    """The exception of a failed test, and the last line in its traceback that belongs to the test's function.

    `path` is the file of the test's code, which for an inherited test differs from its node id. `line` is 0 if the
    traceback does not contain that file. `params` holds the `repr` of each parameter of the test. Only pytest reports
    more than the `message`.
    """

    exception: str = ""
    message: str = ""
    path: str = ""
    line: int = 0
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TestRun:
    """One test session. `complete` means that it ended by itself, after a report on each collected test.

    `alarms` are labels for what the harness reported, `output` is what the harness printed, and `known_as` maps tests
    to further names under which another program lists them. `opened` counts how often test files were opened.
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
    alarms: tuple[Label, ...] = ()
    known_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    opened: Mapping[str, int] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[Label, ...]:
        """The alarms, and a label if the session did not end by itself after tests had passed. That label is certain:
        either code of the work ended the session in place of the harness, or the session crashed, and then the tests
        have not passed."""
        if self.complete or self.timed_out or Status.PASSED not in self.statuses.values():
            return self.alarms
        evidence = f"the test session ended before its end: {self.output[-300:]!r}"
        return (*self.alarms, Label("session_cut_short", evidence, certain=True))

    @property
    def cut_off(self) -> bool:
        """Whether the time limit ended the session, so that tests are missing."""
        return self.timed_out and not self.complete

    def check_ended(self, what: str) -> None:
        """Raise `TestsTimedOut` if the time limit ended the session, because such a run gives no verdict."""
        if self.timed_out:
            raise TestsTimedOut(f"{what}: its tests timed out:\n{self.output[-1500:]}")

    def passed(self, node_ids: Collection[str]) -> int:
        """Return how many of these tests passed. Skipped, xfailed and missing tests do not count."""
        return sum(self.statuses.get(node_id) is Status.PASSED for node_id in node_ids)


async def run_harness(
    slot: Slot,
    command: Sequence[str],
    script: str,
    plan: Mapping[str, JSON],
    *,
    env: Mapping[str, str],
    timeout_s: float,
) -> tuple[list[Mapping[str, JSON]], ExecutionResult]:
    """Copy `script` of `in_slot` into `FOLDER`, start it with `command` in `plan["root"]`, and return its records.

    Other paths in `plan` are relative to that directory. Raises `GraderError` if the script does not send `start`.
    """
    note_way(Way.RUN_TESTS)
    # Where the workspace has a second path, commands start there, and frameworks name files relative to it.
    root = slot.workspace_dir if plan["root"] == WORKSPACE else plan["root"]
    await send_scripts(slot, FOLDER, script)
    result = await slot.execute(
        [*command, f"{FOLDER}/{script}"],
        cwd=root,
        env=env,
        stdin=json.dumps({**plan, "root": root}).encode(),
        timeout_s=timeout_s,
        verdict=True,
        watched=[f"{root}/{path}" for path in plan.get("files", ()) if plan["watching"] and script == PYTEST],
    )
    records = read_records(result.verdict)
    if not any(record["kind"] == "start" for record in records):
        raise GraderError(f"the test harness did not start in {slot.slot_id}: {result.error}\n{result.output[-2000:]}")
    return records, result


async def send_scripts(slot: Slot, folder: str, *names: str) -> None:
    """Copy files of `in_slot`, and the module that all of them import, into a folder of the slot."""
    for name in ("verdict_channel.py", *names):
        await slot.write_bytes(f"{folder}/{name}", _script(name))


@functools.cache
def _script(name: str) -> bytes:
    return resources.files(f"{__package__}.in_slot").joinpath(name).read_bytes()


def read_records(data: bytes) -> list[Mapping[str, JSON]]:
    """Return the records of one run. Lines that are torn or malformed are dropped."""
    records: list[Mapping[str, JSON]] = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            records.append(record)
    return records


def alarms_in(records: Sequence[Mapping[str, JSON]]) -> tuple[Label, ...]:
    """Return labels for the alarms in the records. A session that ends twice, although the harness was started once, is
    certain: a harness reports the end once, and no honest work writes to the verdict channel."""
    found: dict[str, set[str]] = {}
    for record in records:
        if record["kind"] == "alarm":
            event, path = str(record.get("event")), str(record.get("path", ""))
            name = "framework_changed" if event.startswith("changed ") else "audited_call"
            found.setdefault(name, set()).add(f"{event} in {path}".removesuffix(" in "))
    labels = [Label(name, ", ".join(sorted(events)[:50])) for name, events in sorted(found.items())]
    kinds = [record["kind"] for record in records]
    if kinds.count("finish") > 1 and kinds.count("start") == 1:
        labels.append(Label("forged_records", "a session that ends twice", certain=True))
    return tuple(labels)


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
        statuses={name: _worst_status(reports) for name, reports in phases.items() if name in collected},
        complete=finish is not None and collected <= phases.keys(),
        timed_out=bool(result.metadata.get("timeout")),
        exit_status=finish["exit_status"] if finish else None,
        failures=failures,
        collect_errors={record["node_id"]: record["message"] for record in records if record["kind"] == "collect"},
        durations_s={name: sum(phase.get("duration_s", 0.0) for phase in reports) for name, reports in phases.items()},
        output=result.output,
        alarms=alarms_in(records),
        opened=opened_in(records, result),
    )


def opened_in(records: Sequence[Mapping[str, JSON]], result: ExecutionResult) -> dict[str, int]:
    """Return how often each watched file was opened, without the readings that pytest needed for its own output."""
    own = Counter(str(record.get("path")) for record in records if record["kind"] == "read")
    return {path: times - own[path] for path, times in result.metadata.get("opened", {}).items()}


def reads_of_tests(opened: Mapping[str, int], usual: Mapping[str, int]) -> list[Label]:
    """Return a label if files of tests were opened more often than is usual, by whatever program and path."""
    found = [path for path, times in opened.items() if times > usual.get(path, times)]
    evidence = f"{', '.join(found[:5])}: opened more often than with the reference solution"
    return [Label("tests_read", evidence)] if found else []


def _worst_status(phases: Sequence[Mapping[str, JSON]]) -> Status:
    """Return the worst outcome of a test's phases: a failing teardown overrides a passing call."""
    return min(map(_phase_status, phases), key=[*Status].index)


def _phase_status(phase: Mapping[str, JSON]) -> Status:
    outcome, expected = phase["outcome"], phase.get("wasxfail")
    if outcome == "passed":
        return Status.XPASSED if expected else Status.PASSED
    if outcome == "skipped" and expected:
        return Status.XFAILED if phase.get("marked") else Status.XFAIL_CALLED
    if outcome == "skipped":
        return Status.SKIPPED
    return Status.FAILED if phase["when"] == "call" else Status.ERROR


async def content_of(slot: Slot, path: str, max_bytes: int) -> bytes | None:
    """Return a file's content; None if it cannot be read, because there is no such file or it is larger."""
    try:
        return await slot.read_bytes(path, max_bytes=max_bytes)
    # A lost slot is an OSError as well, but it says nothing about the file.
    except InfraError:
        raise
    except OSError:
        return None
