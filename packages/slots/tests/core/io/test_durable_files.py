"""Files of JSON lines lose only a torn last line; a replaced file stays until the new one is complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from palaestra_slots.core.errors import ConfigError, DiskError
from palaestra_slots.core.io.durable_files import open_lines, replaced, writing

HEAD = b'{"schema":"test/1"}\n'


@pytest.mark.parametrize("torn", [b"", b'{"a', b"x" * (1 << 17)])
def test_a_torn_last_line_of_any_length_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(HEAD + b"1\n2\n" + torn)
    file = open_lines(path, "test/1")
    assert list(file.lines()) == [(2, b"1\n"), (3, b"2\n")]
    file.append(b"3\n")
    file.close()
    assert path.read_bytes() == HEAD + b"1\n2\n3\n"


@pytest.mark.parametrize("content", [b"notes", b"notes\n", b'{"schema":"test/2"}\n', b"\xff\n"])
def test_another_file_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        open_lines(path, "test/1")
    assert path.read_bytes() == content


def test_one_process_has_an_exclusive_file(tmp_path: Path) -> None:
    file = open_lines(tmp_path / "lines", "test/1", exclusive=True)
    with pytest.raises(ConfigError, match=str(tmp_path / "lines")):
        open_lines(tmp_path / "lines", "test/1", exclusive=True)
    file.close()
    open_lines(tmp_path / "lines", "test/1", exclusive=True).close()


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
