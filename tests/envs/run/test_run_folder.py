"""Where a run writes: a folder for each, however many begin at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra.core.errors import ConfigError
from palaestra.envs.run.run_folder import claim_folder


def test_runs_that_begin_in_the_same_second_have_a_folder_each(tmp_path: Path) -> None:
    """So many that some draw the same id."""
    assert len({claim_folder(tmp_path, "lines", "m").path for _ in range(3000)}) == 3000


def test_a_place_that_takes_no_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "lines--m").touch()
    with pytest.raises(
        ConfigError, match=r"cannot make the run folder .*: File exists; run in a directory that you can write to"
    ):
        claim_folder(tmp_path, "lines", "m")
