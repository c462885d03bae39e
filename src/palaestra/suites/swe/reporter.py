"""Runs named tests with pytest inside a slot and reports each phase on a descriptor of its own.

This file is sent into the slot and run there by itself, so it imports the standard library and pytest only. It is not
imported by the rest of the package.

Input: one JSON object on standard input (`testing.py` writes it). Output: JSON lines on descriptor 3, each with the
run's nonce, of these kinds, in this order: `start` (interpreter, pytest and channel work; no code of the workspace has
run yet), `collect` (a file that could not be collected), `collected` (which named tests exist), `test` (one phase of
one test), `finish` (pytest ended its session by itself).

Invariant: nothing of the workspace is imported before `start` is out, and standard output carries no verdict.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

_CHANNEL = 3
_MAX_TEXT = 2000


class Channel:
    """The descriptor that the verdict goes to. Each record is one write, so a crash can tear only the last one."""

    def __init__(self, descriptor: int, nonce: str) -> None:
        self._descriptor = descriptor
        self._nonce = nonce
        self._pid = os.getpid()
        os.set_inheritable(descriptor, False)

    def send(self, kind: str, **fields: object) -> None:
        if os.getpid() != self._pid:  # a test forked: the child's outcome is not the test's
            return
        line = json.dumps({"nonce": self._nonce, "kind": kind, **fields}).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT // 2] + " … " + text[-_MAX_TEXT // 2 :]


class Reporter:
    """The pytest plugin. Keeps the named tests, drops the others, and sends what happened to each."""

    def __init__(self, channel: Channel, names: list[str]) -> None:
        self._channel = channel
        self._names = frozenset(names)
        self._failures: dict[tuple[str, str], dict[str, object]] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._channel.send("collect", node_id=report.nodeid, message=_short(report.longrepr))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [item for item in items if not self._names or item.nodeid in self._names]
        dropped = [item for item in items if self._names and item.nodeid not in self._names]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
        items[:] = kept

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._channel.send("collected", node_ids=[item.nodeid for item in session.items])

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Remember where in the test's own file an exception passed, for a description of the failure.

        Looks after all other plugins have: for unittest's tests the exception is put into `call` by one of them.
        """
        yield
        if call.excinfo is not None:
            self._failures[item.nodeid, call.when] = _failure(item, call.excinfo)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self._channel.send(
            "test",
            node_id=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            wasxfail=hasattr(report, "wasxfail"),
            duration_s=round(report.duration, 4),
            failure=self._failures.get((report.nodeid, report.when)) if report.outcome != "passed" else None,
        )

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._channel.send("finish", exit_status=int(exitstatus), tests=session.testscollected)


def _failure(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> dict[str, object]:
    test = getattr(item, "obj", None)
    code = getattr(inspect.unwrap(test), "__code__", None) if callable(test) else None
    path = code.co_filename if code else str(item.path)  # an inherited test lies in another file than its name says
    lines = [entry.lineno + 1 for entry in excinfo.traceback if entry.frame.code.raw is code]
    arguments = getattr(item, "funcargs", {})
    params = getattr(getattr(item, "callspec", None), "params", {})
    direct = {name: value for name, value in params.items() if arguments.get(name, value) is value}
    return {
        "exception": excinfo.typename,
        "message": _short(excinfo.value),
        "path": os.path.relpath(path, item.config.rootpath),
        "line": lines[-1] if lines else 0,
        "params": {name: _short(_repr(value)) for name, value in direct.items()},
    }


def _repr(value: object) -> str:
    """`repr` of a parameter; one that fails must not fail the report."""
    try:
        return repr(value)
    except Exception as problem:
        return f"<unprintable: {type(problem).__name__}>"


def main() -> None:
    plan: dict[str, Any] = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path and os.path.abspath(path) != here]
    sys.path += plan["dependencies"]
    import pytest

    pytest.hookimpl(tryfirst=True)(Reporter.pytest_collection_modifyitems)
    pytest.hookimpl(hookwrapper=True)(Reporter.pytest_runtest_makereport)
    channel = Channel(_CHANNEL, plan["nonce"])
    channel.send("start", python=sys.version.split()[0], pytest=pytest.__version__)

    os.chdir(plan["root"])
    first = len(sys.path) - len(plan["dependencies"])  # after the standard library, before installed packages
    sys.path[first:first] = plan["python_path"]
    os.environ["PYTHONPATH"] = os.pathsep.join([*plan["python_path"], *plan["dependencies"]])
    sys.pycache_prefix = plan["pycache"]
    files = [path for path in plan["files"] if os.path.exists(path)]
    arguments = [*plan["arguments"], f"--rootdir={plan['root']}", *files]
    if files:
        pytest.main(arguments, plugins=[Reporter(channel, plan["names"])])
    else:
        channel.send("finish", exit_status=0, tests=0)


if __name__ == "__main__":
    main()
