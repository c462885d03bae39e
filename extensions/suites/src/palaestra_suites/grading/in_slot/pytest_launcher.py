"""Replace `pytest`, `uv` and `uvx` while a test script runs in a slot, and report what pytest ran.

The first argument is the name under which this program was called. `uv run` and `uvx` start pytest, or Python with the
packages that the script requested; commands that only install packages do nothing. Any other command is reported as
`unmet`, which counts as the grader's failure.

Invariant: nothing from the workspace is on the import path before pytest is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palaestra_suites.grading.in_slot.pytest_reporter import Reporter
    from palaestra_suites.grading.in_slot.verdict_channel import VARIABLE, VerdictChannel, hide, watch
else:
    from pytest_reporter import Reporter
    from verdict_channel import VARIABLE, VerdictChannel, hide, watch

_HERE = os.path.dirname(os.path.abspath(__file__))
_INSTALLING = ("init", "venv", "sync", "add", "lock", "pip", "python", "self", "tool", "cache", "--version", "-V")
_VALUED = ("-p", "--python", "-w", "--with", "--from", "--with-requirements", "--index-url", "--project", "--directory")


def _after_options(words: list[str]) -> list[str]:
    """Return the command that `uvx` or `uv run` must start."""
    while words and words[0].startswith("-"):
        words = words[2:] if words[0] in _VALUED else words[1:]
    return words


def _channel() -> VerdictChannel:
    """Return the channel that the broker gives. Raises OSError if it gives none."""
    with socket.socket(socket.AF_UNIX) as client:
        client.bind("\0" + os.urandom(16).hex())  # the broker finds the socket in this process by its name
        client.connect("\0" + os.environ.pop(VARIABLE))
        _, data, _, _ = client.recvmsg(1, socket.CMSG_SPACE(4))
    # Not before the descriptor has come: the broker examines this process in /proc, and the kernel shows a hidden
    # process to nobody of the same user.
    hide()
    if not data:
        raise OSError("the broker refuses the verdict descriptor")
    return VerdictChannel(int.from_bytes(data[0][2], sys.byteorder))


def _unmet(what: str) -> None:
    with contextlib.suppress(OSError, KeyError):
        _channel().send("unmet", what=what)
    sys.stderr.write(f"{what} is not installed, and there is no network\n")
    raise SystemExit(97)


def _python(plan: dict[str, Any], arguments: list[str]) -> None:
    """Replace this process with a Python that can import the provided packages."""
    path = os.pathsep.join([*plan["dependencies"], *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, "PYTHONPATH": path})  # noqa: S606


def _pytest(plan: dict[str, Any], arguments: list[str]) -> int:
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # PYTHONPATH may name directories of the work, which could have a module `pytest`. They come last, after the import.
    sys.path[:] = [path for path in sys.path if path and os.path.abspath(path) != _HERE]
    sys.path += plan["dependencies"]
    import pytest

    sys.path += own
    tests = plan["tests"]
    paths = [os.path.abspath(word.partition("::")[0]) for word in arguments if not word.startswith("-")]
    paths = [path for path in paths if os.path.exists(path)]
    plugins: list[object] = [_Options()]
    if VARIABLE in os.environ:
        channel = _channel()
        channel.send("start")
        if any(_has_tests(path, plan["names"], tests) for path in paths or [os.getcwd()]):
            plugins.append(_Settings(plan["ignored"]))
        trusted = [sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), *plan["dependencies"], tests]
        watch(channel, "/", [os.path.join(place, "") for place in trusted])
        plugins.append(Reporter(channel, blank=plan["blank"]))
    os.environ.pop("LD_LIBRARY_PATH", None)  # the launcher's value is only for this interpreter
    if plan["library_path"] is not None:
        os.environ["LD_LIBRARY_PATH"] = plan["library_path"]
    shims = os.path.join(_HERE, "bin")
    sys.executable = os.path.join(shims, "palaestra-python")
    # The script finds the stand-ins first; tests find the image's own programs, and the stand-ins only where it has
    # none.
    path = [place for place in os.environ.get("PATH", "").split(os.pathsep) if place != shims]
    os.environ["PATH"] = os.pathsep.join([*path, shims])
    # The verifier's folder is the root if every test that runs is in it.
    inside = bool(paths) and all(os.path.commonpath([path, tests]) == tests for path in paths)
    root = [f"--rootdir={tests}", f"--confcutdir={tests}"] if inside else []
    # The image may have the plugin `ctrf`, whose option `--ctrf` is ours here.
    status = int(pytest.main(["-p", "no:cacheprovider", "-p", "no:ctrf", *root, *arguments], plugins=plugins))
    # Falsified tests fail, and a script with `set -e` must nevertheless start pytest as often as before.
    return 0 if plan["ends_well"] else status


def _has_tests(path: str, names: list[str], tests: str) -> bool:
    """Return whether a path is in the verifier's folder `tests`, or is a copy of its files `names`, or a directory with
    copies. Settings of the agent apply only to the agent's own tests."""
    inside = os.path.realpath(path)
    if inside == tests or inside.startswith(tests + os.sep) or os.path.basename(path) in names:
        return True
    return any(not set(names).isdisjoint(files) for _, _, files in os.walk(path))


