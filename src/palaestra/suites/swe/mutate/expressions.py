"""Mutations inside expressions: operators, conditions, constants, arguments, names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from palaestra.suites.swe.mutate.mutation import Proposal, Scope

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Div: ("/", "*"),
}


def flip_comparison(scope: Scope) -> Iterator[Proposal]:
    """`a < b` becomes `a <= b`, `==` becomes `!=`, `in` becomes `not in` and so on."""
    for node in scope.walk():
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            old, new = _COMPARISONS[type(node.ops[0])]
            yield from _operator(scope, "flip_comparison", node.left, node.comparators[0], old, new)


def swap_arithmetic(scope: Scope) -> Iterator[Proposal]:
    """`a + b` becomes `a - b` and so on; never next to a string, where it could only be a type error."""
    for node in scope.walk():
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _stringy(node.left, node.right):
            old, new = _ARITHMETIC[type(node.op)]
            yield from _operator(scope, "swap_arithmetic", node.left, node.right, old, new)


def swap_boolean(scope: Scope) -> Iterator[Proposal]:
    """`a and b` becomes `a or b`, and the other way round."""
    for node in scope.walk():
        if isinstance(node, ast.BoolOp) and len(node.values) == 2:
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from _operator(scope, "swap_boolean", node.values[0], node.values[1], old, new)


def off_by_one(scope: Scope) -> Iterator[Proposal]:
    """A small whole number becomes one more."""
    for node in scope.walk():
        if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= 1000:
            start, end = scope.source.span(node)
            if scope.source.cut(start, end) == str(node.value):
                yield Proposal("off_by_one", start, end, str(node.value + 1))


def negate_condition(scope: Scope) -> Iterator[Proposal]:
    """`if x:` becomes `if not x:`, and the other way round; comparisons are left to `flip_comparison`."""
    for node in scope.walk():
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare):
            start, end = scope.source.span(node.test)
            if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
                yield Proposal("negate_condition", start, end, scope.source.of(node.test.operand))
            elif isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
                yield Proposal("negate_condition", start, end, f"not {scope.source.cut(start, end)}")


def swap_arguments(scope: Scope) -> Iterator[Proposal]:
    """The first two positional arguments of a call change places."""
    for node in scope.walk():
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        first, second = node.args[:2]
        if isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
            continue
        (start, middle), (again, end) = scope.source.span(first), scope.source.span(second)
        one, two = scope.source.cut(start, middle), scope.source.cut(again, end)
        if ast.dump(first) != ast.dump(second) and type_name(node) != "isinstance":
            yield Proposal("swap_arguments", start, end, two + scope.source.cut(middle, again) + one)


def change_default(scope: Scope) -> Iterator[Proposal]:
    """The default of a parameter changes: True and None to False, a number to one more, a text to the empty one."""
    arguments = scope.node.args
    for node in (*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)):
        if isinstance(node, ast.Constant) and (new := _other_default(node.value)) is not None:
            start, end = scope.source.span(node)
            yield Proposal("change_default", start, end, new)


def wrong_name(scope: Scope) -> Iterator[Proposal]:
    """A parameter is read where another parameter was meant: the next one in the signature."""
    arguments = scope.node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names = [name for name in names if name not in ("self", "cls")]
    for node in scope.walk():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
            start, end = scope.source.span(node)
            yield Proposal("wrong_name", start, end, names[(names.index(node.id) + 1) % len(names)])


def type_name(call: ast.Call) -> str:
    """The name that a call calls, without what stands before a dot."""
    function = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _operator(scope: Scope, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Proposal]:
    """The operator between two operands, if it stands there alone (no comment, and parentheses do not hide it)."""
    start, end = scope.source.span(left)[1], scope.source.span(right)[0]
    between = scope.source.cut(start, end)
    pattern = rf"(?<![\w<>=!*/]){re.escape(old)}(?![\w<>=*/])".replace(r"\ ", r"\s+")
    found = list(re.finditer(pattern, between))
    if len(found) == 1 and "#" not in between:
        offset = start + len(between[: found[0].start()].encode())
        yield Proposal(kind, offset, offset + len(found[0].group().encode()), new)


def _stringy(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        for node in nodes
    )


def _other_default(value: object) -> str | None:
    if value is None:
        return "False"
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1) if value >= 0 else None
    return "''" if isinstance(value, str) and value else None
