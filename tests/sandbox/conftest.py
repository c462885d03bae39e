"""Real slots for tests: a backend per test, on a rung this machine has."""

from __future__ import annotations

import asyncio

import pytest

from palaestra.core.errors import IsolationUnavailable
from palaestra.sandbox.backends.local import LocalBackend
from palaestra.sandbox.slot import Rung, SlotSpec
from sandbox.bodies import Body, WithSlot


@pytest.fixture
def with_slot() -> WithSlot:
    """Runs a coroutine function with a started backend and a fresh slot, on the best rung there is."""
    return lambda body: _run(body, LocalBackend())


@pytest.fixture
def on_full() -> WithSlot:
    """The same on the rung `full`; skipped where that cannot be had."""
    return lambda body: _run(body, LocalBackend(rung=Rung.FULL))


@pytest.fixture(params=["full", "userns", "full with the Python init", "userns with the Python init"])
def on_each_rung(request: pytest.FixtureRequest) -> WithSlot:
    """The same on every rung and with either init; a rung that this machine does not have is skipped."""
    rung, _, python = str(request.param).partition(" ")
    return lambda body: _run(body, LocalBackend(rung=Rung[rung.upper()], native_init=not python))


def _run(body: Body, backend: LocalBackend) -> None:
    async def main() -> None:
        try:
            await backend.start()
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        async with backend:
            await body(backend, await backend.create(SlotSpec(), "test"))

    asyncio.run(main())
