"""A file that takes its place whole: what was there before stays until then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from palaestra.core.errors import DiskError
from palaestra.core.io.append_file import writing
from palaestra.core.io.atomic_file import replaced


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("old")

    def rows() -> Iterator[bytes]:
        yield b"half of"
        raise ValueError("broken off")

    with pytest.raises(ValueError, match="broken off"), replaced(path) as file:
        file.writelines(rows())
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("tasks.jsonl", "old")]
    with replaced(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("tasks.jsonl", "new")]


def test_a_place_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    path = tmp_path / "taken"
    with pytest.raises(DiskError, match=r"cannot write .*taken"), writing(path), replaced(path) as file:
        file.write(b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]
