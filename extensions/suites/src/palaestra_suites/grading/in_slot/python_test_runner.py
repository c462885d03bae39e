"""Run the tests of one Python text, without pytest, and report each on the verdict channel.

Tests are functions without arguments, or methods of classes, including subclasses of `unittest.TestCase`.

Input: one JSON object on standard input, written by `hidden_tests.py`. Output, in the form of `pytest_reporter.py`:
`start` (no code of the workspace has run yet), `collect` (the text cannot be loaded), `collected`, `test` (one for each
test), and `finish`.

Invariant: when code of the workspace runs, neither a file nor a variable has the text of the tests, and the standard
library precedes the workspace on the import path.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import site
import sys
import traceback
import unittest
from types import CodeType
from typing import TYPE_CHECKING, Any

_HERE = os.path.dirname(os.path.abspath(__file__))

if TYPE_CHECKING:
    from palaestra_suites.grading.in_slot.verdict_channel import Framework, VerdictChannel, read_plan, watch
else:
    sys.path.insert(0, _HERE)  # Python runs isolated (-I), which leaves this folder out
    from verdict_channel import Framework, VerdictChannel, read_plan, watch

_MAX_TEXT = 1500
_FILE = "<tests>"
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _outline(text: str) -> list[tuple[str, list[str]]]:
    """Return the name of each class in the text with those of its methods, and an empty name with each function."""
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.ClassDef, *_FUNCTION)):
            own = node.body if isinstance(node, ast.ClassDef) else [node]
            names = [each.name for each in own if isinstance(each, _FUNCTION)]
            found.append((node.name if isinstance(node, ast.ClassDef) else "", names))
    return found


def _load_tests(code: CodeType) -> tuple[dict[str, Any], str]:
    """Return the namespace of the tests, and the traceback if they cannot be loaded."""
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(code, names)  # noqa: S102  the tests are in no file
    except BaseException:
        return names, traceback.format_exc()
    return names, ""


def _tests(outline: list[tuple[str, list[str]]], names: dict[str, Any]) -> list[str]:
    """Return the names of the tests (`test`, or `Class::test`), including tests that classes inherit."""
    found: dict[str, None] = {}
    for owner, own in outline:
        known = names.get(owner)
        for name in dict.fromkeys([*own, *(dir(known) if isinstance(known, type) else ())]):
            if name.startswith("test"):
                found[f"{owner}::{name}" if owner else name] = None
    return list(found)


def _run_test(names: dict[str, Any], name: str) -> str:
    """Run a test and return its traceback, or an empty string if the test passed."""
    owner, _, method = name.rpartition("::")
    try:
        found = names[owner.partition("::")[0] or method]
        if isinstance(found, type) and issubclass(found, unittest.TestCase):
            result = unittest.TestResult()
            unittest.TestSuite([found(method)]).run(result)
            bad = [text for _, text in (*result.failures, *result.errors)]
            passed = result.testsRun == 1 and not (bad or result.skipped or result.unexpectedSuccesses)
            return "" if passed and not result.expectedFailures else "".join(bad) or "it was not run"
        test = getattr(found(), method) if isinstance(found, type) else found
        answer = test()
        if inspect.iscoroutine(answer):
            asyncio.run(answer)
    # Code of the work may call `sys.exit` or raise KeyboardInterrupt, which must fail its test and not end the session.
    except BaseException:
        return traceback.format_exc()
    return ""


def main() -> None:
    plan = read_plan()
    outline, code = _outline(plan["tests"]), compile(plan.pop("tests"), _FILE, "exec")
    channel = VerdictChannel()
    channel.send("start")
    framework = Framework(channel)
    if plan["watching"]:
        framework.note()
        watch(channel, plan["root"], [])
    sys.path += [*plan["python_path"], site.getusersitepackages()]  # pip may install only there
    # Otherwise Python could load compiled files of the agent in place of the modules next to them.
    sys.pycache_prefix = os.path.join(_HERE, "pycache")
    names, problem = _load_tests(code)
    found = _tests(outline, names)
    if problem:
        channel.send("collect", node_id="", message=problem[-_MAX_TEXT:])
    channel.send("collected", node_ids=found)
    for name in found:
        error = problem or _run_test(names, name)
        failure = {"message": error[-_MAX_TEXT:]} if error else None
        outcome = "failed" if error else "passed"
        channel.send("test", node_id=name, when="call", outcome=outcome, failure=failure)
    framework.check()
    channel.send("finish", exit_status=0)


if __name__ == "__main__":
    main()
