"""File calls of many steps, in a directory where others remove files between the steps."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from palaestra.sandbox.slotd import files


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    """A descriptor of a root that has 600 files and a directory in `/d`."""
    (tmp_path / "d/nested").mkdir(parents=True)
    (tmp_path / "d/nested/file").touch()
    for number in range(600):
        (tmp_path / f"d/{number}").touch()
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_a_list_is_without_what_goes_meanwhile(root: int, tmp_path: Path) -> None:
    listing = files.list_directory(root, "/d")
    next(listing)
    for number in range(600):
        (tmp_path / f"d/{number}").unlink()
    found: list[dict[str, Any]] = []

    def go_on() -> Generator[None, None, None]:
        found.extend((yield from listing))

    for _ in go_on():
        pass
    assert 1 <= len(found) < 600


def test_what_goes_while_it_is_removed_is_removed(root: int, tmp_path: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    removing = files.remove(root, "/d")
    next(removing)
    for path in [*(tmp_path / "d").glob("*[0-9]"), tmp_path / "d/nested/file"]:
        path.unlink()
    (tmp_path / "d/nested").rmdir()
    (tmp_path / "d").rmdir()
    for _ in removing:
        pass
    assert not (tmp_path / "d").exists()
    assert len(os.listdir("/proc/self/fd")) == open_before
