"""Write the problem statement of a task: what a user of the package would report, from the tests that detect the bug.

It shows calls, what they should return and what they return instead. An example is closed: it defines or imports every
name that it uses, and parameters of the test are replaced by their values. Failures that cannot be shown so are only
counted. The text never names the changed file, line or code, nor the tests. The same failures give the same text. The
syntax trees of test files are read; nothing is executed.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palaestra_suites.grading.harness import FailedTest

MAX_EXAMPLES = 3
_MAX_VALUE = 400
_DIFFERS = re.compile(r"\b0x[0-9a-f]{6,}\b|(?<=/tmp/)tmp\w{8}")
"""Memory addresses and names of temporary files, which differ between runs."""

_REVEALING = {"NameError", "UnboundLocalError", "AttributeError"}
"""Exceptions whose message can name the wrong code: only their type is shown."""
MAX_SETUP_LINES = 20
MAX_HELPER_LINES = 14
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
"""Prefixes of called names that do not belong to the package."""


@dataclass(frozen=True, slots=True)
class _Example:
    """One failure."""

    title: str
    body: str


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where a failed statement takes its names from: its function, the top-level statements of its file and of the file
    of its class, the attributes of this class, and the parameters of the test."""

    function: ast.FunctionDef
    top_level: Sequence[ast.stmt]
    attributes: Mapping[str, ast.expr]
    params: Mapping[str, str]


def problem_statement(package: str, failures: Mapping[str, FailedTest], sources: Mapping[str, str]) -> str:
    """Describe the failures (at least one), given by node id. `sources` maps test files to their texts."""
    examples: dict[str, _Example] = {}
    for node_id in sorted(failures, key=lambda name: (len(name), name)):
        example = _example(node_id, failures[node_id], sources)
        if example is not None:
            examples.setdefault(example.body, example)
    first = failures[min(failures, key=lambda name: (len(name), name))]
    chosen = [*examples.values()][:MAX_EXAMPLES] or [_Example("unexpected failure", _happens(first))]
    parts = [f"# {package}: {chosen[0].title}", f"I am using {package} and it does not behave as it should."]
    for number, example in enumerate(chosen, 1):
        parts.append(f"Example {number}:\n\n{example.body}" if len(chosen) > 1 else example.body)
    parts.append(_extent(len(failures), len(chosen)))
    return "\n\n".join(parts) + "\n"


def _extent(failing: int, shown: int) -> str:
    more = failing - shown
    also = f"There are {more} more cases of the same kind. " if more > 1 else ""
    return f"{also}Everything else works as before and should go on working. Please find the cause and fix it."


def _example(node_id: str, failure: FailedTest, sources: Mapping[str, str]) -> _Example | None:
    """Return a title and a paragraph with closed code for one failure; None if there is no such code."""
    module = _parsed_source(sources.get(failure.path, ""))
    located = _statement_at(module, failure.line)
    if located is None:
        return None
    function, statement = located
    path, *names = node_id.split("::")
    own = module if path == failure.path else _parsed_source(sources.get(path, ""))
    further = [] if own is module else own.body  # an inherited test
    scope = _Scope(function, [*further, *module.body], _attributes(own, names[:-1]), failure.params)
    outer = next(node for node in function.body if statement in ast.walk(node))
    # a block around the statement may define its names: then all of the block is shown
    for claim, shown in ((_read_claim(statement, scope), statement), (_Claim(outer), outer)):
        sides: list[ast.AST] = [claim.call] if claim.expected is None else [claim.call, claim.expected]
        nodes = [_with_values(side, scope) for side in sides]
        setup = _setup_for(scope, shown, [*sides, *nodes])
        if setup is not None and not _open_names([*setup, *nodes]):
            code = "\n".join(map(ast.unparse, [*setup, nodes[0]]))
            expected = None if claim.expected is None else nodes[1]
            body = f"```python\n{code}\n```\n\n{_contrast(failure, expected, on_the_right=claim.call_on_the_right)}"
            return _Example(_title([nodes[0], *setup], failure), body)
    return None


def _attributes(module: ast.Module, names: Sequence[str]) -> dict[str, ast.expr]:
    """Return the values of the attributes of the top-level class with these names, which are one or none."""
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and [node.name] == list(names)]
    assigned = [each for node in classes for each in node.body if isinstance(each, ast.Assign)]
    return {each.targets[0].id: each.value for each in assigned if isinstance(each.targets[0], ast.Name)}


