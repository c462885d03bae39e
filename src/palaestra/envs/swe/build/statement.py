"""The problem statement of a task: what a user of the package would report, made from the tests that notice the bug.

It shows calls, what they should give and what they give instead. It never names the file, line or code that was
changed, nor the tests. The same failures give the same text.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palaestra.envs.swe.testing import Failure

MAX_EXAMPLES = 3
_MAX_VALUE = 400
_MAX_SETUP_LINES = 14
_EQUALITIES = {"assertEqual", "assertEquals", "assertListEqual", "assertDictEqual", "assertSequenceEqual"}
_TELLING = {"NameError", "UnboundLocalError", "AttributeError"}
"""Exceptions whose message can name the very code that is wrong: only their type is told."""


def problem_statement(package: str, failures: Mapping[str, Failure], sources: Mapping[str, str]) -> str:
    """Describe the failures. `failures` go by node id, `sources` hold the texts of their test files."""
    examples: dict[str, tuple[str, str]] = {}
    for node_id in sorted(failures, key=lambda name: (len(name), name)):
        title, body = _example(node_id, failures[node_id], sources.get(node_id.split("::", 1)[0], ""))
        if body not in [known for _, known in examples.values()]:
            examples.setdefault(title + body[:200], (title, body))
    chosen = list(examples.values())[:MAX_EXAMPLES]
    parts = [f"# {package}: {chosen[0][0]}", f"I am using {package} and it does not behave as it should."]
    for number, (_, body) in enumerate(chosen, 1):
        parts.append(f"Example {number}:\n\n{body}" if len(chosen) > 1 else body)
    parts.append(_extent(len(failures), len(chosen)))
    return "\n\n".join(parts) + "\n"


def _extent(failing: int, shown: int) -> str:
    more = failing - shown
    also = f"There are {more} more cases of the same kind. " if more > 1 else ""
    return f"{also}Everything else works as before and should go on working. Please find the cause and fix it."


def _example(node_id: str, failure: Failure, source: str) -> tuple[str, str]:
    """A title and a paragraph with code for one failure."""
    located = _statement_at(source, failure.line)
    if located is None:
        return "unexpected failure", f"Using it fails: {_happens(failure)}"
    function, statement = located
    claim = _claim(statement)
    setup = _setup(function, statement, claim.call)
    code = "\n".join([*setup, ast.unparse(_with_values(claim.call, failure.params))])
    return _title(claim, failure), f"```python\n{code}\n```\n\n{_contrast(failure, claim)}"


def _title(claim: _Claim, failure: Failure) -> str:
    name = _called_name(claim.call)
    if not name:
        return "wrong behaviour"
    return f"`{name}` gives a wrong result" if failure.exception == "AssertionError" else f"`{name}` fails"


def _contrast(failure: Failure, claim: _Claim) -> str:
    """What should be and what is."""
    if claim.expected is None:
        return _happens(failure)
    should = f"This should give `{_short(ast.unparse(_with_values(claim.expected, failure.params)))}`. "
    if failure.exception == "AssertionError":
        actual = _actual(failure.message, on_the_right=claim.call_on_the_right)
        if actual is not None:
            return f"{should}Instead it gives `{_short(actual)}`."
    return f"{should}{_happens(failure)}"


def _happens(failure: Failure) -> str:
    """What is seen, for failures that are no plain comparison."""
    message = failure.message.strip().splitlines()[0] if failure.message.strip() else ""
    if message.startswith("DID NOT RAISE"):
        name = re.search(r"<class '(?:[\w.]+\.)?(\w+)'>", message)
        return f"This should raise `{name[1] if name else 'an exception'}`, but nothing is raised."
    if failure.exception in _TELLING:
        return f"Instead it fails with an internal `{failure.exception}`."
    if failure.exception == "AssertionError":
        return (
            f"The result is not as expected: `{_short(message.removeprefix('assert '))}`."
            if message
            else ("The result is not as expected.")
        )
    return f"Instead it raises `{failure.exception}{': ' + _short(message) if message else ''}`."


def _actual(message: str, *, on_the_right: bool) -> str | None:
    """The side of the comparison that came out, from an assertion message as pytest or unittest print it."""
    first = message.strip().splitlines()[0] if message.strip() else ""
    first = re.sub(r"^\w+ differ: ", "", first.removeprefix("assert "))
    for operator in (" == ", " != ", " is "):
        if first.count(operator) == 1:
            return first.split(operator)[on_the_right].strip()
    return None


def _statement_at(source: str, line: int) -> tuple[ast.FunctionDef, ast.stmt] | None:
    """The innermost statement at a line, and the outermost function around it."""
    if not line or not source:
        return None
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        if function.lineno <= line <= (function.end_lineno or 0):
            inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
            around = [node for node in inside if node.lineno <= line <= (node.end_lineno or 0)]
            if around:
                return function, min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    return None


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a test's statement does, and what it says should come out (None: it only has to work)."""

    call: ast.expr | ast.stmt
    expected: ast.expr | None = None
    call_on_the_right: bool = False


