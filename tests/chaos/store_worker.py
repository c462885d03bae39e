"""A run under fire: takes prepared workspaces from a store that is too small for them. Run as a program.

    python store_worker.py RUNG STORE SEED COUNT

Ends with an error where a workspace is not what its recipe makes, or was not to be had.
"""

from __future__ import annotations

import asyncio
import random
import sys
from functools import partial
from pathlib import Path

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec
from palaestra_slots.sandbox.snapshots.cache import Prepared, Put, Recipe, RunStep
from palaestra_slots.sandbox.snapshots.folder import SnapshotStore

KINDS, ROOM_BYTES = 6, 1_000_000


def recipe(kind: int) -> Recipe:
    """About 400 kB on disk, so that the store has room for two."""
    return Recipe(
        steps=(Put("data", bytes([kind]) * 200_000), RunStep("mkdir d; for i in $(seq 50); do echo $i > d/$i; done"))
    )


async def main(rung: Rung, store: Path, seed: int, count: int) -> None:
    """Take workspaces two at a time, at random."""
    rng = random.Random(seed)
    async with LocalBackend(rung=rung) as backend:
        prepared = Prepared(backend, SnapshotStore(store, max_bytes=ROOM_BYTES).open)
        for _ in range(count // 2):
            await asyncio.gather(*(taken(backend, prepared, rng.randrange(KINDS)) for _ in range(2)))


async def taken(backend: LocalBackend, prepared: Prepared, kind: int) -> None:
    """Take one, look at it from a slot, let it go."""
    wanted = recipe(kind)
    snapshot = (await prepared.take(wanted, partial(prepared.make, wanted))).snapshot
    slot = await backend.create(SlotSpec(), "look", snapshot)
    numbers = (await slot.execute("cat d/* | sort -n | paste -sd ' '")).output.split()
    assert numbers == [str(number) for number in range(1, 51)], numbers
    assert await slot.read_bytes("data") == bytes([kind]) * 200_000
    await backend.destroy(slot)
    await backend.forget(snapshot)


if __name__ == "__main__":
    names = {rung.label: rung for rung in Rung}
    asyncio.run(main(names[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