class _Settings:
    """Let pytest ignore these settings, these `conftest.py`, and the plugins of these `entry_points.txt`, as if the
    files were missing."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = frozenset(paths)
        self._is_file: Any = Path.is_file
        Path.is_file = lambda path, **options: not self._ignores(path) and self._is_file(path, **options)  # type: ignore[method-assign]
        manager: Any = importlib.import_module("_pytest.config").PytestPluginManager
        load_conftest, load_plugins = manager._importconftest, manager.load_setuptools_entrypoints

        def import_conftest(own: Any, path: Any, *arguments: Any, **options: Any) -> object:
            ignored = self._ignores(path)
            return ModuleType("conftest") if ignored else load_conftest(own, path, *arguments, **options)

        def load_entry_points(own: Any, *arguments: Any, **options: Any) -> object:
            metadata: Any = importlib.import_module("importlib.metadata")
            found = metadata.distributions
            metadata.distributions = lambda: [each for each in found() if not self._ignores_plugins(each)]
            try:
                return load_plugins(own, *arguments, **options)
            finally:
                metadata.distributions = found

        manager._importconftest, manager.load_setuptools_entrypoints = import_conftest, load_entry_points

    def pytest_load_initial_conftests(self) -> None:
        """Pytest has read its settings; show the files to the tests."""
        Path.is_file = self._is_file  # type: ignore[method-assign]

    def _ignores(self, path: Any) -> bool:
        folder, name = os.path.split(path)
        return os.path.join(os.path.realpath(folder), name) in self._paths or os.path.realpath(path) in self._paths

    def _ignores_plugins(self, distribution: Any) -> bool:
        return self._ignores(os.path.join(getattr(distribution, "_path", "/"), "entry_points.txt"))


class _Options:
    """Write `--ctrf FILE`, which the stock script passes: the result of each test as JSON (ctrf.io). Run all tests,
    even if an option (`-x`) stops at the first failure, because falsified tests fail and all other tests must still
    report."""

    def __init__(self) -> None:
        self._tests: list[dict[str, object]] = []
        self._path: str | None = None

    def pytest_addoption(self, parser: Any) -> None:
        parser.addoption("--ctrf", default=None)

    def pytest_configure(self, config: Any) -> None:
        self._path = config.getoption("--ctrf")
        config.option.maxfail = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            status = report.outcome if report.outcome in ("passed", "failed", "skipped") else "other"
            self._tests.append({"name": report.nodeid, "status": status, "duration": round(report.duration * 1000)})

    def pytest_sessionfinish(self) -> None:
        if self._path:
            summary = {"tests": len(self._tests), "passed": sum(t["status"] == "passed" for t in self._tests)}
            with open(self._path, "w", encoding="utf-8") as file:
                json.dump({"results": {"tool": {"name": "pytest"}, "summary": summary, "tests": self._tests}}, file)


def main() -> int:
    with open(os.path.join(_HERE, "plan.json"), encoding="utf-8") as file:
        plan: dict[str, Any] = json.load(file)
    called, words = sys.argv[1], sys.argv[2:]
    if called == "needs":
        _unmet(" ".join(words))
    if called == "uv":
        if words[:1] != ["run"]:
            if words[:1] and words[0] not in _INSTALLING:
                _unmet(f"uv {words[0]}")
            return 0
        words = words[1:]
    if called in ("uv", "uvx"):
        words = _after_options(words)
        if not words:
            return 0
        called, words = words[0].partition("@")[0], words[1:]
        if called in ("python", "python3") and words[:2] == ["-m", "pytest"]:
            called, words = "pytest", words[2:]
    if called in ("pytest", "py.test"):
        return _pytest(plan, words)
    if called in ("python", "python3", "palaestra-python"):
        _python(plan, words)
    if called.endswith(".py"):
        _python(plan, [called, *words])
    _unmet(called)
    return 97


if __name__ == "__main__":
    sys.exit(main())
