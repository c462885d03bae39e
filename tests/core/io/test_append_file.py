"""Files of JSON lines: what a kill leaves at their end is cut off, and nothing else is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra.core.errors import ConfigError
from palaestra.core.io.append_file import open_lines

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
