"""Find changes to a test that make it fail although the code under test is right. Does no I/O.

Each assertion of a test is a *site*. The alternatives of a site are small changes: an expected constant or exception
becomes a different one, and a comparison or an assertion method becomes its opposite. A test without a certain site
(see below) also has sites in the arguments of its calls, in any constant, and at its end, where a false assertion can
be added.

A site is *certain* if every run that reaches the end of the test evaluates it. Other sites, in branches, in loops or in
helper calls, may change nothing: try them on a reference solution before you rely on them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from random import Random
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef

MOST_ALTERNATIVES = 3
"""The maximum number of alternatives of a site."""

_OPPOSITE: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
EQUALITY = frozenset({"assertEqual", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual"})
"""Methods of unittest that compare their first two arguments."""
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
_RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
_CATCHING = ("raise", "suppress", "warn", "catch", "expect", "fail", "logs")
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Yield, ast.YieldFrom)
_UNLIKELY = ("FloatingPointError", "BufferError", "StopAsyncIteration", "ProcessLookupError")
"""Exceptions that hardly any code raises."""


@dataclass(frozen=True, slots=True)
class Falsification:
    """Set `field` of `node`, a node of the test's own tree, to `value`."""

    node: ast.AST
    field: str
    value: object


@dataclass(frozen=True, slots=True)
class Site:
    """One place in a test, with changes, each of which should make the test fail."""

    alternatives: tuple[Falsification, ...]
    certain: bool


def tests_in(body: Iterable[ast.stmt], owner: str) -> list[tuple[str, Function]]:
    """Return the test functions of a module, each with the names of its classes as a prefix (`Class::`)."""
    found: list[tuple[str, Function]] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            found += tests_in(node.body, f"{owner}{node.name}::")
        elif isinstance(node, Function) and node.name.startswith("test") and not _is_fixture(node):
            found.append((owner, node))
    return found


def _is_fixture(function: Function) -> bool:
    names = [
        getattr(each, "attr", getattr(each, "id", "")) for top in function.decorator_list for each in ast.walk(top)
    ]
    return any("fixture" in name for name in names)


def find_sites(function: Function, random: Random) -> list[Site]:
    """Return the sites of a test, statement by statement. `random` draws the constants to change and their new
    values."""
    certain = {id(node) for node in _certain(function.body)}
    found = []
    for node in _walk(function.body):
        alternatives = _other_values(node, random) or _opposites(node, random)
        if alternatives:
            found.append(Site(tuple(alternatives[:MOST_ALTERNATIVES]), id(node) in certain))
    if any(site.certain for site in found):
        return found
    return [*found, *_in_calls(function, random), *_at_end(function, random)]


