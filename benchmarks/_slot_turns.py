"""Functions that the benchmarks of slots in containers and sandboxes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import _measure as measure

from palaestra_slots.sandbox.backends.remote import RemoteBackend
from palaestra_slots.sandbox.slot import Slot, SlotSpec


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    """Return the milliseconds that a call takes."""
    begun = time.perf_counter()
    await call()
    return 1000 * (time.perf_counter() - begun)


async def many_slots(backend: RemoteBackend, slots: int, noun: str, most: int) -> list[measure.Row]:
    """Measure the seconds until this many slots have run a command, and the number of places that they used, at most
    `most`."""
    async with backend:

        async def one(number: int) -> Slot:
            slot = await backend.create(SlotSpec(), f"slot {number}")
            assert (await slot.execute(f"echo {number}")).output == f"{number}\n"
            return slot

        begun = time.perf_counter()
        made = await asyncio.gather(*map(one, range(slots)))
        wall = time.perf_counter() - begun
        places = backend.stats()["containers"]
        await asyncio.gather(*map(backend.destroy, made))
    row = measure.Row(f"{slots} slots: {noun}", float(places), noun)
    return [measure.Row(f"{slots} slots: made and used", wall, "s"), measure.with_ceiling(row, most)]
