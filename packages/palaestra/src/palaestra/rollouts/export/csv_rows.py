"""Comma-separated values whose rows end with a line feed."""

from __future__ import annotations

from typing import TextIO


class UnixRows:
    """The file for a `csv.writer` with its default line ends, `\\r\\n`. Only with these does it quote a cell that
    contains a carriage return (before Python 3.13), which readers would take for the end of a row."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, row: str) -> int:
        return self._out.write(row.removesuffix("\r\n") + "\n")
