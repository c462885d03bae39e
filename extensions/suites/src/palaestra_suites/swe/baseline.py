"""Check a prepared row before its first rollout: its tests must run here, and must detect the bug.

A row as it is published seldom lists the packages that its tests need. If tests cannot run, what the repository itself
declares is installed, one place after the other (`declared.py`), until they do. With `narrow`, tests that do not hold
here with the reference solution are left out, and recorded. If the reference solution passes its tests but pytest exits
with an error because of the repository's `addopts` (a threshold of coverage, for example), the tests run without them.

Invariant: a row that cannot be graded here, or whose reference solution SWE-bench would not accept here, is refused
before any rollout, and the message begins with the cause.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from palaestra_slots.core.errors import AlreadySolved, PrepareError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON, Label
from palaestra_slots.sandbox.slot import Slot
from palaestra_suites.grading.harness import FAILED, Status, TestRun
from palaestra_suites.grading.log_parsers import counted
from palaestra_suites.swe.failure_cause import cause_of
from palaestra_suites.swe.row_tests import before_the_fix, missing_packages, not_installed
from palaestra_suites.swe.swe_row import RIGHT, SweRow

_RECORD = "/opt/palaestra/prepared.json"
_SHOWN = 1500
_NEAR = 500
_WITHOUT_ADDOPTS = ("-o", "addopts=")


class Tries(Protocol):
    """Runs the row's tests over the prepared repository, with the reference solution if `solved`."""

    async def __call__(self, solved: bool, options: Sequence[str] = ()) -> TestRun:
        """`options` are further arguments of pytest."""


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """How a row was made to run: the places whose packages were installed, the named tests that were left out, and
    further arguments of pytest. `alarms` has the evidence of the labels of the reference solution's own session.

    `ends` and `counts` tell whether the log of the reference solution ends with the summary of its runner, and whether
    the summary counts the tests that the log lists.
    """

    declared: tuple[str, ...] = ()
    narrowed: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    alarms: Mapping[str, Collection[str]] = field(default_factory=dict)
    ends: bool = False
    counts: bool = False

    def row(self, row: SweRow) -> SweRow:
        """Return the row without the tests that were left out."""
        left_out = set(self.narrowed)
        failing = tuple(name for name in row.fail_to_pass if name not in left_out)
        passing = tuple(name for name in row.pass_to_pass if name not in left_out)
        return replace(row, fail_to_pass=failing, pass_to_pass=passing) if left_out else row

    def unusual(self, labels: Iterable[Label]) -> list[Label]:
        """Return the labels of a session without evidence that the reference solution's session has too, for example
        functions of the test framework that a plugin of pytest replaces."""
        found = []
        for label in labels:
            known = set(self.alarms.get(label.name, ()))
            rest = [each for each in label.evidence.split(", ") if each not in known]
            if label.certain or rest:
                found.append(label if label.certain else replace(label, evidence=", ".join(rest)))
        return found

    def compared(self, run: TestRun) -> TestRun:
        """Return the run of a log with what it lacks of the reference solution's: its runner's summary, without which
        the session did not end by itself, or counts that agree with its lines."""
        count, passed = counted(run.output), list(run.statuses.values()).count(Status.PASSED)
        if not self.ends or count is None:
            return replace(run, complete=run.complete and not self.ends)
        evidence = f"the log lists {plural(passed, 'passed test')}, and its runner counted {count:g}"
        wrong = self.counts and passed > count
        return replace(run, alarms=(*run.alarms, Label("forgeable_log", evidence))) if wrong else run

    async def save(self, slot: Slot) -> None:
        """Write this into the prepared slot, outside the repository, where grading finds it."""
        if self != PreparedRow():
            await slot.write_text(_RECORD, json.dumps(asdict(self)))


async def load_prepared(slot: Slot) -> PreparedRow:
    """Return how the row of a grading slot was made to run. The agent's changes outside the repository are not in such
    a slot."""
    values = json.loads(await slot.read_text(_RECORD, missing="{}"))
    found: dict[str, JSON] = {name: tuple(values.get(name, ())) for name in ("declared", "narrowed", "options")}
    return PreparedRow(**found, **{name: values[name] for name in ("alarms", "ends", "counts") if name in values})