def _walk(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield all nodes, statement by statement, without decorators."""
    for statement in body:
        yield from ast.walk(statement)


def _certain(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the assertions that are reached whenever the body runs to its end."""
    for statement in body:
        if isinstance(statement, ast.Assert):
            yield statement
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield statement.value
        elif _leaves(statement):
            return
        elif _surely_enters(statement):
            yield from _certain(statement.body)
        elif isinstance(statement, ast.With):
            yield from (item.context_expr for item in statement.items)


def _surely_enters(statement: ast.stmt) -> TypeGuard[ast.With | ast.AsyncWith | ast.For]:
    if isinstance(statement, ast.For):
        return isinstance(statement.iter, ast.List | ast.Tuple) and bool(statement.iter.elts)
    return isinstance(statement, ast.With | ast.AsyncWith) and not _catches(statement)


def _leaves(statement: ast.stmt) -> bool:
    return any(isinstance(node, _LEAVING) for node in ast.walk(statement))


def _catches(statement: ast.With | ast.AsyncWith) -> bool:
    """Return whether the block may suppress or expect an exception."""
    calls = [node for item in statement.items for node in ast.walk(item) if isinstance(node, ast.Call)]
    return any(part in called_name(call).lower() for call in calls for part in _CATCHING)


def called_name(call: ast.Call) -> str:
    """Return the name of the called function or method, or an empty string."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _other_values(node: ast.AST, random: Random) -> list[Falsification]:
    """Return changes to the constant that an assertion compares with."""
    sides: Sequence[ast.expr] = ()
    if isinstance(node, ast.Call):
        sides = node.args[:2] if called_name(node) in EQUALITY and len(node.args) >= 2 else ()
    elif isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
        compared = node.test
        sides = (compared.left, *compared.comparators) if [type(op) for op in compared.ops] == [ast.Eq] else ()
    fixed = [side for side in sides if _is_literal(side)]
    constants = [each for side in fixed if len(fixed) == 1 for each in ast.walk(side) if _may_change(each)]
    return _changed(random.choice(constants), random) if constants else []


def _may_change(node: ast.AST) -> TypeGuard[ast.Constant]:
    """Return whether the node is a constant that can be changed to another value of its type."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, bool | int | float | str):
        return False
    if isinstance(node.value, float):
        return isfinite(node.value)
    return not isinstance(node.value, str) or any(each.isascii() and each.isalnum() for each in node.value)


def _changed(node: ast.Constant, random: Random) -> list[Falsification]:
    """Return changes that give a constant other values. The right value has a random rank among them, so its rank does
    not reveal it."""
    value, found = node.value, list[object]()
    if isinstance(value, bool):
        found.append(not value)
    elif isinstance(value, int):
        found.extend(_other_integers(value, random))
    elif isinstance(value, float):
        found.extend(_other_floats(value, random))
    elif isinstance(value, str):
        found.extend(_shifted(value, random))
    return [Falsification(node, "value", each) for each in found]


def _other_integers(value: int, random: Random) -> list[int]:
    """Return integers around the value, which has a random rank among them. No integer is negative unless the value is
    negative."""
    places = [0]
    for _ in range(MOST_ALTERNATIVES):
        places.append(places[-1] + random.choice((1, 2)))
    own = random.choice([place for place in places if value < 0 or place <= value])
    return [value + place - own for place in places if place != own]


def _other_floats(value: float, random: Random) -> list[float]:
    """Return floats with the same number of digits, spaced by factors of two to three; the value has a random rank
    among them."""
    digits = len(repr(value).partition("e")[0].replace(".", "").strip("-0")) or 1
    found: list[float] = []
    below = random.randrange(MOST_ALTERNATIVES + 1)
    for direction, count in ((-1, below), (1, MOST_ALTERNATIVES - below)):
        other = value or 1.0
        for _ in range(count):
            other *= random.uniform(2, 3) ** direction
            found.append(float(f"{other:.{digits}g}"))
    return [each for each in dict.fromkeys(found) if isfinite(each) and each != value]


def _shifted(value: str, random: Random) -> list[str]:
    """Return strings that differ from the value in one letter or digit. All differ at the same position; different
    positions would reveal the right letters."""
    index = random.choice([index for index, each in enumerate(value) if each.isascii() and each.isalnum()])
    kinds = ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    others = next(kind for kind in kinds if value[index] in kind).replace(value[index], "")
    return [f"{value[:index]}{each}{value[index + 1 :]}" for each in random.sample(others, MOST_ALTERNATIVES)]


def _opposites(node: ast.AST, random: Random) -> list[Falsification]:
    """Return changes that invert an assertion, compare with a container of the value, or expect a different
    exception."""
    if isinstance(node, ast.Call):
        if called_name(node) in _RAISES and node.args:
            unlikely = random.sample(_UNLIKELY, MOST_ALTERNATIVES)
            rest = node.args[1:]
            return [Falsification(node, "args", [ast.Name(name, ast.Load()), *rest]) for name in unlikely]
        opposite = _OPPOSITE_CALL.get(called_name(node))
        if opposite is None or not isinstance(node.func, ast.Attribute):
            return []
        others = [Falsification(node.func, "attr", opposite)]
        if called_name(node) == "assertEqual" and len(node.args) >= 2:
            others += [
                Falsification(node, "args", [node.args[0], each, *node.args[2:]]) for each in _boxed(node.args[1])
            ]
        return others
    if not isinstance(node, ast.Assert):
        return []
    test = node.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        others = [Falsification(test, "ops", [_OPPOSITE[type(test.ops[0])]()])]
        for holds, inverse, wrong in _NEVER:
            if isinstance(test.ops[0], holds | inverse):
                never = [ast.Compare(test.left, [holds()], [each]) for each in wrong(test.comparators[0])]
                others += [Falsification(node, "test", each) for each in never]
        return others
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    value = test.operand if isinstance(test, ast.UnaryOp) and negated else test
    other = value if negated else ast.UnaryOp(ast.Not(), value)
    neither = (ast.Constant(...), ast.Name("NotImplemented", ast.Load()))
    never = [ast.Compare(value, [ast.Is()], [each]) for each in neither]
    return [Falsification(node, "test", each) for each in (other, *never)]


def _boxed(value: ast.expr) -> list[ast.expr]:
    """Return a list and a tuple that contain the value and `...`, because code under test returns neither."""
    parts = [value, ast.Constant(...)]
    return [ast.List(parts, ast.Load()), ast.Tuple(parts, ast.Load())]


def _empty(value: ast.expr) -> list[ast.expr]:
    return [ast.List([], ast.Load()), ast.Tuple([], ast.Load())]


_NEVER = ((ast.Eq, ast.NotEq, _boxed), (ast.In, ast.NotIn, _empty))
"""A comparison, its opposite, and a function that returns values for which the comparison never holds. An assertion and
its opposite become the same set of variants, so the set does not show which of them is right."""


def _in_calls(function: Function, random: Random) -> list[Site]:
    """Return sites outside of assertions: the arguments of a call, then any constant. None of them is certain."""
    found = []
    for node in _walk(function.body):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and not called_name(call).startswith("as"):
            if len(call.args) > 1:
                found.append(Site((Falsification(call, "args", call.args[:-1]),), certain=False))
            if call.args:
                found.append(Site((Falsification(call, "args", [*call.args, call.args[-1]]),), certain=False))
    loops = {id(part) for node in _walk(function.body) if isinstance(node, ast.While) for part in ast.walk(node)}
    constants = [node for node in _walk(function.body) if _may_change(node) and id(node) not in loops]
    found += [Site(tuple(_changed(node, random)[:MOST_ALTERNATIVES]), certain=False) for node in constants]
    return found


def _at_end(function: Function, random: Random) -> list[Site]:
    """Return a site after the last statement, where a false assertion is added. Every variant has true assertions
    of the same form."""
    if any(map(_leaves, function.body)):
        return []
    numbers = random.sample(range(1000), MOST_ALTERNATIVES + 1)
    added = [comparison(numbers[0], other) for other in numbers[1:]]
    return [Site(tuple(Falsification(function, "body", [*function.body, each]) for each in added), certain=True)]


def comparison(left: int, right: int) -> ast.stmt:
    """Return an assertion that two numbers are equal."""
    return ast.Assert(ast.Compare(ast.Constant(left), [ast.Eq()], [ast.Constant(right)]), None)


def _is_literal(node: ast.expr) -> bool:
    """Return whether the node is a constant, or a list, tuple or dict of constants."""
    if isinstance(node, ast.List | ast.Tuple):
        return all(_is_literal(each) for each in node.elts)
    if isinstance(node, ast.Dict):
        return all(each is not None and _is_literal(each) for each in (*node.keys, *node.values))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.Constant)