def _parsed_source(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Python versions warn about escapes in older test files
        return ast.parse(source.removeprefix("\ufeff"))


def _title(nodes: Sequence[ast.AST], failure: FailedTest) -> str:
    name = _called_name(nodes)
    if not name:
        return "wrong behaviour"
    return f"`{name}` gives a wrong result" if failure.exception == "AssertionError" else f"`{name}` fails"


def _contrast(failure: FailedTest, expected: ast.AST | None, *, on_the_right: bool) -> str:
    """Return the expected result and the actual one, which is on one side of the message's comparison."""
    if expected is None:
        return _happens(failure)
    should = f"This should give `{_short_value(ast.unparse(expected))}`. "
    if failure.exception == "AssertionError":
        actual = _actual(failure.message, on_the_right=on_the_right)
        if actual is not None:
            return f"{should}Instead it gives `{_short_value(actual)}`."
    return f"{should}{_happens(failure)}"


def _happens(failure: FailedTest) -> str:
    """Return the symptom of a failure that is not a comparison."""
    message = failure.message.strip().splitlines()[0] if failure.message.strip() else ""
    if message.startswith("DID NOT RAISE"):
        name = re.search(r"<class '(?:[\w.]+\.)?(\w+)'>", message)
        return f"This should raise `{name[1] if name else 'an exception'}`, but nothing is raised."
    if failure.exception in _REVEALING:
        return f"Instead it fails with an internal `{failure.exception}`."
    if failure.exception == "AssertionError":
        shown = message and not message.endswith(":")  # a colon introduces lines that are not shown
        value = f": `{_short_value(message.removeprefix('assert '))}`" if shown else ""
        return f"The result is not as expected{value}."
    return f"Instead it raises `{failure.exception}{': ' + _short_value(message) if message else ''}`."


def _actual(message: str, *, on_the_right: bool) -> str | None:
    """Return the actual side of the comparison in an assertion message of pytest or unittest."""
    first = message.strip().splitlines()[0] if message.strip() else ""
    first = re.sub(r"^\w+ differ: ", "", first.removeprefix("assert "))
    for operator in (" == ", " != ", " is "):
        if first.count(operator) == 1:
            return first.split(operator)[on_the_right].strip()
    return None


def _with_values(node: ast.AST, scope: _Scope) -> ast.AST:
    """Replace the parameters of the test, where the `repr` of a value is code, and the attributes of its class with
    their values."""
    values = {name: parsed for name, text in scope.params.items() if (parsed := _expression(text)) is not None}

    class Substitute(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:  # ast requires this name
            return values.get(name.id, name) if isinstance(name.ctx, ast.Load) else name

        def visit_Attribute(self, attribute: ast.Attribute) -> ast.AST:
            own = isinstance(attribute.value, ast.Name) and attribute.value.id == "self"
            found = scope.attributes.get(attribute.attr) if own and isinstance(attribute.ctx, ast.Load) else None
            return found or self.generic_visit(attribute)

    replaced: ast.AST = Substitute().visit(ast.parse(ast.unparse(node)).body[0])
    return replaced


def _expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _short_value(text: str) -> str:
    text = _DIFFERS.sub("…", " ".join(text.split("\n")).replace("`", "'"))
    return text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + " …"


def mentions(statement: str, secrets: Sequence[str]) -> tuple[str, ...]:
    """Return the secrets (paths, changed code) that a statement contains."""
    return tuple(secret for secret in secrets if secret.strip() and secret in statement)


def _statement_at(module: ast.Module, line: int) -> tuple[ast.FunctionDef, ast.stmt] | None:
    """Return the outermost function around a line, and the innermost statement at the line, or None if there is no such
    function."""
    for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
        if function.lineno <= line <= (function.end_lineno or 0):
            inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
            around = [node for node in inside if node.lineno <= line <= (node.end_lineno or 0)]
            if around:
                return function, min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    return None


@dataclass(frozen=True, slots=True)
class _Claim:
    """The call that a test's statement makes, and the expected result. If the result is None, the call only has to
    succeed."""

    call: ast.expr | ast.stmt
    expected: ast.expr | None = None
    call_on_the_right: bool = False


def _read_claim(statement: ast.stmt, scope: _Scope) -> _Claim:
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
            return _sides(test.left, test.comparators[0], statement, scope)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return _Claim(test.operand, ast.Constant(False))
        return _Claim(test, ast.Constant(True))
    if isinstance(statement, ast.Return) and statement.value is not None:
        return _Claim(statement.value)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        name = _spelled(call.func).rpartition(".")[2]
        if name in _EQUALITIES and len(call.args) >= 2:
            return _sides(call.args[0], call.args[1], statement, scope)
        if name in _MEMBERSHIPS and len(call.args) >= 2:
            return _Claim(call.args[0])
        if name in ("assertTrue", "assertFalse") and call.args:
            return _Claim(call.args[0], ast.Constant(name == "assertTrue"))
    return _Claim(statement)


def _sides(left: ast.expr, right: ast.expr, statement: ast.stmt, scope: _Scope) -> _Claim:
    """Return the claim of a comparison. The side that calls the package is the call. If both or none do, it is the left
    one, unless a name or a value on the left is the expected result."""
    named = isinstance(left, ast.Name) and left.id.startswith(("expect", "want"))
    left, right = (_assigned(side, scope.function, statement) for side in (left, right))
    calls = [bool(_called_name([side])) for side in (left, right)]
    flipped = calls == [False, True] or (
        calls[0] == calls[1] and (named or (_is_value(left, scope) and not _is_value(right, scope)))
    )
    return _Claim(right, left, call_on_the_right=True) if flipped else _Claim(left, right)


def _is_value(node: ast.expr, scope: _Scope) -> bool:
    """Return whether a node uses only literals, parameters of the test and names of the standard library."""
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return names <= _FOREIGN | {*scope.params} and not _called_name([node])


def _assigned(node: ast.expr, function: ast.FunctionDef, statement: ast.stmt) -> ast.expr:
    found = node
    for before in function.body:
        if isinstance(before, ast.Assign) and before.lineno < statement.lineno and isinstance(node, ast.Name):
            target = before.targets[0]
            if isinstance(target, ast.Name) and target.id == node.id and node.id not in _used_names(before.value):
                found = before.value
    return found


def _setup_for(scope: _Scope, statement: ast.stmt, nodes: Sequence[ast.AST]) -> list[ast.AST] | None:
    """Return the statements before the failing one that define the names in `nodes`, with their imports. Return None if
    they are too long, or change a parameter of the test, whose value is known only from afterwards."""
    needed = {name for node in nodes for name in _used_names(node)}
    kept: list[ast.AST] = []
    for before in reversed([node for node in scope.function.body if node.lineno < statement.lineno]):
        if _makes(before, needed) and statement not in ast.walk(before):
            if (_bound(before) | _changed(before)) & {*scope.params}:
                return None
            kept.insert(0, _with_values(before, scope))
            needed |= _used_names(before) | _used_names(kept[0])
    for before in reversed(scope.top_level):
        if _defined(before) & needed and (narrow := _narrowed(before, needed)) is not None:
            kept.insert(0, narrow)
            needed |= _used_names(before)
    return kept if sum(len(ast.unparse(node).splitlines()) for node in kept) <= MAX_SETUP_LINES else None


def _makes(statement: ast.stmt, needed: set[str]) -> bool:
    """Return whether a statement binds one of these names or changes the object that it names. Assertions do not
    count."""
    if isinstance(statement, ast.Assert | ast.FunctionDef | ast.ClassDef):
        return False
    if isinstance(statement, ast.Expr):
        name = _first_call(statement).rpartition(".")[2]
        return isinstance(statement.value, ast.Call) and "assert" not in name and bool(_used_names(statement) & needed)
    return bool((_bound(statement) | _changed(statement)) & needed)


def _changed(statement: ast.stmt) -> set[str]:
    """Return the objects whose elements or attributes a statement sets or deletes, or whose method it calls."""
    places = [node for node in ast.walk(statement) if isinstance(node, ast.Subscript | ast.Attribute)]
    changed = [node.value for node in places if isinstance(node.ctx, ast.Store | ast.Del)]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        changed.append(statement.value.func)
    return {name for node in changed for name in _used_names(node)}


def _narrowed(statement: ast.stmt, needed: set[str]) -> ast.stmt | None:
    """Return the part of a top-level statement to show, or None: short helpers, short values and needed imports."""
    if isinstance(statement, ast.Assign | ast.FunctionDef | ast.ClassDef):
        text = ast.unparse(statement)
        return statement if len(text) <= MAX_HELPER_CHARS and text.count("\n") < MAX_HELPER_LINES else None
    if isinstance(statement, ast.Import | ast.ImportFrom):
        names = [alias for alias in statement.names if _alias(alias) in needed]
        if isinstance(statement, ast.Import):
            return ast.Import(names)
        own_tests = statement.level or (statement.module or "").split(".")[0] in ("test", "tests", "common")
        return None if own_tests else ast.ImportFrom(statement.module, names, 0)
    return None


def _defined(statement: ast.AST) -> set[str]:
    """Return the names that a statement defines for the statements after it."""
    return {statement.name} if isinstance(statement, ast.FunctionDef | ast.ClassDef) else _bound(statement)


def _alias(alias: ast.alias) -> str:
    return alias.asname or alias.name.split(".")[0]


def _used_names(node: ast.AST) -> set[str]:
    """Return the names that a node reads or binds, without builtins."""
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)} - set(dir(builtins))


def _bound(statement: ast.AST) -> set[str]:
    """Return the names that a statement or its parts bind."""
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


def _open_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that these statements use and do not define."""
    known = {name for node in nodes for name in _defined(node)}
    return {name for node in nodes for name in _used_names(node) - _bound(node)} - known


def _called_name(nodes: Sequence[ast.AST]) -> str:
    """Return the first called name that belongs to neither builtins nor the standard library, or an empty string."""
    names = [_spelled(call.func) for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call)]
    own = [name for name in names if name and name.split(".")[0] not in _FOREIGN]
    return own[0] if own else ""


def _first_call(node: ast.AST) -> str:
    return next((_spelled(child.func) for child in ast.walk(node) if isinstance(child, ast.Call)), "")


def _spelled(function: ast.expr) -> str:
    """Return a called name as written. After a longer expression, return only the method's name. For any other node,
    return an empty string."""
    if isinstance(function, ast.Subscript):
        function = function.value
    text = ast.unparse(function)
    if re.fullmatch(r"[\w.]+", text):
        return text
    return function.attr if isinstance(function, ast.Attribute) and not _is_text(function.value) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr)
