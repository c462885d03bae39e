"""A second tree of a layer: what it has, and what is left out of it because no path leads there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from palaestra_slots.sandbox.slotd.layers.cut_view import duplicate_tree
from palaestra_slots.sandbox.slotd.layers.overlay import MAX_DEPTH


def nested(top: Path, name: str, depth: int) -> None:
    """Directories in each other, each with a file, made one by one as an agent makes them: their path has no end."""
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


@pytest.mark.parametrize(("name", "depth"), [("d", MAX_DEPTH + 50), ("d" * 200, 60)], ids=["deep", "long"])
def test_what_no_path_leads_to_is_left_out(tmp_path: Path, name: str, depth: int) -> None:
    nested(tmp_path / "layer", name, depth)
    (tmp_path / "layer" / "work.py").write_text("x = 1\n")
    duplicate_tree(str(tmp_path / "layer"), str(tmp_path / "copy"))
    copy = tmp_path / "copy"
    assert (copy / "work.py").samefile(tmp_path / "layer" / "work.py")
    assert (copy / name / name / "file").samefile(tmp_path / "layer" / name / name / "file")
    found = sum(1 for _ in os.walk(copy)) - 1
    assert 10 < found < depth
    shutil.rmtree(tmp_path / "layer")
