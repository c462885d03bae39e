"""A temporary folder ends with its maker, also if the maker is killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from palaestra_slots.core.io.temporary_folder import TemporaryFolder


def test_folders_of_the_dead_are_removed_and_those_of_the_living_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "import os; from palaestra_slots.core.io.temporary_folder import TemporaryFolder as T; a = T('artifacts');"
    )
    program += "(a.path / 'x').mkdir(); print(a.path, flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    dead = Path(done.stdout.strip())
    (tmp_path / "palaestra-artifacts-link").symlink_to(tmp_path)
    (tmp_path / "palaestra-new-artifacts-x").mkdir()
    assert (dead / "x").is_dir()
    with TemporaryFolder("artifacts") as one, TemporaryFolder("artifacts") as other:
        assert not dead.exists()
        assert one.path.is_dir()
        assert other.path.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["palaestra-artifacts-link"]
