"""Run test files with pytest and report the tests on the verdict channel.

Input: one JSON object on standard input, written by `repository_tests.py`. Output, in this order: `start` (interpreter,
pytest and channel work; no code of the workspace has run yet), `collect` (a file that could not be collected),
`collected` (the tests that were found), `test` (a test's call phase, or its set-up or tear-down if that did not pass),
and `finish` (pytest ended its session). Reports of the audit hook (`alarm`) come in between, and the source files that
pytest itself reads to show their lines (`read`).

Invariant: nothing from the workspace is imported before `start` is sent and the audit hook is installed, and standard
output carries no verdict.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from palaestra_suites.grading.in_slot.verdict_channel import Framework, VerdictChannel, read_plan, watch
else:
    from verdict_channel import Framework, VerdictChannel, read_plan, watch

_MAX_TEXT = 2000


def _without_middle(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT // 2] + " … " + text[-_MAX_TEXT // 2 :]


class Reporter:
    """The pytest plugin: reports the tests and, if it is `watching`, whether the test framework was changed. With
    `blank`, `linecache` has the files of tests without their lines, so that tracebacks neither open nor show them."""

    def __init__(self, channel: VerdictChannel, *, watching: bool = True, blank: bool = False) -> None:
        import pytest

        # it runs after all other plugins, because for unittest's tests one of them puts the exception into `call`
        pytest.hookimpl(hookwrapper=True)(Reporter.pytest_runtest_makereport)
        pytest.hookimpl(tryfirst=True, optionalhook=True)(Reporter.pytest_warning_recorded)
        pytest.hookimpl(trylast=True, optionalhook=True)(_AfterWarning.pytest_warning_recorded)
        self._send, self._watching, self._blank = channel.send, watching, blank
        self._framework = Framework(channel)
        self._failures: dict[tuple[str, str], dict[str, object]] = {}
        self._marked: set[str] = set()
        self._known: set[str] = set()

    def pytest_load_initial_conftests(self) -> None:
        """Note the framework's functions: installed plug-ins have changed some, and no code of the work has run."""
        if self._watching:
            self._framework.note()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._send("collect", node_id=report.nodeid, message=_without_middle(report.longrepr))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._marked = {item.nodeid for item in items if item.get_closest_marker("xfail") is not None}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._framework.check()
        self._send("collected", node_ids=[item.nodeid for item in session.items])
        for path in {str(item.fspath) for item in session.items} if self._blank else ():
            linecache.cache[path] = 0, None, [], path  # without a time, the entry is never checked

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Record the exception of a failed phase, and the line of the test's file through which the exception
        passed."""
        self._known = _read_lines()
        yield
        self.forget_lines()
        if call.excinfo is not None:
            self._failures[item.nodeid, call.when] = _failure(item, call.excinfo)

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(_AfterWarning(self))

    def pytest_warning_recorded(self) -> None:
        """Note what was read before pytest shows the line of a warning."""
        self._known = _read_lines()

    def forget_lines(self) -> None:
        """Report the source files that pytest has just read to show their lines, because such a reading is not the
        work's, and forget their text, so that the work does not find it."""
        for path in _read_lines() - self._known:
            linecache.cache.pop(path, None)
            self._send("read", path=os.path.abspath(path))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self._send(
            "test",
            node_id=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            wasxfail=hasattr(report, "wasxfail"),
            marked=report.nodeid in self._marked,
            duration_s=round(report.duration, 4),
            failure=self._failures.get((report.nodeid, report.when)) if report.outcome != "passed" else None,
        )

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._framework.check()
        self._send("finish", exit_status=int(exitstatus))


class _AfterWarning:
    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def pytest_warning_recorded(self) -> None:
        self._reporter.forget_lines()


def _read_lines() -> set[str]:
    return {path for path, entry in linecache.cache.items() if len(entry) > 1}  # others are not read yet


def _failure(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> dict[str, object]:
    test = getattr(item, "obj", None)
    code = getattr(inspect.unwrap(test), "__code__", None) if callable(test) else None
    # pytest 6 has no `path`, and pytest 6.0 no `rootpath`
    place = item.path if hasattr(item, "path") else item.fspath
    root = getattr(item.config, "rootpath", None) or item.config.rootdir  # type: ignore[attr-defined]
    path = code.co_filename if code else str(place)  # for an inherited test, not the file in its node id
    lines = [entry.lineno + 1 for entry in excinfo.traceback if entry.frame.code.raw is code]
    arguments = getattr(item, "funcargs", {})
    params = getattr(getattr(item, "callspec", None), "params", {})
    direct = {name: value for name, value in params.items() if arguments.get(name, value) is value}
    return {
        "exception": excinfo.typename,
        "message": _without_middle(excinfo.value),
        "path": os.path.relpath(path, str(root)),
        "line": lines[-1] if lines else 0,
        "params": {name: _without_middle(_repr(value)) for name, value in direct.items()},
    }


def _repr(value: object) -> str:
    """Return the `repr` of a parameter, or a placeholder if it raises, so that the report is not lost."""
    try:
        return repr(value)
    except Exception as problem:
        return f"<unprintable: {type(problem).__name__}>"


def main() -> None:
    plan = read_plan()
    sys.path += plan["dependencies"]
    import pytest

    channel = VerdictChannel()
    channel.send("start")
    if plan["watching"]:
        watch(channel, plan["root"], [os.path.join(plan["root"], path) for path in plan["files"]])
    first = len(sys.path) - len(plan["dependencies"])  # after the standard library, before installed packages
    sys.path[first:first] = plan["python_path"]
    os.environ["PYTHONPATH"] = os.pathsep.join([*plan["python_path"], *plan["dependencies"]])
    files = [path for path in plan["files"] if os.path.exists(path)]
    if files:
        arguments = [*plan["arguments"], f"--rootdir={plan['root']}", *files]
        pytest.main(arguments, plugins=[Reporter(channel, watching=plan["watching"])])
    else:
        # Without a path, pytest would collect all tests of the repository.
        channel.send("finish", exit_status=0)


if __name__ == "__main__":
    main()
