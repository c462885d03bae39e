"""Copying a layer: holes, links, times, and what an earlier copy saves. Needs no slot and no privilege."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from palaestra_slots.sandbox.slotd.layers.copy_tree import TreeCopy
from palaestra_slots.sandbox.slotd.layers.overlay import MAX_DEPTH


def copy(source: Path, target: Path, **options: object) -> TreeCopy:
    made = TreeCopy(**options)  # type: ignore[arg-type]
    for _ in made.tree(str(source), str(target)):
        pass
    return made


def test_holes_stay_holes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a/f", "wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 29)
        file.write(b"middle")
    made = copy(tmp_path / "a", tmp_path / "b")
    status = (tmp_path / "b/f").stat()
    assert (status.st_size, status.st_blocks * 512 < 1 << 20) == (1 << 30, True)
    assert made.copied_bytes < 1 << 20
    with open(tmp_path / "b/f", "rb") as file:
        file.seek(1 << 29)
        assert file.read(6) == b"middle"


def test_names_of_one_file_stay_one_file(tmp_path: Path) -> None:
    (tmp_path / "a/d").mkdir(parents=True)
    (tmp_path / "a/f").write_text("x")
    os.link(tmp_path / "a/f", tmp_path / "a/d/g")
    os.symlink("nowhere", tmp_path / "a/l")
    os.mkfifo(tmp_path / "a/p")
    (tmp_path / "a/p").chmod(0o662)
    os.utime(tmp_path / "a/p", ns=(3, 4))
    (tmp_path / "a/d").chmod(0o500)
    os.utime(tmp_path / "a/d", ns=(1, 2))
    copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b/f").samefile(tmp_path / "b/d/g")
    assert not (tmp_path / "b/f").samefile(tmp_path / "a/f")
    assert os.readlink(tmp_path / "b/l") == "nowhere"
    fifo = (tmp_path / "b/p").stat()
    assert (fifo.st_mode, fifo.st_mtime_ns) == (stat.S_IFIFO | 0o662, 4)
    status = (tmp_path / "b/d").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o500, 2)


def test_what_is_known_is_linked_and_not_copied(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("same", "changed"):
        (tmp_path / "a" / name).write_text("one")
    first = copy(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a/changed").write_text("two")
    known = {inode: path for inode, (_, _, path) in first.index.items()}
    same = (tmp_path / "a/same").stat().st_ino
    second = copy(tmp_path / "a", tmp_path / "c", earlier=lambda status: known[same] if status.st_ino == same else None)
    assert second.copied_bytes == 3
    assert (tmp_path / "c/same").samefile(tmp_path / "b/same")
    assert (tmp_path / "b/changed").read_text() == "one"
    assert (tmp_path / "c/changed").read_text() == "two"


def test_an_earlier_copy_that_is_gone_is_copied_anew(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/f").write_text("x")
    copy(tmp_path / "a", tmp_path / "b", earlier=lambda status: str(tmp_path / "gone"))
    assert (tmp_path / "b/f").read_text() == "x"


def test_what_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    here = os.getcwd()
    try:
        os.chdir(tmp_path / "a")
        for _ in range(MAX_DEPTH + 2):
            os.mkdir("n")
            os.chdir("n")
    finally:
        os.chdir(here)
    with pytest.raises(OSError, match="nested"):
        copy(tmp_path / "a", tmp_path / "b")
