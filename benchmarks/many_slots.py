"""A thousand slots on one machine: python benchmarks/many_slots.py [--slots N] [--rollouts N] [--quick] [--json FILE]

First, live slots are created one after the other. Measured are the time per slot at the beginning and at the end, and
the total memory of an idle slot: the decrease of the kernel's MemAvailable while only slots are created (processes,
page tables, namespaces, mounts, the growth of the server and of this process). This is the median over ten batches,
because other programs also use and free memory. The shares of the server and of the inits are shown separately.

Then, rollouts are simulated, each in its own slot. Their model "thinks" for 2 to 20 seconds (seeded, uniform) and then
calls a tool: `true` three times out of four, otherwise a write of a 4 KiB file. The added latency is the time
of a call minus that of the same call on an idle server. The lag is the delay with which a timer of this process's event
loop fires.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Sequence
from itertools import pairwise
from pathlib import Path

import _measure as measure

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot, SlotSpec

SLOTS, ROLLOUTS, TURNS = 1000, 1000, 4
THINKS_S = (2.0, 20.0)
IDLE_TARGET_KIB, P50_TARGET_MS, P99_TARGET_MS, LAG_TARGET_MS = 600.0, 5.0, 50.0, 50.0


async def timed(work: Awaitable[object]) -> float:
    """Return the seconds until the call is done."""
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def available_kib() -> float:
    """Return the memory that can still be used without swapping, as the kernel reports it (proc_meminfo(5))."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return float(line.split()[1])


def proportional_kib(name: str) -> float:
    """Return the proportional set size of all processes with this name."""
    total = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() == name:
                rollup = (folder / "smaps_rollup").read_text().splitlines()
                total += sum(float(line.split()[1]) for line in rollup if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


async def call(slot: Slot, kind: int) -> float:
    """Make one tool call of a rollout; returns its seconds."""
    if kind == 0:
        return await timed(slot.write_bytes("file", b"x" * 4096))
    return await timed(slot.execute("true"))


async def creation(backend: LocalBackend, count: int) -> tuple[list[Slot], list[measure.Row]]:
    """Create the live slots, and measure their cost."""
    for _ in range(20):  # create everything that is created only once before the measurement begins
        await backend.destroy(await backend.create(SlotSpec(), "first"))
    slots: list[Slot] = []
    times: list[float] = []
    tenth = max(1, count // 10)
    left, server_before = [available_kib()], proportional_kib("slotd")
    for number in range(count):
        started = time.perf_counter()
        slots.append(await backend.create(SlotSpec(), f"idle-{number}"))
        times.append(time.perf_counter() - started)
        if (number + 1) % tenth == 0:
            left.append(available_kib())
    idle_kib = statistics.median(before - after for before, after in pairwise(left)) / tenth
    first, last = statistics.median(times[:tenth]) * 1e3, statistics.median(times[-tenth:]) * 1e3
    idle = measure.Row("idle slot, all counted", idle_kib, "KiB")
    rows = [
        measure.Row(f"create, the first {tenth}", first, "ms", 1.0),
        measure.Row(f"create, the last {tenth} of {count}", last, "ms", last / first),
        measure.with_ceiling(idle, IDLE_TARGET_KIB),
        measure.Row("of it the init's process (PSS)", proportional_kib("slot-init") / count, "KiB"),
        measure.Row("of it in the server (PSS)", (proportional_kib("slotd") - server_before) / count, "KiB"),
    ]
    return slots, rows


async def idle_costs(slots: Sequence[Slot]) -> list[float]:
    """Measure the median time of each kind of call on an idle server."""
    costs = []
    for kind in (0, 1):
        await call(slots[0], kind)
        costs.append(statistics.median([await call(slot, kind) for slot in slots[:50]]))
    return costs


async def rollouts(slots: Sequence[Slot], count: int) -> list[measure.Row]:
    """Measure the added latency per tool call and the lag of the event loop with this many concurrent rollouts."""
    idle = await idle_costs(slots)
    added: list[float] = []

    async def rollout(number: int) -> None:
        rng = random.Random(number)
        slot = slots[number % len(slots)]
        for _ in range(TURNS):
            await asyncio.sleep(rng.uniform(*THINKS_S))
            kind = min(rng.randrange(4), 1)
            added.append(max(0.0, await call(slot, kind) - idle[kind]))

    started = time.perf_counter()
    async with measure.lag() as lags, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(rollout(number))
    elapsed = time.perf_counter() - started
    p50, p99 = measure.quantile(added, 0.5) * 1e3, measure.quantile(added, 0.99) * 1e3
    return [
        measure.Row(f"tool calls of {count} rollouts", len(added) / elapsed, "calls/s"),
        measure.with_ceiling(measure.Row("added latency per call, p50", p50, "ms"), P50_TARGET_MS),
        measure.with_ceiling(measure.Row("added latency per call, p99", p99, "ms"), P99_TARGET_MS),
        measure.with_ceiling(
            measure.Row("event loop lag, p99", measure.quantile(lags, 0.99) * 1e3, "ms"), LAG_TARGET_MS
        ),
    ]


async def run(options: argparse.Namespace) -> list[measure.Row]:
    """Measure all rows."""
    async with LocalBackend() as backend:
        measure.progress(f"creating {options.slots} slots")
        slots, rows = await creation(backend, options.slots)
        measure.progress(f"{options.rollouts} rollouts of {TURNS} calls, {THINKS_S[0]:g} to {THINKS_S[1]:g} s apart")
        rows += await rollouts(slots, options.rollouts)
        measure.progress("ending them")
        started = time.perf_counter()
        for slot in slots:
            await backend.destroy(slot)
        rows.append(measure.Row("end of a slot", (time.perf_counter() - started) / len(slots) * 1e3, "ms"))
        return rows


def main() -> int:
    """Measure and print the table."""
    parser = measure.options_parser(__doc__)
    parser.add_argument("--slots", type=int, help=f"the number of live slots (default {SLOTS})")
    parser.add_argument("--rollouts", type=int, help=f"the number of concurrent rollouts (default {ROLLOUTS})")
    options = parser.parse_args()
    options.slots = options.slots or (50 if options.quick else SLOTS)
    options.rollouts = options.rollouts or (50 if options.quick else ROLLOUTS)
    rows = asyncio.run(run(options))
    return measure.report(f"{options.slots} live slots, {options.rollouts} rollouts", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
