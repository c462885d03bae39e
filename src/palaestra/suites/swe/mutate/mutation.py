"""A mutation: one small change of a Python source, found in its syntax tree and applied to its text.

Invariant: outside the changed span the file keeps its text byte for byte, and the result still compiles.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replace the bytes `start`..`end` (UTF-8 offsets) of the file at `path` by `replacement`.

    `function` is the qualified name of the function around the change, `line` its first line (1-based).
    """

    path: str
    kind: str
    start: int
    end: int
    replacement: str
    function: str
    line: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a finder proposes: new text for the span of a node, or of any two offsets."""

    kind: str
    start: int
    end: int
    replacement: str


@dataclass(frozen=True, slots=True)
class Scope:
    """One function as the finders see it: its node, and the text around it."""

    source: Source
    node: ast.FunctionDef | ast.AsyncFunctionDef
    qualname: str

    def walk(self) -> Iterator[ast.AST]:
        """The nodes of this function in source order. Nested functions and classes have their own turn."""
        for statement in self.node.body:
            yield from _walk(statement)


class Source:
    """A parsed module and the mapping from nodes to UTF-8 offsets (`ast` counts columns in UTF-8 bytes)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.data = text.encode()
        self.tree = ast.parse(text)
        self._line_starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node begins and ends."""
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
        """The text of a node."""
        return self.cut(*self.span(node))


def apply(source: str, mutation: Mutation) -> str:
    """The text after the mutation."""
    data = source.encode()
    return (data[: mutation.start] + mutation.replacement.encode() + data[mutation.end :]).decode()


def scopes(source: Source) -> Iterator[Scope]:
    """Every function and method of a module in source order."""
    yield from _scopes(source, source.tree, "")


def _scopes(source: Source, node: ast.AST, prefix: str) -> Iterator[Scope]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Scope(source, child, prefix + child.name)
            yield from _scopes(source, child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _scopes(source, child, f"{prefix}{child.name}.")
        else:
            yield from _scopes(source, child, prefix)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)
