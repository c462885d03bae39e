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


@pytest.fixture(params=[Rung.FULL, Rung.USERNS], ids=lambda rung: rung.label)
def on_each_rung(request: pytest.FixtureRequest) -> WithSlot:
    """The same on every rung with namespaces; one that this machine does not have is skipped."""
    return lambda body: _run(body, LocalBackend(rung=request.param))


def _run(body: Body, backend: LocalBackend) -> None:
    async def main() -> None:
        try:
            await backend.start()
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        async with backend:
            await body(backend, await backend.create(SlotSpec(), "test"))

    asyncio.run(main())
