"""Leases of trajectories: one that cannot be asked or released does not keep the others."""

from __future__ import annotations

import asyncio
import contextlib

from manual_clock import ManualClock
from palaestra_contract.tools.ttl import Leases
from palaestra_slots.core.errors import SlotLost


async def test_a_dead_slot_does_not_end_the_sweep() -> None:
    async def busy(name: str) -> bool:
        if name == "dead":
            raise SlotLost("its slot ended")
        return name == "working"

    async def main() -> list[str]:
        released: list[str] = []

        async def release(name: str) -> None:
            released.append(name)
            if name == "broken":
                raise SlotLost("it cannot be released")

        clock = ManualClock()
        leases = Leases(60.0, clock)
        for name in ("dead", "broken", "working", "idle"):
            with leases.in_use(name):
                pass
        sweeping = asyncio.create_task(leases.sweep(release, busy))
        while len(released) < 3 and not sweeping.done():  # noqa: ASYNC110
            await asyncio.sleep(0)  # the clock advances with each sleep of the sweep
        assert not sweeping.done()
        sweeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeping
        return released

    assert await main() == ["dead", "broken", "idle"]
