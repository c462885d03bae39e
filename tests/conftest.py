"""Tests marked `network` run where the package index answers, and say so where it does not.

Generated examples are the same in every run, so that a change does not fail for an older bug by chance. Look further
with `--hypothesis-profile explore`.
"""

import asyncio
import functools
import signal
import socket
import urllib.request
from urllib.parse import urlsplit

import pytest
from hypothesis import settings

settings.register_profile("steady", derandomize=True)
settings.register_profile("explore", derandomize=False, max_examples=1000, print_blob=True)
settings.load_profile("steady")

# Tests press Ctrl-C. What a script starts in the background ignores it, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("network") is not None:
        problem = _index_problem()
        if problem is not None:
            pytest.skip(problem)


@functools.cache
def _index_problem() -> str | None:
    """Why the package index cannot be reached, or None. Asks for a connection only; what it serves is for the tests."""
    from palaestra.suites.swe.authoring.sdist import configured_url

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
