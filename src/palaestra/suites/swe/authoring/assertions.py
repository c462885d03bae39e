"""What a test claims, read from its source: which call it makes, what should come out, and what a reader needs first.

Only the syntax tree of a test file is looked at; nothing is executed.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

MAX_SETUP_LINES = 16
MAX_HELPER_LINES = 6
MAX_HELPER_CHARS = 600
_EQUALITIES = {
    "assertEqual",
    "assertEquals",
    "assertListEqual",
    "assertDictEqual",
    "assertSequenceEqual",
    "assert_equal",
}
_MEMBERSHIPS = {"assertIn", "assert_in"}
_FOREIGN = frozenset(sys.stdlib_module_names) | frozenset(dir(builtins)) | {"self", "pytest"}
"""Where a called name comes from that is not the package's own."""


def statement_at(module: ast.Module, line: int) -> tuple[ast.FunctionDef, ast.stmt] | None:
    """The innermost statement at a line, and the outermost function around it."""
    for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
        if function.lineno <= line <= (function.end_lineno or 0):
            inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
            around = [node for node in inside if node.lineno <= line <= (node.end_lineno or 0)]
            if around:
                return function, min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    return None


@dataclass(frozen=True, slots=True)
class Claim:
    """What a test's statement does, and what it says should come out (None: it only has to work)."""

    call: ast.expr | ast.stmt
    expected: ast.expr | None = None
    call_on_the_right: bool = False


def read_claim(statement: ast.stmt) -> Claim:
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
            return _sides(test.left, test.comparators[0])
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return Claim(test.operand, ast.Constant(False))
        return Claim(test, ast.Constant(True))
    if isinstance(statement, ast.Return) and statement.value is not None:
        return Claim(statement.value)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        name = _spelled(call.func).rpartition(".")[2]
        if name in _EQUALITIES and len(call.args) >= 2:
            return _sides(call.args[0], call.args[1])
        if name in _MEMBERSHIPS and len(call.args) >= 2:
            return Claim(call.args[0])
        if name in ("assertTrue", "assertFalse") and call.args:
            return Claim(call.args[0], ast.Constant(name == "assertTrue"))
    return Claim(statement)


def _sides(left: ast.expr, right: ast.expr) -> Claim:
    """What was done first: some people write the expected value on the left."""
    named = isinstance(left, ast.Name) and left.id.startswith(("expect", "want"))
    only_right_is_done = (called_name([right]) and not called_name([left])) or not _is_literal(right)
    flipped = named or bool(only_right_is_done and _is_literal(left))
    return Claim(right, left, call_on_the_right=True) if flipped else Claim(left, right)


def _is_literal(node: ast.expr) -> bool:
    """Whether a value is spelled out, at most by means of the standard library."""
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return names <= _FOREIGN and not called_name([node])


def inlined(claim: Claim, function: ast.FunctionDef, statement: ast.stmt) -> Claim:
    """Variables that only carry the result or the expectation replaced by what was assigned to them."""
    if not isinstance(claim.call, ast.expr):
        return claim
    call = _assigned(claim.call, function, statement)
    expected = None if claim.expected is None else _assigned(claim.expected, function, statement)
    return replace(claim, call=call, expected=expected)


def _assigned(node: ast.expr, function: ast.FunctionDef, statement: ast.stmt) -> ast.expr:
    found = node
    for before in function.body:
        if isinstance(before, ast.Assign) and before.lineno < statement.lineno and isinstance(node, ast.Name):
            target = before.targets[0]
            if isinstance(target, ast.Name) and target.id == node.id and node.id not in _names(before.value):
                found = before.value
    return found


