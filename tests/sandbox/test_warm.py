"""Slots made ahead: handed out once, clean, alive; made anew; gone with the pool."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from palaestra.core.errors import SandboxError
from palaestra.core.types import Limits
from palaestra.sandbox.backends.local import LocalBackend
from palaestra.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra.sandbox.slot import Slot, SlotSpec
from palaestra.sandbox.warm import SPECS

pytestmark = pytest.mark.slots


def with_pool(
    warm_slots: int, body: Callable[[SlotPool], Awaitable[None]], backend: LocalBackend | None = None
) -> None:
    async def main() -> None:
        config = SlotPoolConfig(max_slots=8, warm_slots=warm_slots)
        async with SlotPool(config, backend or LocalBackend()) as pool:
            await body(pool)

    asyncio.run(main())


def other_spec(number: int) -> SlotSpec:
    return SlotSpec(limits=replace(Limits(), pids=100 + number))


def test_the_second_lease_of_a_spec_is_warm() -> None:
    async def body(pool: SlotPool) -> None:
        first = await pool.acquire("a")
        await pool.warmed()
        assert pool.get_stats()["warm_slots"] == 2
        second, third = await pool.acquire("b"), await pool.acquire("c")
        assert (second.trajectory_id, third.trajectory_id) == ("b", "c")
        assert len({slot.epoch for slot in (first, second, third)}) == 3
        assert (await second.execute("ls -A /workspace /tmp")).success
        await pool.warmed()
        stats = pool.get_stats()
        assert (stats["warm_hits"], stats["warm_misses"], stats["warm_slots"]) == (2, 1, 2)
        assert (stats["acquired_slots"], stats["backend"]["slots"]) == (3, 5)

    with_pool(2, body)


def test_a_spec_gets_only_its_own() -> None:
    async def body(pool: SlotPool) -> None:
        await pool.acquire("a")
        await pool.warmed()
        slot = await pool.acquire("b", spec=SlotSpec(limits=Limits(open_files=99)))
        assert (await slot.execute("ulimit -n")).output == "99\n"
        assert pool.get_stats()["warm_hits"] == 0

    with_pool(1, body)


def test_forks_are_made_from_their_snapshot() -> None:
    async def body(pool: SlotPool) -> None:
        slot = await pool.acquire("a")
        await slot.write_text("f", "1")
        snapshot = await pool.seal(slot)
        await pool.warmed()
        fork = await pool.acquire("b", snapshot=snapshot)
        assert await fork.read_text("f") == "1"

    with_pool(1, body)


def test_a_slot_that_died_waiting_is_not_handed_out() -> None:
    async def body(pool: SlotPool) -> None:
        await pool.acquire("a")
        await pool.warmed()
        for init in _inits(pool):
            _kill(init)
        for number in range(2):  # whatever the server has seen by now is known after a request or two
            await pool.release(await pool.acquire("c", spec=other_spec(number)))
        slot = await pool.acquire("b")
        assert (await slot.execute("echo alive")).output == "alive\n"
        assert pool.get_stats()["backend"]["lost"] == 2
        assert pool.get_stats()["warm_hits"] == 0

    with_pool(1, body)


def test_only_specs_in_use_are_kept_ready() -> None:
    async def body(pool: SlotPool) -> None:
        for number in range(SPECS + 2):
            await pool.release(await pool.acquire("a", spec=other_spec(number)))
        await pool.warmed()
        assert pool.get_stats()["warm_slots"] == SPECS
        assert pool.get_stats()["backend"]["slots"] == SPECS

    with_pool(1, body)


def test_what_cannot_be_ended_is_quarantined_until_it_can() -> None:
    class Stubborn(LocalBackend):
        refusals = 3  # the first release tries twice

        async def destroy(self, slot: Slot) -> None:
            if slot.trajectory_id == "stubborn" and self.refusals > 0:
                self.refusals -= 1
                raise SandboxError("not now")
            await super().destroy(slot)

    async def body(pool: SlotPool) -> None:
        slots = [await pool.acquire(name) for name in ("stubborn", "b", "c")]
        counts = []
        for slot in slots:
            await pool.release(slot)
            counts.append((pool.get_stats()["quarantined"], pool.available_slots))
        assert counts == [(1, 6), (1, 7), (0, 8)]
        assert pool.get_stats()["backend"]["slots"] == 0

    with_pool(0, body, Stubborn())


def _inits(pool: SlotPool) -> list[int]:
    """The first processes of all slots: the children of the server, which the watcher has started."""
    assert isinstance(pool.backend, LocalBackend)
    watcher = pool.backend.server_pid
    (server,) = Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split()
    return [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]


def _kill(pid: int) -> None:
    """Kill, and wait until it is dead."""
    process = os.pidfd_open(pid)
    signal.pidfd_send_signal(process, signal.SIGKILL)
    assert select.select([process], [], [], 10)[0]
    os.close(process)
