"""Tests marked `network` run where the package index answers, and say so where it does not.

The file `tests/slow_tests.txt` lists the tests that took half a second or longer when their durations were last
recorded (`make durations`); they get the marker `slow` and run with `make test-all`.

Generated examples are the same in every run, so that a change does not fail for an older bug by chance. Look further
with `--hypothesis-profile explore`.
"""

import asyncio
import functools
import json
import signal
import socket
import urllib.request
from collections import defaultdict
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, settings

import golden_messages

_ON_BUSY_MACHINES = [HealthCheck.too_slow]  # how long an example takes to make depends on what else runs
_STEADY = settings(derandomize=True, deadline=None, suppress_health_check=_ON_BUSY_MACHINES)
settings.register_profile("steady", _STEADY)
settings.register_profile("explore", _STEADY, derandomize=False, max_examples=1000, print_blob=True)
settings.load_profile("steady")

# Tests press Ctrl-C. What a script starts in the background ignores it, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW_TESTS = Path(__file__).parent / "tests/slow_tests.txt"
"""Node ids of slow tests, one a line; an id without parameters stands for all its cases."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, help="write the seconds of each test to this JSON file")
    parser.addoption("--write-messages", action="store_true", help="write tests/messages for these tests")


def pytest_configure(config: pytest.Config) -> None:
    golden_messages.writing = config.getoption("--write-messages")
    if hasattr(config, "workerinput"):  # with xdist, workers report to the main process
        return
    config.pluginmanager.register(_PlainIds())
    file = config.getoption("--durations-file")
    if file is not None:
        config.pluginmanager.register(_Durations(file))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = set(SLOW_TESTS.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in slow or item.nodeid.partition("[")[0] in slow:
            item.add_marker("slow")
        if _shares_a_fixture(item) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a case with a long text by its parameter: pytest puts the id into a variable, which limits its length."""
    return argname if isinstance(val, str | bytes) and len(val) > 100 else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail if pytest-xdist lost the groups, as it does with pytest 9.2: it would set up shared fixtures everywhere."""
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group") is not None]
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in grouped):
        raise pytest.UsageError(f"pytest {pytest.__version__} and pytest-xdist ignore groups: run make setup")


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Return whether a slow test uses a fixture of its module, which every worker that runs such a test sets up."""
    found = getattr(item, "_fixtureinfo", None)
    definitions = [] if found is None else [each for these in found.name2fixturedefs.values() for each in these]
    return item.get_closest_marker("slow") is not None and any(each.scope == "module" for each in definitions)


class _PlainIds:
    """Takes off the group's name that pytest-xdist appends to a test's id, so that `--last-failed` finds the test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid.rfind("@") > report.nodeid.rfind("]"):
            report.nodeid = report.nodeid.rpartition("@")[0]


class _Durations:
    """Adds up the seconds that each test takes, with its fixtures, and writes them when the tests have ended."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.skipped:
            self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._seconds, indent=0, sort_keys=True), encoding="utf-8")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("network") is not None:
        problem = _index_problem()
        if problem is not None:
            pytest.skip(problem)


@functools.cache
def _index_problem() -> str | None:
    """Why the package index cannot be reached, or None. Asks for a connection only; what it serves is for the tests."""
    from palaestra_suites.swe.authoring.sdist import configured_url

    address = urlsplit(asyncio.run(configured_url()))
    proxy = urllib.request.getproxies().get(address.scheme)
    target = urlsplit(proxy) if proxy else address
    if target.hostname is None:
        return None
    port = target.port or {"https": 443, "http": 80}.get(target.scheme, 443)
    try:
        socket.create_connection((target.hostname, port), timeout=10).close()
    except OSError as error:
        return f"the package index at {target.hostname} is not reachable: {error}"
    return None
