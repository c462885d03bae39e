"""Tests of the list of slow tests: how it is made, and that it names only tests that exist."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("slow_tests", ROOT / "scripts" / "slow_tests.py")
assert SPEC is not None
assert SPEC.loader is not None
slow_tests = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(slow_tests)


def test_a_function_is_listed_once_if_most_of_its_cases_are_slow() -> None:
    seconds = {"a.py::one[x]": 0.7, "a.py::one[y]": 0.6, "a.py::two[x]": 0.9, "a.py::two[y]": 0.1, "a.py::three": 0.4}
    assert slow_tests.slow_tests(seconds) == ["a.py::one", "a.py::two[x]"]


def test_the_list_names_only_tests_that_exist() -> None:
    texts: dict[str, str] = {}
    for line in slow_tests.LISTED.read_text(encoding="utf-8").splitlines():
        path, _, name = line.partition("::")
        text = texts.setdefault(path, (ROOT / path).read_text(encoding="utf-8"))
        function = name.partition("[")[0].rpartition("::")[2]
        assert f"def {function}(" in text or "::Test" in line, f"delete the line {line}, and mark the test `slow`"


def test_files_with_a_slow_test_are_found_by_the_list_and_by_the_marker() -> None:
    files = slow_tests.slow_files()
    assert "tests/chaos/test_chaos.py" in files, "marked"
    assert "tests/test_package.py" not in files
    assert {line.partition("::")[0] for line in slow_tests.LISTED.read_text().splitlines()} <= set(files)
