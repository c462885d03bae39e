"""The problem statement of a task: what a user of the package would report, made from the tests that notice the bug.

It shows calls, what they should give and what they give instead. It never names the file, line or code that was
changed, nor the tests. The same failures give the same text.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palaestra.suites.swe.authoring.assertions import (
    Claim,
    called_name,
    inlined,
    read_claim,
    setup_for,
    statement_at,
    unexplained,
)
from palaestra.suites.swe.run_tests import Failure

MAX_EXAMPLES = 3
_MAX_VALUE = 400
_DIFFERS = re.compile(r"\b0x[0-9a-f]{6,}\b|(?<=/tmp/)tmp\w{8}")
"""Where an object lies in memory, and the names of temporary files: different each time."""

_TELLING = {"NameError", "UnboundLocalError", "AttributeError"}
"""Exceptions whose message can name the very code that is wrong: only their type is told."""


@dataclass(frozen=True, slots=True)
class _Example:
    """One thing that goes wrong. `open_names` are names in it that nothing explains: the fewer the better."""

    title: str
    body: str
    open_names: int


def problem_statement(package: str, failures: Mapping[str, Failure], sources: Mapping[str, str]) -> str:
    """Describe the failures (at least one). They go by node id; `sources` hold the texts of test files."""
    examples: dict[str, _Example] = {}
    for node_id in sorted(failures, key=lambda name: (len(name), name)):
        example = _example(failures[node_id], sources.get(failures[node_id].path, ""))
        examples.setdefault(example.body, example)
    chosen = sorted(examples.values(), key=lambda example: example.open_names)[:MAX_EXAMPLES]
    parts = [f"# {package}: {chosen[0].title}", f"I am using {package} and it does not behave as it should."]
    for number, example in enumerate(chosen, 1):
        parts.append(f"Example {number}:\n\n{example.body}" if len(chosen) > 1 else example.body)
    parts.append(_extent(len(failures), len(chosen)))
    return "\n\n".join(parts) + "\n"


def _extent(failing: int, shown: int) -> str:
    more = failing - shown
    also = f"There are {more} more cases of the same kind. " if more > 1 else ""
    return f"{also}Everything else works as before and should go on working. Please find the cause and fix it."


def _example(failure: Failure, source: str) -> _Example:
    """A title and a paragraph with code for one failure."""
    module = _parse(source)
    located = statement_at(module, failure.line)
    if located is None:
        return _Example("unexpected failure", _happens(failure), 1000)
    function, statement = located
    claim = inlined(read_claim(statement), function, statement)
    setup = setup_for(module, function, statement, claim.call)
    open_names = unexplained(claim.call, setup, failure.params)
    outer = next(node for node in function.body if statement in ast.walk(node))
    if open_names and outer is not statement:  # the names come from a block around the statement: show it whole
        claim = Claim(outer)
        setup = setup_for(module, function, outer, outer)
        open_names = unexplained(outer, setup, failure.params)
    code = "\n".join([*map(ast.unparse, setup), ast.unparse(_with_values(claim.call, failure.params))])
    body = f"```python\n{code}\n```\n\n{_contrast(failure, claim)}"
    return _Example(_title(claim, setup, failure), body, len(open_names))


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a test file may hold escapes that newer versions frown upon
        return ast.parse(source.removeprefix("\ufeff"))


def _title(claim: Claim, setup: Sequence[ast.stmt], failure: Failure) -> str:
    name = called_name([claim.call, *setup])
    if not name:
        return "wrong behaviour"
    return f"`{name}` gives a wrong result" if failure.exception == "AssertionError" else f"`{name}` fails"


def _contrast(failure: Failure, claim: Claim) -> str:
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
        telling = message and not message.endswith(":")  # a colon announces lines that are not shown
        return (
            f"The result is not as expected{': `' + _short(message.removeprefix('assert ')) + '`' if telling else ''}."
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


def _short(text: str) -> str:
    text = _DIFFERS.sub("…", " ".join(text.split("\n")).replace("`", "'"))
    return text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + " …"


def mentions(statement: str, secrets: Sequence[str]) -> tuple[str, ...]:
    """Which of these texts (paths, changed code) a statement gives away."""
    return tuple(secret for secret in secrets if secret.strip() and secret in statement)
