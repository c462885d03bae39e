"""File calls of many steps, in a directory where others write and remove files between the steps."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from palaestra_slots.sandbox.slotd import files
from palaestra_slots.sandbox.slotd.files import UNFINISHED
from palaestra_slots.sandbox.slotd.layers.copy_tree import TreeCopy


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


def result(listing: Generator[None, None, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What a job gives in the end."""
    found: list[dict[str, Any]] = []

    def run() -> Generator[None, None, None]:
        found.extend((yield from listing))

    for _ in run():
        pass
    return found


def test_a_list_is_without_what_goes_meanwhile(root: int, tmp_path: Path) -> None:
    listing = files.list_directory(root, "/d", os.geteuid())
    next(listing)
    for number in range(600):
        (tmp_path / f"d/{number}").unlink()
    assert 1 <= len(result(listing)) < 600


def test_what_goes_while_it_is_removed_is_removed(root: int, tmp_path: Path) -> None:
    gc.collect()  # what other tests have left may close files at any time
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


@pytest.mark.parametrize("end", ["finish", "discard"])
def test_a_file_that_is_being_written_is_in_no_list_and_no_copy(root: int, tmp_path: Path, end: str) -> None:
    writing = files.Writing(root, "/d/nested/new", None, os.getuid())
    writing.add(b"half")
    assert len(os.listdir(tmp_path / "d/nested")) == 2
    assert seen(root, tmp_path, "half") == ["file"] * 2
    if end == "finish":
        writing.finish()
        writing.close()
    else:
        writing.discard()
    assert seen(root, tmp_path, "whole") == sorted(os.listdir(tmp_path / "d/nested")) * 2
    assert not UNFINISHED


def seen(root: int, tmp_path: Path, copy: str) -> list[str]:
    """The names in `/d/nested`, as listed and then as copied."""
    listed = result(files.list_directory(root, "/d/nested", os.geteuid()))
    for _ in TreeCopy().tree(str(tmp_path / "d/nested"), str(tmp_path / copy)):
        pass
    return [*sorted(os.path.basename(entry["path"]) for entry in listed), *sorted(os.listdir(tmp_path / copy))]


@pytest.mark.parametrize(
    "path", ["/new/../file.txt", "/a/b/../../c/./d/../file.txt", "/new/./file.txt", "/d/../x/file.txt"]
)
def test_a_path_leads_up_through_folders_that_are_made(root: int, tmp_path: Path, path: str) -> None:
    writing = files.Writing(root, path, None, os.getuid())
    writing.add(b"text")
    writing.finish()
    assert (tmp_path / os.path.normpath(path[1:])).read_bytes() == b"text"
