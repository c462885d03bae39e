"""Select the paths among an agent's changes that could influence the agent's grade.

In the grading slot, these paths have their prepared content. They are the tests, the tests' fixtures and configuration,
and files that Python or pytest loads by itself. New source modules are kept, because agents may add them.

Invariant: only the path and the kind of a change decide, never the content. Not covered: code under test shares its
process with the test runner (see `grading/controls.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

from palaestra.sandbox.slot import Change
from palaestra.suites.swe import unified_diff
from palaestra.suites.swe.swe_row import RowKind, SweRow

CONFIG_NAMES = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "noxfile.py",
        "setup.py",
        ".coveragerc",
        "sitecustomize.py",
        "usercustomize.py",
        "pyvenv.cfg",
    }
)
"""Files that pytest, the interpreter or an installer load from any folder: a new one could disable tests."""

CONFIG_SUFFIXES = (".pth", ".pyc", ".pyo", ".egg-link")

CACHE_DIRECTORIES = frozenset({".git", ".hg", ".pytest_cache", "__pycache__", ".tox", ".venv", "venv", ".eggs"})
"""Directories that are never part of a solution. A planted `__pycache__` would run instead of its source."""

TEST_DIRECTORIES = frozenset({"test", "tests", "testing"})

SHADOWED = frozenset(sys.stdlib_module_names) | {
    "pytest",
    "_pytest",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "exceptiongroup",
    "tomli",
    "py",
}
"""Names of modules that the test run imports. A new top-level module with one of these names would be imported
instead."""


def protected_paths(
    changes: Sequence[Change], row: SweRow, pristine_paths: Collection[str], repo_dir: str = ""
) -> tuple[str, ...]:
    """Return the changed paths that the grading slot must not have, sorted, spelled as in `changes`.

    `repo_dir` is the repository in the slot, and `pristine_paths` are the repository's prepared files, relative to it.
    Changes outside `repo_dir` are ignored, because the grading slot does not contain them.
    """
    pristine = _Pristine(pristine_paths)
    tests = tests_of(row)
    guarded = _test_directories(tests, pristine_paths)
    prefix = PurePosixPath("/", repo_dir or "/")
    found = []
    for change in changes:
        path = PurePosixPath("/", change.path)
        if path.is_relative_to(prefix):
            inside = path.relative_to(prefix)
            if inside.parts and _is_protected(inside, change, tests, guarded, pristine):
                found.append(change.path)
    return tuple(sorted(found))


def hidden_files(
    changes: Sequence[Change], row: SweRow, pristine_paths: Collection[str], repo_dir: str = ""
) -> tuple[str, ...]:
    """Return the protected files of the prepared repository, relative to `repo_dir`, that are hidden by an opaque
    directory: one that the agent removed and made again.

    Grading writes these files back. If it left out the whole directory, honest work in it would be lost.
    """
    prefix = PurePosixPath("/", repo_dir or "/")
    opaque = [PurePosixPath("/", change.path) for change in changes if change.opaque]
    below = [path for path in pristine_paths if any((prefix / path).is_relative_to(top) for top in opaque)]
    as_changes = [Change(str(prefix / path), "file") for path in below]
    kept = protected_paths(as_changes, row, pristine_paths, repo_dir)
    return tuple(str(PurePosixPath(path).relative_to(prefix)) for path in kept)


class _Pristine:
    """The prepared files and their parent directories."""

    def __init__(self, paths: Collection[str]) -> None:
        self.files = frozenset(paths)
        self.all = self.files | {str(parent) for path in self.files for parent in PurePosixPath(path).parents}


def _is_protected(
    path: PurePosixPath, change: Change, tests: frozenset[str], guarded: frozenset[str], pristine: _Pristine
) -> bool:
    parts = path.parts
    if path.name in CONFIG_NAMES or path.name.endswith(CONFIG_SUFFIXES):
        return True
    if CACHE_DIRECTORIES.intersection(parts):
        return True
    if any(part.endswith((".egg-info", ".dist-info")) for part in parts):
        return True
    if str(path) in tests or any(str(parent) in guarded for parent in (path, *path.parents)):
        return True
    if _hides_tests(path, change, tests, guarded):
        return True
    return _shadows(path, pristine)


def _hides_tests(path: PurePosixPath, change: Change, tests: frozenset[str], guarded: frozenset[str]) -> bool:
    """Return whether a directory above protected paths was deleted or replaced by something else. `hidden_files`
    handles a directory that was made again."""
    if change.kind == "dir":
        return False
    return any(PurePosixPath(kept).is_relative_to(path) for kept in (*tests, *guarded))


def _shadows(path: PurePosixPath, pristine: _Pristine) -> bool:
    """Return whether a new importable name in an import root shadows a module that the test run needs."""
    if str(path) in pristine.files:
        return False
    for depth, part in enumerate(path.parts, 1):
        here = PurePosixPath(*path.parts[:depth])
        importable = depth < len(path.parts) or part.endswith((".py", ".so")) or "." not in part
        if importable and part.split(".")[0] in SHADOWED and str(here) not in pristine.all:
            return _is_import_root(here.parent, pristine)
    return False


def _is_import_root(directory: PurePosixPath, pristine: _Pristine) -> bool:
    """Return whether a directory's modules are imported by bare name: it was prepared and is not a package."""
    return str(directory) in pristine.all and str(directory / "__init__.py") not in pristine.files


def tests_of(row: SweRow) -> frozenset[str]:
    """Return the files of the named tests and, for a SWE-bench row, the files that `test_patch` changes."""
    named = set(row.test_files)
    if row.kind is RowKind.BENCH:
        named |= {file.path for file in unified_diff.parse(row.test_patch)}
    return frozenset(named)


def _test_directories(tests: frozenset[str], pristine_paths: Collection[str]) -> frozenset[str]:
    """Return test directories by name, directories that hold named tests and no sources, and single test files.

    A named test next to the package's modules (or at the root) protects only test files, not its directory.
    """
    guarded = set()
    for path in (*tests, *pristine_paths):
        if path in tests or _looks_like_test(PurePosixPath(path).name):
            guarded |= {str(parent) for parent in PurePosixPath(path).parents if parent.name in TEST_DIRECTORIES}
    for test in tests:
        directory = PurePosixPath(test).parent
        if directory.parts and _only_tests(directory, pristine_paths):
            guarded.add(str(directory))
    loose = {path for path in pristine_paths if _looks_like_test(PurePosixPath(path).name)}
    return frozenset(guarded | loose)


def _only_tests(directory: PurePosixPath, pristine_paths: Collection[str]) -> bool:
    names = [PurePosixPath(path).name for path in pristine_paths if PurePosixPath(path).parent == directory]
    return all(
        _looks_like_test(name) or name in ("__init__.py", "conftest.py") or not name.endswith(".py") for name in names
    )


def _looks_like_test(name: str) -> bool:
    return name.endswith(".py") and (name.startswith(("test_", "tests_")) or name[:-3].endswith(("_test", "_tests")))
