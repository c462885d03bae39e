import pytest

from palaestra.sandbox.slot import Change
from palaestra.suites.swe import apply_diff
from palaestra.suites.swe.protected import hidden_files, protected_paths
from palaestra.suites.swe.swe_row import SweRow, parse_row

REPO = "/workspace/repo"
PRISTINE = (
    "pyproject.toml",
    "src/pkg/__init__.py",
    "src/pkg/core.py",
    "src/pkg/testing/__init__.py",
    "src/pkg/tests/test_inner.py",
    "tests/__init__.py",
    "tests/data/a.txt",
    "tests/helpers.py",
    "tests/test_core.py",
    "test_root.py",
)


def row(**columns: object) -> SweRow:
    base = {
        "repo": "o/n",
        "base_commit": "abc",
        "problem_statement": "p",
        "instance_id": "i",
        "FAIL_TO_PASS": ["tests/test_core.py::test_a"],
    }
    return parse_row({**base, **columns})


def dropped(*paths: str, kind: str = "file", task: SweRow | None = None) -> set[str]:
    changes = [Change(f"{REPO}/{path}", kind) for path in paths]
    return {path.removeprefix(REPO + "/") for path in protected_paths(changes, task or row(), PRISTINE, REPO)}


@pytest.mark.parametrize(
    "path",
    [
        "tests/test_core.py",
        "tests/helpers.py",
        "tests/data/a.txt",
        "tests/json.py",
        "src/pkg/tests/test_inner.py",
        "test_root.py",
        "conftest.py",
        "src/conftest.py",
        "pytest.ini",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "src/sitecustomize.py",
        "usercustomize.py",
        "evil.pth",
        "src/pkg/__pycache__/core.cpython-311.pyc",
        "src/pkg/core.pyc",
        ".pytest_cache/v/x",
        ".git/hooks/pre-commit",
        "evil.egg-info/entry_points.txt",
        "src/evil-1.dist-info/entry_points.txt",
        "pytest.py",
        "src/json.py",
        "re/__init__.py",
        "src/_pytest/x.py",
        "pluggy.so",
    ],
)
def test_what_could_decide_the_grade_is_dropped(path: str) -> None:
    assert dropped(path) == {path}


@pytest.mark.parametrize(
    "path",
    [
        "src/pkg/core.py",
        "src/pkg/fresh.py",
        "src/pkg/json.py",
        "src/pkg/sub/types.py",
        "src/pkg/testing/__init__.py",
        "README.md",
        "newtop.py",
        "docs/guide.md",
    ],
)
def test_honest_work_is_kept(path: str) -> None:
    assert dropped(path) == set()


@pytest.mark.parametrize(("path", "kind"), [("tests", "deleted"), ("tests", "symlink"), ("src", "symlink")])
def test_a_directory_of_tests_cannot_be_taken_away(path: str, kind: str) -> None:
    assert dropped(path, kind=kind) == {path}


def test_a_rewritten_directory_keeps_its_work_and_gets_its_tests_back() -> None:
    changes = [Change(f"{REPO}/src", "dir", opaque=True), Change(f"{REPO}/src/pkg/core.py", "file")]
    assert protected_paths(changes, row(), PRISTINE, REPO) == ()
    assert hidden_files(changes, row(), PRISTINE, REPO) == ("src/pkg/tests/test_inner.py",)


def test_the_tests_that_a_row_brings_are_protected_too() -> None:
    patch = apply_diff.between("checks/extra.py", "a\n", "b\n")
    task = row(patch=apply_diff.between("src/pkg/core.py", "a\n", "b\n"), test_patch=patch)
    assert dropped("checks/extra.py", task=task) == {"checks/extra.py"}


def test_a_named_test_beside_sources_protects_itself_alone() -> None:
    task = row(FAIL_TO_PASS=["src/pkg/core.py::doctest"])
    assert dropped("src/pkg/core.py", "src/pkg/fresh.py", task=task) == {"src/pkg/core.py"}


def test_changes_outside_the_repository_are_not_its_business() -> None:
    assert protected_paths([Change("/workspace/conftest.py", "file")], row(), PRISTINE, REPO) == ()


def test_paths_come_back_as_they_came() -> None:
    assert protected_paths([Change("workspace/repo/conftest.py", "file")], row(), PRISTINE, REPO) == (
        "workspace/repo/conftest.py",
    )
