import pytest

from palaestra_slots.sandbox.slot import Change
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.protected import (
    MODULE_SHADOWED,
    SETTINGS_CHANGED,
    STARTUP_FILES,
    TESTS_EDITED,
    outside,
    protected,
)
from palaestra_suites.swe.swe_row import SweRow, parse_row

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
    return {path.removeprefix(REPO + "/") for path in protected(changes, task or row(), PRISTINE, REPO).guarded}


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("tests/test_core.py", TESTS_EDITED),
        ("tests/helpers.py", TESTS_EDITED),
        ("tests/data/a.txt", TESTS_EDITED),
        ("tests/helpers/__init__.py", TESTS_EDITED),
        ("tests/helpers.so", TESTS_EDITED),
        ("src/pkg/tests/test_inner.py", TESTS_EDITED),
        ("test_root.py", TESTS_EDITED),
        ("conftest.py", SETTINGS_CHANGED),
        ("tests/conftest.py", SETTINGS_CHANGED),
        ("src/conftest.py", SETTINGS_CHANGED),
        ("pytest.ini", SETTINGS_CHANGED),
        ("tox.ini", SETTINGS_CHANGED),
        ("setup.cfg", SETTINGS_CHANGED),
        ("pyproject.toml", SETTINGS_CHANGED),
        ("src/sitecustomize.py", STARTUP_FILES),
        ("usercustomize.py", STARTUP_FILES),
        ("evil.pth", STARTUP_FILES),
        ("evil.egg-info/entry_points.txt", STARTUP_FILES),
        ("src/evil-1.dist-info/entry_points.txt", STARTUP_FILES),
        ("pytest.py", MODULE_SHADOWED),
        ("src/json.py", MODULE_SHADOWED),
        ("re/__init__.py", MODULE_SHADOWED),
        ("src/_pytest/x.py", MODULE_SHADOWED),
        ("pluggy.so", MODULE_SHADOWED),
    ],
)
def test_what_could_decide_the_grade_is_as_prepared_in_the_guarded_view(path: str, label: str) -> None:
    assert dropped(path) == {path}
    found = protected([Change(f"{REPO}/{path}", "file")], row(), PRISTINE, REPO)
    assert [(each.name, each.evidence, each.certain) for each in found.labels(REPO)] == [(label, path, False)]
    assert found.differs is (path != "tests/test_core.py"), "the protocol writes the files of the named tests"
    assert found.left_out == ()


@pytest.mark.parametrize(
    "path",
    ["src/pkg/__pycache__/core.cpython-311.pyc", "src/pkg/core.pyc", ".pytest_cache/v/x", ".git/hooks/pre-commit"],
)
def test_what_no_patch_contains_is_in_no_view_and_needs_no_second_run(path: str) -> None:
    found = protected([Change(f"{REPO}/{path}", "file")], row(), PRISTINE, REPO)
    assert (found.left_out, found.labels(REPO), found.differs) == ((f"{REPO}/{path}",), [], False)


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
        "tests/test_mine.py",
        "tests/data/mine.txt",
        "tests/json.py",
        "docs/guide.md",
    ],
)
def test_honest_work_is_kept(path: str) -> None:
    assert dropped(path) == set()


@pytest.mark.parametrize(("path", "kind"), [("tests", "deleted"), ("tests", "symlink"), ("src", "symlink")])
def test_a_directory_of_tests_cannot_be_taken_away(path: str, kind: str) -> None:
    assert dropped(path, kind=kind) == {path}


def test_what_a_directory_that_was_made_again_lacks_is_protected() -> None:
    assert dropped("src/pkg/tests/test_inner.py", "src/pkg/core.py", kind="deleted") == {"src/pkg/tests/test_inner.py"}


@pytest.mark.parametrize(
    "change",
    [
        Change(f"{REPO}/tests/test_core.py", "file", content=False),
        Change(f"{REPO}/tests/data/a.txt", "file", content=False),
        Change(f"{REPO}/setup.py", "file", content=False),
        Change(f"{REPO}/pkg.egg-info/PKG-INFO", "file", content=False),
        Change(f"{REPO}/pkg.egg-info", "dir"),
        Change(f"{REPO}/tests", "dir"),
    ],
    ids=lambda change: change.path,
)
def test_what_has_its_content_is_not_labelled(change: Change) -> None:
    found = protected([change], row(), PRISTINE, REPO)
    assert (found.labels(REPO), found.differs) == ([], False)


def test_the_tests_that_a_row_brings_are_protected_too() -> None:
    patch = unified_diff.between("checks/extra.py", "a\n", "b\n")
    task = row(patch=unified_diff.between("src/pkg/core.py", "a\n", "b\n"), test_patch=patch)
    assert dropped("checks/extra.py", task=task) == {"checks/extra.py"}


def test_settings_that_the_fix_changes_too_are_work() -> None:
    """A module that pytest runs is not, because the work could decide its own verdict there."""
    for path, kept in (("pyproject.toml", True), ("setup.cfg", True), ("tox.ini", True), ("conftest.py", False)):
        fixed = row(patch=unified_diff.between(path, "a\n", "b\n"))
        assert dropped(path, task=fixed) == (set() if kept else {path})
        assert dropped(path) == {path}


def test_a_named_test_beside_sources_protects_itself_alone() -> None:
    task = row(FAIL_TO_PASS=["src/pkg/core.py::doctest"])
    assert dropped("src/pkg/core.py", "src/pkg/fresh.py", task=task) == {"src/pkg/core.py"}


def test_changes_outside_the_repository_are_not_its_business() -> None:
    assert protected([Change("/workspace/conftest.py", "file")], row(), PRISTINE, REPO).guarded == ()


def test_work_outside_the_repository_is_named() -> None:
    paths = [
        "/.palaestra-carried/tmp/x", "/opt/helper", "/opt/helper/a.py", "/opt/helper/b.py", "/opt/other.py",
        "/opt/palaestra/cache/go-build/0a/0a9d-a",
        "/opt/palaestra/cache/npm/_logs/1.log", "/root/.bash_history", "/root/.cache/pip/x",
        "/workspace", f"{REPO}/src/pkg/core.py", "/workspace/mine.txt",
        "/usr/lib/python3/dist-packages/attr", "/usr/lib/python3/dist-packages/attr/__init__.py",
    ]  # fmt: skip
    assert outside([Change(path, "file") for path in paths], REPO) == [
        "/opt/helper", "/opt/other.py", "/usr/lib/python3/dist-packages/attr", "/workspace/mine.txt",
    ]  # fmt: skip


def test_paths_come_back_as_they_came() -> None:
    found = protected([Change("workspace/repo/conftest.py", "file")], row(), PRISTINE, REPO)
    assert found.guarded == ("workspace/repo/conftest.py",)
