"""SWE-bench Verified's columns, and the forms in which its twelve repositories name their tests."""

from __future__ import annotations

import json

import pytest

from palaestra_slots.core.types import JSON
from palaestra_suites.grading.harness import Status, TestRun
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.row_tests import meant
from palaestra_suites.swe.swe_row import SweRow, TestNames, parse_row


def verified(repo: str, failing: list[str], passing: list[str], *tests: str) -> SweRow:
    """Return a row in the published columns, whose `test_patch` changes these files."""
    patch = "".join(unified_diff.between(path, "a\n", "b\n") for path in tests)
    row: dict[str, JSON] = {
        "repo": repo, "instance_id": f"{repo.replace('/', '__')}-1", "base_commit": f"d16bfe05{32 * '0'}",
        "patch": unified_diff.between("pkg/a.py", "a\n", "b\n"), "test_patch": patch, "problem_statement": "It fails.",
        "hints_text": "", "created_at": "2022-03-03T15:14:54Z", "version": "4.3", "FAIL_TO_PASS": json.dumps(failing),
        "PASS_TO_PASS": json.dumps(passing), "environment_setup_commit": "298ccb478e6bf092953bca67a3d29dc6c35f6752",
        "difficulty": "15 min - 1 hour",
    }  # fmt: skip
    return parse_row(row)


@pytest.mark.parametrize(
    ("repo", "tests"),
    [
        ("astropy/astropy", ["astropy/modeling/tests/test_separable.py::test_separable[compound_model6-result6]"]),
        ("pallets/flask", ["tests/test_cli.py::TestRoutes::test_subdomain"]),
        ("matplotlib/matplotlib", ["lib/matplotlib/tests/test_ticker.py::TestScalarFormatter::test_set[1.4", "["]),
        ("psf/requests", ["test_requests.py::TestRequests::test_url[http://0.0.0.0/get-test]"]),
        ("pydata/xarray", ["xarray/tests/test_formatting.py::test_summarize[x", "[100%]"]),
        ("pylint-dev/pylint", ["tests/test_self.py::TestRunTC::test_regex_paths_csv_validator"]),
        ("pytest-dev/pytest", ['testing/test_mark.py::test_keyword_option_custom[("hello', "[ 50%]"]),
        ("scikit-learn/scikit-learn", ["sklearn/tests/test_base.py::test_clone[pandas", "sklearn/base.py::doctest"]),
        ("sphinx-doc/sphinx", ["tests/test_domain_cpp.py::test_expressions"]),
    ],
)
def test_node_ids_are_read_with_names_that_were_cut_at_a_space(repo: str, tests: list[str]) -> None:
    row = verified(repo, tests[:1], tests[1:], tests[0].partition("::")[0])
    assert (row.names, row.recipe) == (TestNames.PYTEST, None)
    assert row.fail_to_pass == (tests[0],)
    assert row.pass_to_pass == tuple(test for test in tests[1:] if "::" in test)


def test_names_of_django() -> None:
    """Names are lines of its runner, and a description may hold two colons. Most changed test files may be data."""
    failing = ["test_https (test_utils.tests.AssertURLEqualTests)"]
    passing = ["Addresses such as ::1 are valid.", "An exception is setUp() is reraised", "#24155 - Imports x::y."]
    files = ("tests/static/project/a.js", "tests/static/project/b.js", "tests/test_utils/tests.py")
    row = verified("django/django", failing, passing, *files)
    assert (row.names, row.recipe) == (TestNames.UNITTEST, None)
    assert row.node_ids == (*failing, *passing)
    fork = verified("fork/django", failing, passing[:1], *files)
    assert (fork.names, fork.recipe) == (TestNames.UNITTEST, None)


def test_the_modules_of_django_s_names_run_if_the_test_patch_changes_only_data() -> None:
    failing = ["test_validators (validators.tests.TestSimpleValidators)", "Named URLs should be reversible"]
    passing = ["test_one (gis_tests.geoapp.tests.OneTest)", "test_a (validators.test_more.MoreTest.test_a)"]
    row = verified("django/django", failing, passing, "tests/validators/invalid_urls.txt")
    assert (row.names, row.recipe) == (TestNames.UNITTEST, None)
    assert row.node_ids == (*failing, *passing)
    modules = ("gis_tests/geoapp/tests", "validators/test_more", "validators/tests")
    assert row.test_files == tuple(f"tests/{name}.py" for name in modules)


def test_names_of_sympy() -> None:
    row = verified("sympy/sympy", ["test_issue_1"], ["test_a", "a test"], "sympy/core/tests/test_a.py")
    assert row.names is TestNames.FUNCTIONS
    assert row.test_files == ("sympy/core/tests/test_a.py",)


@pytest.mark.parametrize(
    ("published", "tests"),
    [
        ("t.py::test_a[one", ["t.py::test_a[one way]", "t.py::test_a[one more]"]),
        ("t.py::test_a[[1,", ["t.py::test_a[[1, 2]]"]),
        ("t.py::test_a[one]", ["t.py::test_a[one]"]),
        ("t.py::test_a[/index.html]", ["t.py::test_a[/root/project/index.html]"]),
    ],
)
def test_a_published_name_stands_for_the_tests_that_its_log_parser_lists_under_it(
    published: str, tests: list[str]
) -> None:
    run = TestRun(dict.fromkeys([*tests, "t.py::test_a[other]"], Status.PASSED), complete=True)
    assert list(meant([published], run.statuses)) == [(published, tests)]
