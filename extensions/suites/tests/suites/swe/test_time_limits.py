"""Sessions that exceed a time limit: a slow machine is not the agent's failure, and a bug that hangs is a bug."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import PrepareError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import ExecutionResult
from palaestra_suites.grading.harness import FailedTest, Status, TestRun
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.baseline import PreparedRow, check_row
from palaestra_suites.swe.command_tests import read_command
from palaestra_suites.swe.swe_row import SweRow, parse_row
from palaestra_suites.toolchain.toolchain import DependencyCache
from suites.swe.published import Source, WithoutBaseline, roll_out

ROW: dict[str, JSON] = {
    "instance_id": "o__n-1", "repo": "o/n", "base_commit": "abc123", "problem_statement": "It hangs.",
    "patch": unified_diff.between("calc.js", "bug\n", "fix\n"), "language": "javascript",
    "test_patch": unified_diff.between("test/calc.test.js", "a\n", "b\n"),
    "FAIL_TO_PASS": ["add"], "PASS_TO_PASS": ["double", "triple"],
}  # fmt: skip
NAMES = ("add", "double", "triple")
GOOD = TestRun(dict.fromkeys(NAMES, Status.PASSED), complete=True, exit_status=0)
BAD = TestRun({**GOOD.statuses, "add": Status.FAILED}, complete=True, exit_status=1)
HANGS = TestRun({"double": Status.PASSED, "add": Status.MISSING}, complete=False, timed_out=True, exit_status=124)


def row(**columns: JSON) -> SweRow:
    return parse_row({**ROW, **columns})


def log(text: str, names: tuple[str, ...] = NAMES, **metadata: JSON) -> TestRun:
    made = row(install_config={"test_cmd": "x", "log_parser": "parse_log_tap"})
    lines = "\n".join(f"ok {number} {name}" for number, name in enumerate(names, 1))
    return read_command(made, ExecutionResult(True, f"{lines}\n{text}", metadata=metadata), NAMES)


@pytest.mark.parametrize(
    "line",
    [
        "Error: Timeout of 2000ms exceeded. For async tests and hooks, ensure done() is called",
        "thrown: \"Exceeded timeout of 5000 ms for a test.", "Error: Test timed out in 5000ms.",
        "panic: test timed out after 10m0s", " 3/9 Test  #3: slow .....***Timeout 1500.01 sec",
        "java.util.concurrent.TimeoutException: add() execution timed out after 1000 ms", "2/4 slow   TIMEOUT 30.01s",
        "expected no Exception, got #<Timeout::Error: execution expired> with backtrace:",
    ],
)  # fmt: skip
def test_a_limit_of_the_runner_asks_for_the_control(line: str) -> None:
    """The limits of runners are seconds, so a busy machine exceeds them; the reference solution shows the cause."""
    run = log(line, ("double", "triple"))
    assert (run.timed_out, run.complete) == (True, True)


def test_only_a_named_test_that_has_not_passed_asks_for_the_control() -> None:
    assert not log("Error: Timeout of 2000ms exceeded").timed_out
    assert not log("not ok 1 add", ("double", "triple")).timed_out
    assert log("", timeout=True).timed_out


def check(before: TestRun, after: TestRun, *, narrow: bool = False, **columns: JSON) -> PreparedRow:
    async def tries(solved: bool, options: Sequence[str] = ()) -> TestRun:
        return after if solved else before

    async def packages() -> AsyncIterator[str]:
        for place in ():
            yield place

    return asyncio.run(check_row(row(**columns), tries, packages(), narrow=narrow))


@pytest.mark.parametrize("columns", [{}, {"language": "", "test_patch": ""}], ids=["javascript", "python"])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_bug_that_hangs_the_tests_does_not_refuse_the_row(columns: Mapping[str, JSON], narrow: bool) -> None:
    """The tests after the hanging one are as the reference solution shows them, and none is left out."""
    if columns:
        names = {"add": "t.py::add", "double": "t.py::double", "triple": "t.py::triple"}
        columns = {**columns, "kind": "swe-bench", "test_patch": unified_diff.between("t.py", "a\n", "b\n"),
                   "FAIL_TO_PASS": [names["add"]], "PASS_TO_PASS": [names["double"], names["triple"]]}  # fmt: skip
        before, after = (
            replace(run, statuses={names[name]: status for name, status in run.statuses.items()})
            for run in (HANGS, GOOD)
        )
    else:
        before, after = HANGS, GOOD
    assert check(before, after, narrow=narrow, **columns) == PreparedRow()


@pytest.mark.parametrize("before", [BAD, HANGS])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_slow_reference_solution_refuses_the_row(before: TestRun, narrow: bool) -> None:
    """With `narrow`, tests that a slow machine did not reach must not be left out."""
    with raises(PrepareError, "o__n-1"):
        check(before, HANGS, narrow=narrow)


def test_the_message_for_names_of_another_command_tells_what_the_log_lists() -> None:
    before = TestRun({**dict.fromkeys(NAMES, Status.MISSING), "other": Status.PASSED, "more": Status.PASSED}, True)
    with raises(PrepareError, "command", "o__n-1"):
        check(before, before)
    some = TestRun({**before.statuses, "double": Status.PASSED}, True)
    with raises(PrepareError, "double", "--all-features"):
        check(some, some)


def test_the_message_for_skipped_tests_begins_with_the_reason_that_they_give() -> None:
    """Sphinx, for example, skips tests if Graphviz is not installed."""
    columns = {"language": "", "kind": "swe-bench", "test_patch": unified_diff.between("t.py", "a\n", "b\n"),
               "FAIL_TO_PASS": ["t.py::add"], "PASS_TO_PASS": ["t.py::double"]}  # fmt: skip
    statuses = {"t.py::add": Status.SKIPPED, "t.py::double": Status.SKIPPED}
    skipped = {"t.py::double": FailedTest("Skipped", "dot is required")}
    before = TestRun(statuses, complete=True, failures=skipped)
    with raises(PrepareError, "dot is required", "o__n-1"):
        check(before, before, **columns)


async def test_a_session_with_a_late_test_is_repeated_before_the_row_is_refused() -> None:
    runs = [BAD, replace(BAD, timed_out=True), GOOD]

    async def tries(solved: bool, options: Sequence[str] = ()) -> TestRun:
        return runs.pop(0)

    async def packages() -> AsyncIterator[str]:
        for place in ():
            yield place

    made = row(install_config={"test_cmd": "x", "log_parser": "parse_log_tap"})
    assert await check_row(made, tries, packages(), narrow=False) == PreparedRow()
    assert runs == []


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("ok 1 double\nNetwork is unreachable\n{pad}1) add\nTimeout::Error: execution expired",
         "out of time: a limit of the tests or their runner ended a test (execution expired); o__n-1; 1 named test"),
        ("ok 1 double\nNetwork is unreachable\n{pad}1) add\nexpected 3, got 2", "1 test failed here; o__n-1; 1 named"),
        ("Network is unreachable", "no network; o__n-1; 1 named test"),
    ],
)  # fmt: skip
def test_the_cause_is_looked_for_at_the_tests_that_failed(log: str, cause: str) -> None:
    """Other tests may print what looks like a cause, because it is what they test."""
    with pytest.raises(PrepareError) as caught:
        check(BAD, replace(BAD, output=log.format(pad="x\n" * 600)))
    assert str(caught.value).startswith(cause)


SCRIPT = "add() { echo $(($1 %s $2)); }\n"
TESTS = """
. ./calc.sh
verdict() { [ "$1" = "$2" ] && echo "PASS: $3" || echo "FAIL: $3"; }
verdict "$(add 1 2)" 3 add
verdict "$(add 0 0)" 0 zero
"""


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "tests", "reward"),
    [(f"sleep 600\n{SCRIPT % '+'}", TESTS, 0.0), (SCRIPT % "+", f"sleep 600\n{TESTS}", None)],
    ids=["the work hangs", "the tests hang"],
)
def test_only_work_that_hangs_is_scored_zero(
    work: str, tests: str, reward: float | None, tmp_path: Path, installed_pytest: DependencyCache
) -> None:
    """In another language than Python: if the reference solution exceeds the limit too, there is no score."""
    source = Source.make(tmp_path / "source", {"calc.sh": SCRIPT % "-", "test_calc.sh": "\n"})
    config = {"test_cmd": ["sh test_calc.sh"], "log_parser": "parse_log_jq"}
    made = source.row(
        patch=source.diff({"calc.sh": SCRIPT % "+"}),
        test_patch=source.diff({"test_calc.sh": tests}),
        FAIL_TO_PASS=["add"],
        PASS_TO_PASS=["zero"],
        language="c",
        install_config=config,
    )
    del made["install"]
    patch = tmp_path / "work.patch"
    patch.write_text(source.diff({"calc.sh": work}))
    limit = "--env.test_timeout_s=2"
    (group,) = roll_out([made], f"patch:{patch}", tmp_path / "run", installed_pytest, limit, kind=WithoutBaseline)
    (trajectory,) = group.trajectories
    assert trajectory.reward == reward, (trajectory.detail, trajectory.error)
    if reward is None:
        assert "within 2 s: its tests timed out" in trajectory.error
        assert "the reference solution fails too" in trajectory.error