async def check_row(row: SweRow, tries: Tries, packages: AsyncIterator[str], *, narrow: bool) -> PreparedRow:
    """Make a row's tests run, and return how.

    `packages` installs the packages of one place of the repository for each step, and yields the place's name. Raises
    `PrepareError` if the tests cannot run here, and `AlreadySolved` if they do not detect the bug.
    """
    tries = _twice_if_late(tries)
    run = before_the_fix(row, await tries(False))
    solved: TestRun | None = None
    if run.cut_off and row.patch:
        solved = await tries(True)
        run = _without_hang(row, run, solved)
    used: list[str] = []
    if _lacks_packages(row, run):
        async for place in packages:
            used.append(place)
            run = before_the_fix(row, await tries(False))
            if not _lacks_packages(row, run):
                break
    options: tuple[str, ...] = ()
    if row.patch:
        solved = solved if solved is not None and not used else await tries(True)
        if not (narrow or solved.cut_off or row.official(solved).resolved):
            solved = await tries(True)  # a test may fail at random
        _check_time(row, solved)
        if _command_fails(row, solved) and row.recipe is None:
            plain = await tries(True, _WITHOUT_ADDOPTS)
            if not _command_fails(row, plain):
                options, solved = _WITHOUT_ADDOPTS, plain
                run = before_the_fix(row, await tries(False, options))
    narrowed = tuple(_not_holding(row, run, solved)) if narrow and solved is not None else ()
    alarms = {label.name: label.evidence.split(", ") for label in (solved.alarms if solved is not None else ())}
    made = PreparedRow(tuple(used), narrowed, options, alarms)
    if row.recipe is not None and solved is not None and (count := counted(solved.output)) is not None:
        passed = list(solved.statuses.values()).count(Status.PASSED)
        made = replace(made, ends=True, counts=passed <= count)
    kept = made.row(row)
    if not kept.fail_to_pass:
        assert solved is not None
        raise PrepareError(_complaint(row, solved, used, "no test that must start to pass does so here with the fix"))
    if problem := _problem(kept, run, missing_packages(run, row)):
        raise PrepareError(_complaint(row, run, used, problem))
    if solved is not None and not kept.verdict(kept.expected(solved)).resolved:
        raise PrepareError(_complaint(row, solved, used, _unsolved(kept, solved)))
    if solved is not None and not kept.official(solved).resolved:
        raise PrepareError(f"{_not_official(kept, solved)}; {row.instance_id}:\n{solved.output[-_SHOWN:]}")
    if not set(kept.fail_to_pass) & set(kept.verdict(run).not_passed):
        raise AlreadySolved(f"{row.instance_id}: the tests that must detect the bug pass although it is present")
    return made


def _command_fails(row: SweRow, solved: TestRun) -> bool:
    """Return whether the tests passed, but the status of their command says that they did not."""
    passed = row.verdict(row.expected(solved)).resolved
    return bool(solved.exit_status) and passed and not row.official(solved).resolved


def _not_official(row: SweRow, solved: TestRun) -> str:
    if _command_fails(row, solved):
        how = f"its test command ends with the exit status {solved.exit_status} although no test failed"
    else:
        bad = [f"{name}: {status}" for name, status in row.official(solved).not_passed.items()]
        how = f"{plural(len(bad), 'named test')} did not pass ({', '.join(bad[:3])})"
    return f"SWE-bench does not accept its reference solution here: {how}"


def _twice_if_late(tries: Tries) -> Tries:
    """Return `tries` that repeats a session in which a limit of the tests or their runner ended a test: it is a few
    seconds, which a busy machine exceeds."""

    async def repeated(solved: bool, options: Sequence[str] = ()) -> TestRun:
        run = await tries(solved, options)
        return await tries(solved, options) if run.timed_out and run.complete else run

    return repeated


def _check_time(row: SweRow, solved: TestRun) -> None:
    """Raise `PrepareError` if the reference solution's session did not end in time: it shows nothing about a test."""
    if solved.cut_off:
        raise PrepareError(_complaint(row, solved, [], "its tests did not end with the reference solution either"))


def _without_hang(row: SweRow, run: TestRun, solved: TestRun) -> TestRun:
    """Return the session before the fix, which the time limit ended, with the tests that it did not reach as they are
    with the reference solution, whose session ended: the bug is what hangs. Raises `PrepareError`."""
    _check_time(row, solved)
    unseen = [name for name in row.pass_to_pass if run.statuses.get(name, Status.MISSING) is Status.MISSING]
    reached = {name: solved.statuses.get(name, Status.MISSING) for name in unseen}
    return replace(run, statuses={**run.statuses, **reached})


def _lacks_packages(row: SweRow, run: TestRun) -> bool:
    """Return whether a test could not run for lack of something that a package may bring."""
    bad = row.verdict(row.expected(run)).not_passed
    if row.recipe is not None or not bad:
        return False
    if missing_packages(run, row) or any(name in bad for name in row.pass_to_pass):
        return True
    unclear = {Status.ERROR, Status.MISSING}
    return any(bad.get(name) in unclear for name in row.fail_to_pass) and _cause(row, run).startswith("missing")


