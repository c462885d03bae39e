"""Negate a test: make a passing test fail by a change as small as one expected value, so that it looks like any other.

The last assertion that is certain to be reached is changed, because other tests may need what the test does before it.
An expected constant becomes another one; if nothing is compared with a constant, the comparison is inverted. The rest
of the file keeps its text. Does no I/O.

Not covered: assertions in branches, in loops that may not run, and tests that only expect an exception.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import TypeGuard

from palaestra.suites.grading.python_source import ParsedSource, SourceEdit

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


def tests_in(body: Iterable[ast.stmt], owner: str) -> list[tuple[str, Function]]:
    """The tests of a module, each with the prefix of its classes: `Class::`."""
    found: list[tuple[str, Function]] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            found += tests_in(node.body, f"{owner}{node.name}::")
        elif isinstance(node, Function) and node.name.startswith("test"):
            found.append((owner, node))
    return found


def find_negations(source: str, random: Random) -> dict[str, Sequence[SourceEdit]]:
    """For each test that can be negated, the edits of which any single one negates it; constants are preferred.

    Empty if the source is not Python. `random` draws the new constants.
    """
    try:
        parsed = ParsedSource(source)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    negations = _Negations(parsed, random)
    found: dict[str, Sequence[SourceEdit]] = {}
    for owner, function in tests_in(parsed.tree.body, ""):
        certain = list(_certain(function.body))[::-1]
        edits = next(filter(None, map(negations.other_values, certain)), None)
        edits = edits or next(filter(None, map(negations.opposites, certain)), None)
        found.pop(f"{owner}{function.name}", None)  # of two tests with one name, Python keeps the later
        if edits:
            found[f"{owner}{function.name}"] = edits
    return found


def _certain(body: Sequence[ast.stmt]) -> Iterator[ast.Assert | ast.Call]:
    """The assertions that are reached whenever the body runs to its end."""
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
    """Whether the block may suppress or expect an exception."""
    calls = [node.func for item in statement.items for node in ast.walk(item) if isinstance(node, ast.Call)]
    names = [call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls]
    return any(part in name.lower() for name in names for part in _CATCHING)


class _Negations:
    """The edits that negate one assertion of a source."""

    def __init__(self, source: ParsedSource, random: Random) -> None:
        self._source = source
        self._random = random

    def other_values(self, assertion: ast.Assert | ast.Call) -> list[SourceEdit]:
        """Edits that change the constant which an assertion compares with."""
        sides: Sequence[ast.expr] = ()
        if isinstance(assertion, ast.Call):
            name = assertion.func.attr if isinstance(assertion.func, ast.Attribute) else ""
            sides = assertion.args[:2] if name in _EQUALITY and len(assertion.args) >= 2 else ()
        elif isinstance(assertion.test, ast.Compare) and [type(each) for each in assertion.test.ops] == [ast.Eq]:
            sides = (assertion.test.left, *assertion.test.comparators)
        fixed = [side for side in sides if _is_literal(side)]
        return [edit for side in fixed if len(fixed) == 1 for edit in self._other(side)]

    def opposites(self, assertion: ast.Assert | ast.Call) -> list[SourceEdit]:
        """Edits that invert an assertion."""
        if isinstance(assertion, ast.Call):
            function = assertion.func
            other = _OPPOSITE_CALL.get(function.attr) if isinstance(function, ast.Attribute) else None
            if other is None or not isinstance(function, ast.Attribute):
                return []
            end = self._source.span(function)[1]
            return [SourceEdit(end - len(function.attr.encode()), end, other)]
        test = assertion.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            start, end = self._source.span(test.left)[1], self._source.span(test.comparators[0])[0]
            between = self._source.cut(start, end)
            written, other = _OPPOSITE[type(test.ops[0])]
            return [SourceEdit(start, end, between.replace(written, other, 1))] if written in between else []
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return [SourceEdit(self._source.span(test)[0], self._source.span(test.operand)[0], "")]
        if isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.Subscript):
            start, _ = self._source.span(test)
            return [SourceEdit(start, start, "not ")]
        return []

    def _other(self, literal: ast.expr) -> list[SourceEdit]:
        edits = []
        for node in ast.walk(literal):
            text = self._other_constant(node) if isinstance(node, ast.Constant) else None
            if text is not None and isinstance(node, ast.Constant):
                edits.append(SourceEdit(*self._source.span(node), text))
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
            return self._other_string(self._source.of(node), value)
        return None

    def _other_string(self, written: str, value: str) -> str | None:
        """The string with one letter or digit shifted in its alphabet; None for a prefixed or escaped literal."""
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


def _is_literal(node: ast.expr) -> bool:
    """Whether the node is a constant, or a list, tuple or dict of constants."""
    if isinstance(node, ast.List | ast.Tuple):
        return all(_is_literal(each) for each in node.elts)
    if isinstance(node, ast.Dict):
        return all(each is not None and _is_literal(each) for each in (*node.keys, *node.values))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.Constant)
