"""Mutations of whole statements: branches, removed lines, early returns."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from palaestra.suites.swe.mutate.mutation import Proposal, Scope


def drop_branch(scope: Scope) -> Iterator[Proposal]:
    """The `else` or last `elif` of an `if` goes."""
    for node in scope.walk():
        if isinstance(node, ast.If) and node.orelse and not _is_elif_chain(node):
            start, end = scope.source.span(node.body[-1])[1], scope.source.span(node.orelse[-1])[1]
            yield Proposal("drop_branch", start, end, "")


def fix_condition(scope: Scope) -> Iterator[Proposal]:
    """The condition of an `if` without an `else` becomes always true or always false."""
    for node in scope.walk():
        if isinstance(node, ast.If) and not node.orelse and not isinstance(node.test, ast.Constant):
            start, end = scope.source.span(node.test)
            for value in ("False", "True"):
                yield Proposal("fix_condition", start, end, value)


def remove_statement(scope: Scope) -> Iterator[Proposal]:
    """A call or an assignment whose value matters later, or one that changes something, becomes `pass` or goes."""
    for body in _bodies(scope):
        for statement in body:
            if isinstance(statement, ast.AugAssign) or _is_call(statement) or _rebinds(statement, scope):
                start, end = scope.source.span(statement)
                if len(body) == 1 or not _whole_lines(scope, start, end):
                    yield Proposal("remove_statement", start, end, "pass")
                else:
                    first, last = _line_bounds(scope, start, end)
                    yield Proposal("remove_statement", first, last, "")


def return_early(scope: Scope) -> Iterator[Proposal]:
    """What was returned is dropped: `return x` becomes `return None`."""
    for node in scope.walk():
        if isinstance(node, ast.Return) and node.value is not None:
            start, end = scope.source.span(node.value)
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield Proposal("return_early", start, end, "None")


def break_loop(scope: Scope) -> Iterator[Proposal]:
    """`continue` becomes `break`, and the other way round."""
    for node in scope.walk():
        if isinstance(node, ast.Continue | ast.Break):
            start, end = scope.source.span(node)
            yield Proposal("break_loop", start, end, "break" if isinstance(node, ast.Continue) else "continue")


def _is_elif_chain(node: ast.If) -> bool:
    """Whether an `elif` follows, whose own `else` is a change of its own."""
    return len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If) and bool(node.orelse[0].orelse)


def _bodies(scope: Scope) -> Iterator[list[ast.stmt]]:
    yield scope.node.body
    for node in scope.walk():
        for field in ("body", "orelse", "finalbody"):
            value = getattr(node, field, None)
            if isinstance(value, list) and value:
                yield value


def _is_call(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def _rebinds(statement: ast.stmt, scope: Scope) -> bool:
    """An assignment to a parameter or an element: without it every name is still bound, so nothing fails at once."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0]
    parameters = {argument.arg for argument in (*scope.node.args.args, *scope.node.args.kwonlyargs)}
    return isinstance(target, ast.Subscript) or (isinstance(target, ast.Name) and target.id in parameters)


def _whole_lines(scope: Scope, start: int, end: int) -> bool:
    """Whether nothing but blanks stands before and after on the same lines."""
    first, last = _line_bounds(scope, start, end)
    return not scope.source.cut(first, start).strip() and not scope.source.cut(end, last).strip()


def _line_bounds(scope: Scope, start: int, end: int) -> tuple[int, int]:
    data = scope.source.data
    newline = data.find(b"\n", end)
    return data.rfind(b"\n", 0, start) + 1, len(data) if newline < 0 else newline + 1