def _not_holding(row: SweRow, run: TestRun, solved: TestRun) -> list[str]:
    """Return the named tests that do not pass with the reference solution, or that must pass before it and do not."""
    before = row.expected(run).statuses
    after = row.expected(solved).statuses
    bad = [name for name in row.node_ids if after.get(name) not in RIGHT]
    return bad + [name for name in row.pass_to_pass if before.get(name) not in RIGHT and name not in bad]


def _problem(row: SweRow, run: TestRun, missing: list[str]) -> str:
    verdict = row.verdict(row.expected(run))
    passing, total = verdict.pass_to_pass
    unseen = _unseen(row, run)
    listed, named = len(run.statuses.keys() - set(unseen)), len(row.node_ids) - len(unseen)
    if passing < total and row.recipe and listed and not set(verdict.not_passed) & set(row.pass_to_pass) - set(unseen):
        found = ", ".join(sorted(run.statuses.keys() - set(unseen), key=lambda name: (name in row.node_ids, name))[:3])
        return (
            f"the log lists {plural(listed, 'test')} ({found}), {named or 'none'} of the {len(row.node_ids)} that the "
            f"row names ({', '.join(unseen[:3])} are missing): it may be published for another command (install_config "
            "test_cmd), for example with more files or --all-features; --env.narrow keeps those that hold here"
        )
    if passing < total:
        bad = [f"{name}: {verdict.not_passed[name]}" for name in row.pass_to_pass if name in verdict.not_passed]
        return (
            f"only {passing} of {total} tests that must pass before and after the fix pass now ({', '.join(bad[:3])}); "
            "--env.narrow keeps those that hold here"
        )
    return "none of its tests could be collected" if missing and set(row.fail_to_pass) <= set(unseen) else ""


def _unsolved(row: SweRow, solved: TestRun) -> str:
    bad = [f"{name}: {status}" for name, status in row.verdict(row.expected(solved)).not_passed.items()]
    return f"{plural(len(bad), 'named test')} did not pass here with the reference solution ({', '.join(bad[:3])})"


def _complaint(row: SweRow, run: TestRun, used: list[str], problem: str) -> str:
    missing = missing_packages(run, row)
    parts = [f"{row.instance_id}: {not_installed(missing)}" if missing else row.instance_id, problem]
    parts += [f"tried {', '.join(used)}"] if used else []
    return f"{_cause(row, run)}; {'; '.join(parts)}:\n{run.output[-_SHOWN:]}"


def _evidence(row: SweRow, run: TestRun) -> str:
    """Return the text that may show the cause. If the tests of a log ran and some failed, only the lines next to the
    names of these count: the others may test what looks like a cause, for example an error of the network."""
    failed = [name for name in row.node_ids if run.statuses.get(name, Status.MISSING) not in RIGHT]
    ran = not _unseen(row, run)
    places = [run.output.rfind(name) for name in failed] if row.recipe is not None and ran else []
    if any(at >= 0 for at in places):
        return "\n".join(run.output[max(0, at - _NEAR) : at + 3 * _NEAR] for at in places if at >= 0)
    failures = (failure.exception for failure in run.failures.values())
    return "\n".join([*run.collect_errors.values(), *failures, run.output])


def _unseen(row: SweRow, run: TestRun) -> list[str]:
    return [name for name in row.node_ids if run.statuses.get(name, Status.MISSING) is Status.MISSING]


def _cause(row: SweRow, run: TestRun) -> str:
    if missing := missing_packages(run, row):
        return f"missing package: {', '.join(missing)}"
    errors: Mapping[str, str] = run.collect_errors
    found = cause_of(_evidence(row, run), run.exit_status, exceeded="test_timeout_s" if run.cut_off else "")
    last = [line for text in errors.values() for line in text.strip().splitlines()[-1:]]
    failed = sum(status in FAILED for status in run.statuses.values())
    skipped = [name for name in row.node_ids if run.statuses.get(name) is Status.SKIPPED]
    reason = next((run.failures[name].message for name in skipped if name in run.failures), "")
    return (
        found
        or next(iter(last), "")
        or (f"{plural(failed, 'test')} failed here" if failed else "")
        or (f"{plural(len(skipped), 'named test')} skipped here ({reason})" if skipped else "")
        or ("not the row's command" if run.statuses.keys() - set(_unseen(row, run)) else "")
        or "no test ran: its environment is not the row's"
    )
