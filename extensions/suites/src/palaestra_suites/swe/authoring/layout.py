"""Find the tests and modules of an unpacked package by its file names; nothing is executed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath

_TEST_DIRECTORIES = frozenset({"test", "tests", "testing"})
_NOT_SOURCES = _TEST_DIRECTORIES | {"docs", "doc", "examples", "benchmarks", "benchmark", "scripts", "tools", "misc"}


def python_path(paths: Collection[str]) -> tuple[str, ...]:
    """Return the import path of the package: `src` if there are modules below `src`, or else the root."""
    in_src = any(path.startswith("src/") and path.endswith(".py") for path in paths)
    return ("src",) if in_src else (".",)


def test_files(paths: Collection[str]) -> tuple[str, ...]:
    """Return files that pytest collects by default, sorted."""
    return tuple(sorted(path for path in paths if is_test_file(path)))


def is_test_file(path: str) -> bool:
    """Return whether the file name is `test_*.py` or `*_test.py`."""
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def source_files(paths: Collection[str]) -> tuple[str, ...]:
    """Return the modules of the package that may get bugs, sorted: no tests, set-up files or documentation."""
    top = python_path(paths)[0]
    found = []
    for path in paths:
        parts = PurePosixPath(path).parts
        inside = parts[1:] if top == "src" else parts
        if not path.endswith(".py") or (top == "src" and parts[0] != "src") or is_test_file(path):
            continue
        if inside[-1] not in ("setup.py", "conftest.py", "noxfile.py", "conf.py") and not _NOT_SOURCES & set(
            inside[:-1]
        ):
            found.append(path)
    return tuple(sorted(found))