def _claim(statement: ast.stmt) -> _Claim:
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
            return _sides(test.left, test.comparators[0])
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return _Claim(test.operand, ast.Constant(False))
        return _Claim(test, ast.Constant(True))
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name in _EQUALITIES and len(call.args) >= 2:
            return _sides(call.args[0], call.args[1])
        if name in ("assertTrue", "assertFalse") and call.args:
            return _Claim(call.args[0], ast.Constant(name == "assertTrue"))
    return _Claim(statement)


def _sides(left: ast.expr, right: ast.expr) -> _Claim:
    """The call first: some people write the expected value on the left."""
    calls = [any(isinstance(node, ast.Call) for node in ast.walk(side)) for side in (left, right)]
    return _Claim(right, left, call_on_the_right=True) if calls == [False, True] else _Claim(left, right)


def _with_values(node: ast.AST, params: Mapping[str, str]) -> ast.AST:
    """The parameters of the test replaced by their values, where their `repr` is code."""
    values = {name: parsed for name, text in params.items() if (parsed := _expression(text)) is not None}

    class Substitute(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:  # the name that ast calls
            return values.get(name.id, name)

    replaced: ast.AST = Substitute().visit(ast.parse(ast.unparse(node)).body[0])
    return replaced


def _expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _setup(function: ast.FunctionDef, statement: ast.stmt, call: ast.AST) -> list[str]:
    """The simple statements before the failing one that define the names it uses, as far as they fit."""
    needed = _names(call)
    kept: list[ast.stmt] = []
    for before in reversed([node for node in function.body if node.lineno < statement.lineno]):
        if isinstance(before, ast.Assign | ast.AnnAssign | ast.AugAssign) and _bound(before) & needed:
            kept.insert(0, before)
            needed |= _names(before)
        elif isinstance(before, ast.Expr) and isinstance(before.value, ast.Call) and _names(before) & needed:
            if "assert" not in (_called_name(before) or ""):
                kept.insert(0, before)
        elif isinstance(before, ast.Import | ast.ImportFrom):
            kept.insert(0, before)
    lines = [line for node in kept for line in textwrap.dedent(ast.unparse(node)).splitlines()]
    return lines if len(lines) <= _MAX_SETUP_LINES else ["# …", *lines[-_MAX_SETUP_LINES:]]


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)} - set(dir(builtins))


def _bound(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _called_name(node: ast.AST) -> str:
    """The name of the first thing called, as the user writes it."""
    for child in ast.walk(node):
        if isinstance(child, ast.Call):
            text = ast.unparse(child.func)
            return text if re.fullmatch(r"[\w.]+", text) else text.rpartition(".")[2]
    return ""


def _short(text: str) -> str:
    text = " ".join(text.split("\n")).replace("`", "'")
    return text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + " …"


def mentions(statement: str, secrets: Sequence[str]) -> tuple[str, ...]:
    """Which of these texts (paths, changed code) a statement gives away."""
    return tuple(secret for secret in secrets if secret.strip() and secret in statement)
