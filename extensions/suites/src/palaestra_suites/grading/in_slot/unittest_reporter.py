"""Run a script that starts unittest, and report the result of each test on the verdict channel.

Input: one JSON object on standard input, written by `repository_tests.py`. Output: `start` (no code of the workspace
has run yet), `test` (one for each result), and `finish` (the script ended by itself).
"""

from __future__ import annotations

import os
import runpy
import sys
import unittest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palaestra_suites.grading.in_slot.verdict_channel import Framework, VerdictChannel, read_plan, watch
else:
    from verdict_channel import Framework, VerdictChannel, read_plan, watch

_MAX_TEXT = 2000
_OUTCOMES = {
    "addSuccess": "passed",
    "addFailure": "failed",
    "addError": "error",
    "addSkip": "skipped",
    "addExpectedFailure": "xfailed",
    "addUnexpectedSuccess": "xpassed",
}


def _test_names(test: Any) -> dict[str, object]:
    """Return the names that the runner may print, `method (module.Class)` in both forms and the docstring's first line,
    and the id `module::Class::method`, which is empty for an object that is not a single test."""
    names, test_id = [str(test), test.shortDescription() or ""], ""
    method = getattr(test, "_testMethodName", "")
    if method:
        module, kind = type(test).__module__, type(test).__qualname__
        names += [f"{method} ({module}.{kind})", f"{method} ({module}.{kind}.{method})"]
        test_id = f"{module}::{kind}::{method}"
    return {"names": list(dict.fromkeys(filter(None, names))), "test_id": test_id}


def _patch_results(channel: VerdictChannel) -> None:
    """Make unittest's text results report each outcome that is added to them."""
    kind = unittest.TextTestResult

    def reporting(name: str, status: str) -> Any:
        original = getattr(kind, name)

        def add(self: Any, test: Any, *rest: Any) -> None:
            error = str(rest[0][1])[:_MAX_TEXT] if rest and isinstance(rest[0], tuple) else ""
            channel.send("test", **_test_names(test), status=status, error=error)
            original(self, test, *rest)

        return add

    for name, status in _OUTCOMES.items():
        setattr(kind, name, reporting(name, status))
    # If a subtest fails, unittest calls neither addSuccess nor addFailure for its test.
    original = kind.addSubTest

    def add_subtest(self: Any, test: Any, subtest: Any, problem: Any) -> None:
        if problem is not None:
            channel.send("test", **_test_names(test), status="failed", error=str(problem[1])[:_MAX_TEXT])
        original(self, test, subtest, problem)

    kind.addSubTest = add_subtest  # type: ignore[method-assign,assignment]


def main() -> None:
    plan = read_plan()
    channel = VerdictChannel()
    _patch_results(channel)
    channel.send("start")
    framework = Framework(channel)
    if plan["watching"]:
        framework.note()
        watch(channel, plan["root"], [os.path.join(plan["root"], path) for path in plan["files"]])
    folder, script = os.path.split(os.path.join(plan["root"], plan["script"]))
    os.chdir(folder)
    sys.path[:0] = [folder, *plan["python_path"], plan["root"]]
    sys.path += plan["dependencies"]
    os.environ["PYTHONPATH"] = os.pathsep.join([plan["root"], *plan["python_path"], *plan["dependencies"]])
    sys.argv[:] = [os.path.join(folder, script), *plan["arguments"]]
    status: object = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    framework.check()
    channel.send("finish", exit_status=int(status not in (None, 0)))


if __name__ == "__main__":
    main()
