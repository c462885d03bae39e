"""The first check of a row: its reference solution must be right by SWE-bench's protocol too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from palaestra_slots.core.errors import PrepareError
from palaestra_slots.core.types import JSON, Label
from palaestra_suites.grading.harness import Status, TestRun
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.baseline import PreparedRow, check_row
from palaestra_suites.swe.swe_row import parse_row
from palaestra_suites.toolchain.toolchain import DependencyCache
from suites.swe.published import BASE, Source, roll_out

ROW: dict[str, JSON] = {
    "instance_id": "o__n-1", "repo": "o/n", "base_commit": "abc123", "problem_statement": "It is wrong.",
    "patch": unified_diff.between("calc.py", "bug\n", "fix\n"),
    "test_patch": unified_diff.between("t.py", "a\n", "b\n"),
    "FAIL_TO_PASS": ["t.py::add"], "PASS_TO_PASS": ["t.py::double"],
}  # fmt: skip
GOOD = TestRun({"t.py::add": Status.PASSED, "t.py::double": Status.PASSED}, complete=True, exit_status=0)
BUG = replace(GOOD, statuses={**GOOD.statuses, "t.py::add": Status.FAILED}, exit_status=1)
FAILS = replace(GOOD, exit_status=1, output="FAIL Required test coverage of 99% not reached.")
MOCKS = (
    "changed unittest.mock.NonCallableMock.assert_called",
    "changed unittest.mock.NonCallableMock.assert_not_called",
)


def check(solved: Sequence[TestRun], plain: TestRun = FAILS) -> PreparedRow:
    """Check a row whose sessions with the reference solution give these results in turn; `plain` is the result of all
    sessions without `addopts`."""
    results = list(solved)

    async def tries(solved: bool, options: Sequence[str] = ()) -> TestRun:
        if not solved:
            return BUG
        return plain if options else results.pop(0) if len(results) > 1 else results[0]

    async def packages() -> AsyncIterator[str]:
        for place in ():
            yield place

    return asyncio.run(check_row(parse_row(ROW), tries, packages(), narrow=False))


def test_a_row_whose_reference_solution_is_official_is_sound() -> None:
    assert check([GOOD]) == PreparedRow()


def test_a_command_that_fails_although_its_tests_pass_runs_without_addopts() -> None:
    assert check([FAILS], GOOD) == PreparedRow(options=("-o", "addopts="))


def test_a_row_whose_reference_solution_is_not_official_is_refused() -> None:
    message = "^SWE-bench does not accept its reference solution here: its test command ends with the exit status 1 alt"
    with pytest.raises(PrepareError, match=message) as caught:
        check([FAILS], FAILS)
    assert "o__n-1" in str(caught.value)
    assert "coverage of 99%" in str(caught.value)


def test_a_test_that_fails_at_random_does_not_refuse_the_row() -> None:
    flaky = replace(GOOD, statuses={**GOOD.statuses, "t.py::double": Status.FAILED}, exit_status=1)
    assert check([flaky, GOOD]) == PreparedRow()


def test_evidence_that_the_reference_solution_has_too_is_no_label() -> None:
    """pytest-mock replaces functions of `unittest.mock` in every session."""
    prepared = check([replace(GOOD, alarms=(Label("framework_changed", ", ".join(MOCKS)),))])
    own = "changed unittest.case.TestCase.assertEqual"
    assert prepared.unusual([Label("framework_changed", ", ".join(MOCKS))]) == []
    assert prepared.unusual([Label("framework_changed", ", ".join((*MOCKS, own)))]) == [Label("framework_changed", own)]
    others = [Label("audited_call", MOCKS[0]), Label("framework_changed", MOCKS[0], certain=True)]
    assert prepared.unusual(others) == others


COVERAGE = """
import pytest, unittest.mock

def pytest_addoption(parser):
    parser.addoption("--fail-under", default="")

def pytest_configure(config):
    unittest.mock.NonCallableMock.assert_called = lambda self: None

@pytest.hookimpl(hookwrapper=True)
def pytest_runtestloop(session):
    yield
    session.testsfailed += bool(session.config.getoption("--fail-under") or ALWAYS)
"""
"""Lets a session fail as pytest-cov does, and replaces a function as pytest-mock does."""


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reference_of_a_prepared_row_is_official_and_has_no_label(
    tmp_path: Path, installed_pytest: DependencyCache
) -> None:
    """One row runs without its `addopts`, as its record says; the other one is refused."""
    plugin = {"conftest.py": f"ALWAYS = False\n{COVERAGE}", "pytest.ini": "[pytest]\naddopts = --fail-under=99\n"}
    repaired = Source.make(tmp_path / "repaired", {**BASE, **plugin})
    broken = Source.make(tmp_path / "broken", {**BASE, "conftest.py": f"ALWAYS = True\n{COVERAGE}"})
    rows = [repaired.row(), broken.row()]
    good, refused = roll_out(rows, "oracle", tmp_path / "run", installed_pytest, "--env.shuffle=false")
    (trajectory,) = good.trajectories
    assert (trajectory.reward, trajectory.official, list(trajectory.labels)) == (1.0, 1.0, [])
    assert trajectory.detail["pytest_options"] == ["-o", "addopts="]
    assert "SWE-bench does not accept its reference solution here" in refused.error
