"""A real server over real slots, in a thread of its own, with two keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from palaestra_e2b.api_keys import ApiKey, ApiKeys
from palaestra_e2b.server import RunningE2B, running_server
from palaestra_slots.core.io.threads import LoopThread
from palaestra_slots.core.types import Network

from .http_client import Api, Box

FIRST, SECOND = "e2b_first_key", "e2b_second_key"


@contextmanager
def a_server(*keys: ApiKey, **settings: Any) -> Iterator[RunningE2B]:
    """Run a server during the block."""
    loop = LoopThread("e2b")
    server = running_server(ApiKeys(keys), **{"network": Network.OFF, **settings})
    running = loop.wait(server.__aenter__())
    try:
        yield running
    finally:
        loop.wait(server.__aexit__(None, None, None))
        loop.wait(_end_tasks())
        loop.close()


async def _end_tasks() -> None:
    """End aiohttp's tasks that wait for the rest of refused bodies."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningE2B]:
    folder: Path = tmp_path_factory.mktemp("state")
    with a_server(ApiKey("first", FIRST, 8, 6), ApiKey("second", SECOND), folder=folder) as running:
        yield running


@pytest.fixture
def api(server: RunningE2B) -> Iterator[Api]:
    """The server for the first key; its sandboxes end with the test."""
    found = Api(server.url, FIRST)
    yield found
    for each in found.call("GET", "/v2/sandboxes").json:
        found.call("DELETE", f"/sandboxes/{each['sandboxID']}")
    for each in found.call("GET", "/snapshots").json:
        found.call("DELETE", f"/templates/{each['snapshotID']}")
    found.close()


@pytest.fixture
def other(server: RunningE2B) -> Iterator[Api]:
    """The server for the second key."""
    found = Api(server.url, SECOND)
    yield found
    found.close()


@pytest.fixture
def box(api: Api) -> Box:
    return api.create()
