"""Making a test false that was true, by a change as small as one expected value, so that it looks like any other test.

Each way changes one assertion that the test is sure to come to, so that it cannot hold where it held before: an
expected constant is another one, or, where nothing is compared with a constant, the comparison is the opposite one. It
is the last such assertion, since other tests may need what the test does before it.
The rest of the file stays as it is, to the letter. Does no I/O.

Not covered: assertions in branches and in loops that may run not even once, and tests that only wait for an exception.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef

_OPPOSITE: Mapping[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_EQUALITY = frozenset({"assertEqual", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual"})
_OPPOSITE_CALL = {
    "assertEqual": "assertNotEqual",
    "assertNotEqual": "assertEqual",
    "assertTrue": "assertFalse",
    "assertFalse": "assertTrue",
    "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
    "assertIsNone": "assertIsNotNone",
    "assertIsNotNone": "assertIsNone",
    "assertIs": "assertIsNot",
}
_CATCHING = ("raise", "suppress", "warn", "catch", "expect", "fail", "logs")
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Yield, ast.YieldFrom)


@dataclass(frozen=True, slots=True)
class Edit:
    """Bytes `start` to `end` of a source in UTF-8 become `text`."""

    start: int
    end: int
    text: str


def tests_in(body: Iterable[ast.stmt], owner: str) -> list[tuple[str, Function]]:
    """The tests of a module, each with the classes that it is in: `Class::`."""
    found: list[tuple[str, Function]] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            found += tests_in(node.body, f"{owner}{node.name}::")
        elif isinstance(node, Function) and node.name.startswith("test"):
            found.append((owner, node))
    return found


def ways(source: str, random: Random) -> dict[str, Sequence[Edit]]:
    """For each test that can be made false its edits, any one of which does it; those of constants, where there are.

    Empty for what is not Python. `random` draws the other constants.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    text = _Text(source, random)
    found: dict[str, Sequence[Edit]] = {}
    for owner, function in tests_in(tree.body, ""):
        certain = list(_certain(function.body))[::-1]
        edits = next(filter(None, map(text.other_values, certain)), None)
        edits = edits or next(filter(None, map(text.opposites, certain)), None)
        found.pop(f"{owner}{function.name}", None)  # of two of a name, the later one is the test
        if edits:
            found[f"{owner}{function.name}"] = edits
    return found


def edited(source: str, edits: Iterable[Edit]) -> str:
    """The source with these edits, none of which may overlap."""
    data = source.encode()
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data.decode()


def _certain(body: Sequence[ast.stmt]) -> Iterator[ast.Assert | ast.Call]:
    """The assertions that are come to whenever the body is run to its end."""
    for statement in body:
        if isinstance(statement, ast.Assert):
            yield statement
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield statement.value
        elif _leaves(statement):
            return
        elif _surely_enters(statement):
            yield from _certain(statement.body)


def _surely_enters(statement: ast.stmt) -> TypeGuard[ast.With | ast.AsyncWith | ast.For]:
    if isinstance(statement, ast.For):
        return isinstance(statement.iter, ast.List | ast.Tuple) and bool(statement.iter.elts)
    return isinstance(statement, ast.With | ast.AsyncWith) and not _catches(statement)


def _leaves(statement: ast.stmt) -> bool:
    return any(isinstance(node, _LEAVING) for node in ast.walk(statement))


def _catches(statement: ast.With | ast.AsyncWith) -> bool:
    """Whether an exception from inside may go no further, or be what is waited for."""
    calls = [node.func for item in statement.items for node in ast.walk(item) if isinstance(node, ast.Call)]
    names = [call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls]
    return any(part in name.lower() for name in names for part in _CATCHING)


class _Text:
    """A source, and the edits that make one of its assertions false."""

    def __init__(self, source: str, random: Random) -> None:
        self._source = source.encode()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._random = random

    def other_values(self, assertion: ast.Assert | ast.Call) -> list[Edit]:
        """Another expected value, for something that is compared with one."""
        sides: Sequence[ast.expr] = ()
        if isinstance(assertion, ast.Call):
            name = assertion.func.attr if isinstance(assertion.func, ast.Attribute) else ""
            sides = assertion.args[:2] if name in _EQUALITY and len(assertion.args) >= 2 else ()
        elif isinstance(assertion.test, ast.Compare) and [type(each) for each in assertion.test.ops] == [ast.Eq]:
            sides = (assertion.test.left, *assertion.test.comparators)
        fixed = [side for side in sides if _is_literal(side)]
        return [edit for side in fixed if len(fixed) == 1 for edit in self._other(side)]

    def opposites(self, assertion: ast.Assert | ast.Call) -> list[Edit]:
        """The opposite of what is asserted."""
        if isinstance(assertion, ast.Call):
            function = assertion.func
            other = _OPPOSITE_CALL.get(function.attr) if isinstance(function, ast.Attribute) else None
            if other is None or not isinstance(function, ast.Attribute):
                return []
            end = self._end(function)
            return [Edit(end - len(function.attr.encode()), end, other)]
        test = assertion.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            start, end = self._end(test.left), self._start(test.comparators[0])
            between = self._source[start:end].decode()
            written, other = _OPPOSITE[type(test.ops[0])]
            return [Edit(start, end, between.replace(written, other, 1))] if written in between else []
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return [Edit(self._start(test), self._start(test.operand), "")]
        if isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.Subscript):
            return [Edit(self._start(test), self._start(test), "not ")]
        return []

    def _other(self, literal: ast.expr) -> list[Edit]:
        edits = []
        for node in ast.walk(literal):
            text = self._other_constant(node) if isinstance(node, ast.Constant) else None
            if text is not None and isinstance(node, ast.Constant):
                edits.append(Edit(self._start(node), self._end(node), text))
        return edits

    def _other_constant(self, node: ast.Constant) -> str | None:
        value = node.value
        if isinstance(value, bool):
            return str(not value)
        if isinstance(value, int):
            return str(value + self._random.choice((1, 2, 3) if value < 3 else (-2, -1, 1, 2)))
        if isinstance(value, float):
            return repr(value + self._random.choice((1.0, 2.0, 3.0)))
        if isinstance(value, str):
            return self._other_string(self._source[self._start(node) : self._end(node)].decode(), value)
        return None

    def _other_string(self, written: str, value: str) -> str | None:
        """A string with one letter or digit more or less far in the alphabet; None where it is not plainly written."""
        quote = written[0]
        if quote not in "'\"" or written != f"{quote}{value}{quote}":
            return None
        places = [index for index, each in enumerate(value) if each.isascii() and each.isalnum()]
        if not places:
            return None
        index = self._random.choice(places)
        first = "0" if value[index].isdigit() else "a" if value[index].islower() else "A"
        size = 10 if first == "0" else 26
        moved = chr(ord(first) + (ord(value[index]) - ord(first) + self._random.randrange(1, size)) % size)
        return f"{quote}{value[:index]}{moved}{value[index + 1 :]}{quote}"

    def _start(self, node: ast.expr) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset


def _is_literal(node: ast.expr) -> bool:
    """Whether it is a constant, or a list, tuple or dict of such: whatever equals it equals no other."""
    if isinstance(node, ast.List | ast.Tuple):
        return all(_is_literal(each) for each in node.elts)
    if isinstance(node, ast.Dict):
        return all(each is not None and _is_literal(each) for each in (*node.keys, *node.values))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.Constant)