def setup_for(module: ast.Module, function: ast.FunctionDef, statement: ast.stmt, call: ast.AST) -> list[ast.stmt]:
    """The statements before the failing one that make the names it uses, as far as they fit, with their imports."""
    needed = _names(call)
    kept: list[ast.stmt] = []
    for before in reversed([node for node in function.body if node.lineno < statement.lineno]):
        if _makes(before, needed) and statement not in ast.walk(before):
            kept.insert(0, before)
            needed |= _names(before)
    for before in reversed(module.body):
        if _defined(before) & needed and (narrow := _narrowed(before, needed)) is not None:
            kept.insert(0, narrow)
            needed |= _names(before)
    while sum(len(ast.unparse(node).splitlines()) for node in kept) > MAX_SETUP_LINES:
        kept.pop(0)
    return kept


def _makes(statement: ast.stmt, needed: set[str]) -> bool:
    """Whether a statement gives one of these names its value, or changes what it stands for; never an assertion."""
    if isinstance(statement, ast.Assert | ast.FunctionDef | ast.ClassDef):
        return False
    if isinstance(statement, ast.Expr):
        name = _first_call(statement).rpartition(".")[2]
        return isinstance(statement.value, ast.Call) and "assert" not in name and bool(_names(statement) & needed)
    return bool((_bound(statement) | _changed(statement)) & needed)


def _changed(statement: ast.stmt) -> set[str]:
    """The objects whose elements or attributes a statement sets or deletes."""
    places = [node for node in ast.walk(statement) if isinstance(node, ast.Subscript | ast.Attribute)]
    changed = [node.value for node in places if isinstance(node.ctx, ast.Store | ast.Del)]
    return {name for node in changed for name in _names(node)}


def _narrowed(statement: ast.stmt, needed: set[str]) -> ast.stmt | None:
    """What a report would repeat of a module's top level: short helpers, values, and the imports that are needed."""
    if isinstance(statement, ast.Assign | ast.FunctionDef):
        text = ast.unparse(statement)
        return statement if len(text) <= MAX_HELPER_CHARS and text.count("\n") < MAX_HELPER_LINES else None
    if isinstance(statement, ast.Import | ast.ImportFrom):
        names = [alias for alias in statement.names if _alias(alias) in needed]
        if isinstance(statement, ast.Import):
            return ast.Import(names)
        own_tests = statement.level or (statement.module or "").split(".")[0] in ("test", "tests", "common")
        return None if own_tests else ast.ImportFrom(statement.module, names, 0)
    return None


def _defined(statement: ast.stmt) -> set[str]:
    """What a statement of a module's top level makes known."""
    return {statement.name} if isinstance(statement, ast.FunctionDef | ast.ClassDef) else _bound(statement)


def _alias(alias: ast.alias) -> str:
    return alias.asname or alias.name.split(".")[0]


def _names(node: ast.AST) -> set[str]:
    """The names that are read or bound, builtins apart."""
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)} - set(dir(builtins))


def _bound(statement: ast.AST) -> set[str]:
    """The names that a statement binds, in whatever it contains."""
    bound = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add(_alias(node))
        elif isinstance(node, ast.FunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound


def unexplained(call: ast.AST, setup: Sequence[ast.stmt], params: Mapping[str, str]) -> set[str]:
    known = {name for node in (*setup, call) for name in _bound(node)} | set(params)
    return {name for node in (*setup, call) for name in _names(node)} - known


def called_name(nodes: Sequence[ast.AST]) -> str:
    """The call that a title names: the first one that is neither a builtin's nor the standard library's."""
    names = [_spelled(call.func) for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call)]
    own = [name for name in names if name and name.split(".")[0] not in _FOREIGN]
    return own[0] if own else ""


def _first_call(node: ast.AST) -> str:
    return next((_spelled(child.func) for child in ast.walk(node) if isinstance(child, ast.Call)), "")


def _spelled(function: ast.expr) -> str:
    """A called name as the user writes it; for a method of something longer, the method's name; else nothing."""
    if isinstance(function, ast.Subscript):
        function = function.value
    text = ast.unparse(function)
    if re.fullmatch(r"[\w.]+", text):
        return text
    return function.attr if isinstance(function, ast.Attribute) and not _is_text(function.value) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr)
