"""Edit Python source text at its syntax nodes. Does no I/O."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceEdit:
    """Replace bytes `start` to `end` of a UTF-8 source with `text`."""

    start: int
    end: int
    text: str


def apply_edits(source: str, edits: Iterable[SourceEdit]) -> str:
    """Return the source with these edits, which must not overlap."""
    data = source.encode()
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data.decode()


class ParsedSource:
    """A parsed module with the UTF-8 offsets of its nodes (`ast` counts columns in UTF-8 bytes).

    Raises what `ast.parse` raises.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.data = text.encode()
        self.tree = ast.parse(text)
        self._line_starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the offsets where a node begins and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def offset(self, line: int, column: int) -> int:
        return self._line_starts[line - 1] + column

    def line_of(self, offset: int) -> int:
        return self.data.count(b"\n", 0, offset) + 1

    def cut(self, start: int, end: int) -> str:
        return self.data[start:end].decode()

    def of(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        return self.cut(*self.span(node))
