"""Real slots for tests. All tests of a worker share one slot server per isolation level, and get a fresh slot each."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator

import pytest

from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec
from sandbox.bodies import Body, WithSlot


class SlotServers:
    """One event loop, and the backends that tests have used on it. A test that ends a backend gets others a new one."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._backends: dict[Rung | None, LocalBackend] = {}

    def run(self, body: Body, rung: Rung | None = None) -> None:
        """Run a test's coroutine with a fresh slot at this level, by default the best one. Skips without the level."""
        self._runner.run(self._play(body, rung), context=contextvars.copy_context())

    async def _play(self, body: Body, rung: Rung | None) -> None:
        backend = await self._backend(rung)
        before, made = asyncio.all_tasks(), set(backend._slots)
        try:
            await body(backend, await backend.create(SlotSpec(), "test"))
        except BaseException:
            await self._end(rung)  # whatever the failure left behind, the next test does not see it
            raise
        left = asyncio.all_tasks() - before
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for epoch in set(backend._slots) - made:
            await backend.destroy(backend._slots[epoch])

    async def _backend(self, rung: Rung | None) -> LocalBackend:
        backend = self._backends.get(rung)
        if backend is not None and backend._server is None:  # the test before closed it
            backend = None
        if backend is None:
            backend = LocalBackend(rung=rung)
            try:
                await backend.start()
            except IsolationUnavailable as error:
                pytest.skip(str(error))
            self._backends[rung] = backend
        return backend

    async def _end(self, rung: Rung | None) -> None:
        backend = self._backends.pop(rung, None)
        if backend is not None:
            await backend.aclose()

    def close(self) -> None:
        for rung in list(self._backends):
            self._runner.run(self._end(rung))
        self._runner.close()


@pytest.fixture(scope="session")
def slot_servers() -> Iterator[SlotServers]:
    servers = SlotServers()
    yield servers
    servers.close()


@pytest.fixture
def with_slot(slot_servers: SlotServers) -> WithSlot:
    """Runs a coroutine function with a started backend and a fresh slot, at the best isolation level there is."""
    return slot_servers.run


@pytest.fixture
def on_full(slot_servers: SlotServers) -> WithSlot:
    """The same at the isolation level `full`; skipped if that is not available."""
    return lambda body: slot_servers.run(body, Rung.FULL)


@pytest.fixture(params=[Rung.FULL, Rung.USERNS], ids=lambda rung: rung.label)
def on_each_rung(request: pytest.FixtureRequest, slot_servers: SlotServers) -> WithSlot:
    """The same at every isolation level with namespaces; one that is not available is skipped."""
    return lambda body: slot_servers.run(body, request.param)
