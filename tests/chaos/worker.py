"""A client under fire: leases slots from a pool, works in them, and says of each lease how it went. Run as a program.

    python worker.py RUNG FIRST COUNT

One line per lease on stdout: its number and `clean`, `dirty` or `lost`. Dirty is a slot that shows anything of an
earlier lease; lost is a slot or server that was killed under us, which is what the killer is for.
"""

from __future__ import annotations

import asyncio
import sys

from palaestra_slots.core.errors import SandboxError
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Rung, Slot, View

LOOK = """
set -o pipefail
ls -A /workspace /tmp /dev/shm /var/tmp | grep -v -e : -e '^$'; [ $? -le 1 ] || exit 9
ps -e -o pid=,args= | grep -v -e '^ *1 ' -e 'ps -e' -e grep -e bash; [ $? -le 1 ] || exit 9
cat /usr/local/mark 2>/dev/null; [ $? -le 1 ] || exit 9
"""
"""Ends with another status than 0 where a part of it was killed, of which a pipeline says nothing."""

LEAVE = """
echo $1 | tee /workspace/mark /tmp/mark /dev/shm/mark /var/tmp/mark /usr/local/mark >/dev/null 2>&1
setsid sleep 1000 >/dev/null 2>&1 &
(setsid sh -c 'while :; do sleep 0.05; date > /tmp/beat; done' >/dev/null 2>&1 &)
"""
WORK = "for i in $(seq 30); do echo $i > f$i; done; cat f* | wc -l; sleep 0.02; seq 20000 | tail -1"


async def main(rung: Rung, first: int, count: int) -> None:
    """Work through the leases, eight at a time."""
    turns = asyncio.Semaphore(8)
    epochs: list[int] = []

    async def one(pool: SlotPool, number: int) -> None:
        async with turns:
            print(number, await lease(pool, number, epochs), flush=True)

    async with SlotPool(SlotPoolConfig(max_slots=8, acquire_timeout=60), LocalBackend(rung=rung)) as pool:
        async with asyncio.TaskGroup() as group:
            for number in range(first, first + count):
                group.create_task(one(pool, number))
        if sorted(set(epochs)) != sorted(epochs):
            print(-1, "dirty: an epoch was given twice", flush=True)


async def lease(pool: SlotPool, number: int, epochs: list[int]) -> str:
    """One lease from acquire to release; every third is sealed and forked on the way."""
    try:
        slot = await pool.acquire(f"lease-{number}")
        epochs.append(slot.epoch)
        try:
            seen = await look(slot)
            if seen:
                return f"dirty: {seen!r}"
            await work(slot, number)
            if number % 4 == 0:
                await pool.snapshots.forget(await pool.checkpoint(slot))
        finally:
            await pool.release(slot)
        return "clean" if number % 3 else await fork(pool, number)
    except SandboxError:
        return "lost"


async def look(slot: Slot) -> str:
    """What a slot shows that nobody in it has made."""
    result = await slot.execute(LOOK)
    if result.exit_code:
        raise SandboxError("the look itself was killed, or a part of it")
    return result.output


async def work(slot: Slot, number: int) -> None:
    """Commands, files and things left behind."""
    await slot.execute(LEAVE.replace("$1", str(number)))
    await asyncio.gather(slot.execute(WORK), slot.write_bytes("data", bytes(300_000)), slot.changes())
    await slot.read_bytes("data")


async def fork(pool: SlotPool, number: int) -> str:
    """Seal one slot and look at what two slots from it show: its files, cut to a view, and no process."""
    slot = await pool.acquire(f"sealed-{number}")
    try:
        await slot.execute(LEAVE.replace("$1", str(number)))
        if await slot.stat("mark") is None:
            raise SandboxError("who was to leave something was killed")
    except SandboxError:
        await pool.release(slot)
        raise
    snapshot = await pool.seal(slot, View(only=("/workspace",)))
    for _ in range(2):
        forked = await pool.acquire(f"fork-{number}", snapshot=snapshot)
        try:
            seen = await look(forked)
        finally:
            await pool.release(forked)
        if seen != "mark\n":
            return f"dirty: {seen!r}"
    await pool.snapshots.forget(snapshot)
    return "clean"


if __name__ == "__main__":
    asyncio.run(main(Rung[sys.argv[1].upper()], int(sys.argv[2]), int(sys.argv[3])))
