"""The tests that a verifier's files define and that its run does not report."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra_suites.grading.harness import Status, TestRun
from palaestra_suites.terminal_bench import harbor_task
from palaestra_suites.terminal_bench.default_tests import default_tests
from palaestra_suites.terminal_bench.offline_script import offline
from palaestra_suites.terminal_bench.verifier import left_out_tests, skipped_tests
from suites.terminal_bench.mini import HARBOR, copied

SOURCE = """
import unittest

def helper(): ...

def test_a(): ...

class TestC:
    def test_b(self): ...

class Case(unittest.TestCase):
    def test_c(self): ...

class Other:
    def test_d(self): ...
"""


def test_the_tests_that_pytest_collects_by_default() -> None:
    assert default_tests(SOURCE) == {"test_a", "TestC::test_b", "Case::test_c"}
    assert default_tests("def test_a(:") == frozenset()


@pytest.mark.parametrize(
    ("script", "reported", "missing"),
    [
        ("pytest /tests\n", ["test_one.py::test_a", "test_two.py::test_b"], []),
        ("pytest /tests\n", ["test_one.py::test_a"], ["test_two.py::test_b"]),
        ("pytest /tests/test_one.py\n", ["test_one.py::test_a"], []),
        ("pytest /tests/test_one.py /tests/test_two.py\n", ["test_one.py::test_a"], ["test_two.py::test_b"]),
        ("pytest /tests -k a\n", ["test_one.py::test_a"], []),
    ],
)
def test_tests_that_were_left_out(script: str, reported: list[str], missing: list[str], tmp_path: Path) -> None:
    files = {
        "tests/test_one.py": "def test_a(): ...\n",
        "tests/test_two.py": "def test_b(): ...\n",
        "tests/helper.py": "def test_c(): ...\n",
    }
    task = harbor_task.read_task(copied(HARBOR / "word-counts", tmp_path, files))
    run = TestRun(dict.fromkeys(reported, Status.PASSED), complete=True)
    assert left_out_tests(task, offline(script), run) == missing


def test_skipped_tests_of_files_that_never_skip(tmp_path: Path) -> None:
    run = TestRun({"test_one.py::test_a": Status.SKIPPED}, complete=True)
    plain = copied(HARBOR / "word-counts", tmp_path / "a", {"tests/test_one.py": "def test_a(): ...\n"})
    assert skipped_tests(harbor_task.read_task(plain), run) == ["test_one.py::test_a"]
    skips = copied(HARBOR / "word-counts", tmp_path / "b", {"tests/test_one.py": "import pytest\npytest.skip()\n"})
    assert skipped_tests(harbor_task.read_task(skips), run) == []
