"""The cost of slots: python benchmarks/slots.py [--peers PYTHON] [--rung full|userns] [--quick] [--json FILE]

Every latency is compared with the floor F, a bare `posix_spawn` of `bash -c true` on the host with the same
environment. Measurements of a row and of F alternate, so that both see the same conditions. Slots are isolated (network
off, all limits on) and used through the async client. Peers that this machine has are measured too; PYTHON is an
interpreter with swe-rex and mini-swe-agent. The table shows medians over the rounds (default 100; 5 with --quick) and
the lowest tenth, which estimates the time on a machine without other work. The targets apply to the medians.

With --mixed, all rows also alternate with each other. Then no row finds its own data in the caches, as in a run with
very different operations: the cheapest rows cost some hundredths of F more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import _measure as measure
import _slot_peers as peers

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import WORKSPACE, Rung, Shell, Slot, SlotSpec, Snapshot, View

FEW, MANY = peers.PREPARED_FILES

BULK_BYTES = 64 << 20
IN_FLIGHT = 64

Case = Callable[[], Awaitable[float]]
"""One operation, timed by itself in seconds."""


async def timed(work: Awaitable[object]) -> float:
    """Perform the operation; returns the seconds that it took."""
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


class Slots:
    """The measured operations, on one pool. Each case does its preparation and clean-up outside the timed part."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool, self._backend = pool, pool.backend
        self._slot: Slot
        self._shell: Shell
        self._few: Snapshot
        self._many: Snapshot

    async def prepare(self) -> None:
        """Create a slot to use, and two workspaces to fork."""
        self._slot = await self._backend.create(SlotSpec(), "bench")
        self._shell = await self._slot.shell()
        await self._slot.write_bytes("small", b"x" * 4096)
        self._few, self._many = await self._workspace(FEW), await self._workspace(MANY)

    async def _workspace(self, files: int) -> Snapshot:
        slot = await self._backend.create(SlotSpec(), "prepare")
        done = await slot.execute(
            f"mkdir -p src tests; for i in $(seq {files}); do echo $i > src/$i; done; echo 1 > tests/t", timeout_s=300
        )
        assert done.success, done.error
        return await self._backend.seal(slot)

    def cases(self) -> dict[str, Case]:
        """Return every latency that has a row, by the row's name."""
        return {
            "stateless command": lambda: timed(self._slot.execute("true")),
            "stateful command": lambda: timed(self._shell.run("true")),
            "slot create": self._create,
            "reset": self._reset,
            f"fork of {FEW} files": lambda: self._fork(self._few),
            f"fork of {MANY} files": lambda: self._fork(self._many),
            "sealed grading view": self._grade,
            "file of sealed work": self._read_sealed,
            "read of 4 KiB": lambda: timed(self._slot.read_bytes("small")),
            "write of 4 KiB": lambda: timed(self._slot.write_bytes("other", b"y" * 4096)),
        }

    async def _create(self) -> float:
        started = time.perf_counter()
        slot = await self._backend.create(SlotSpec(), "create")
        elapsed = time.perf_counter() - started
        await self._backend.destroy(slot)
        return elapsed

    async def _reset(self) -> float:
        """Measure the time to end a used slot and to have a new slot in its place."""
        slot = await self._backend.create(SlotSpec(), "reset")
        await slot.execute("echo 1 > f; sleep 1000 &")
        started = time.perf_counter()
        await self._backend.destroy(slot)
        slot = await self._backend.create(SlotSpec(), "reset")
        elapsed = time.perf_counter() - started
        await self._backend.destroy(slot)
        return elapsed

    async def _fork(self, snapshot: Snapshot) -> float:
        started = time.perf_counter()
        slot = await self._backend.create(SlotSpec(), "fork", snapshot)
        elapsed = time.perf_counter() - started
        assert await slot.read_bytes("tests/t") == b"1\n"
        await self._backend.destroy(slot)
        return elapsed

    async def _grade(self) -> float:
        """Measure the time from the end of the agent's work to a slot that sees the work but not its change to the
        tests."""
        slot = await self._backend.create(SlotSpec(), "agent", self._few)
        await slot.execute("echo 2 > tests/t; echo 2 > src/1; sleep 1000 &")
        started = time.perf_counter()
        sealed = await self._backend.seal(slot, View(without=("/workspace/tests",)))
        grading = await self._backend.create(SlotSpec(), "grade", sealed)
        elapsed = time.perf_counter() - started
        assert await grading.read_bytes("tests/t") == b"1\n"
        assert await grading.read_bytes("src/1") == b"2\n"
        await self._backend.destroy(grading)
        await self._backend.forget(sealed)
        return elapsed

    async def _read_sealed(self) -> float:
        """Measure the time for a score that only reads a file: from asking for a slot to the end of that slot."""
        started = time.perf_counter()
        slot = await self._backend.create(SlotSpec(on_demand=(WORKSPACE,)), "read", self._few)
        assert await slot.read_bytes("tests/t") == b"1\n"
        await self._backend.destroy(slot)
        return time.perf_counter() - started

    async def bulk(self) -> dict[str, float]:
        """Measure MB/s of one large file, written and read back."""
        data = os.urandom(1 << 20) * (BULK_BYTES >> 20)
        written = await timed(self._slot.write_bytes("bulk", data))
        read = await timed(self._slot.read_bytes("bulk", max_bytes=BULK_BYTES))
        await self._slot.remove("bulk")
        return {"write": BULK_BYTES / written / 1e6, "read": BULK_BYTES / read / 1e6}

    async def throughput(self, commands: int) -> float:
        """Measure commands per second with 64 in flight, over eight slots."""
        slots = [await self._backend.create(SlotSpec(), f"load-{number}") for number in range(8)]
        left = iter(range(commands))

        async def worker(slot: Slot) -> None:
            for _ in left:
                assert (await slot.execute("true")).success

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(IN_FLIGHT):
                group.create_task(worker(slots[number % len(slots)]))
        elapsed = time.perf_counter() - started
        for slot in slots:
            await self._backend.destroy(slot)
        return commands / elapsed


def bare_throughput(commands: int, threads: int) -> float:
    """Measure commands per second of a loop that only spawns and waits, in this many threads."""
    left = iter(range(commands))

    def loop() -> None:
        for _ in left:
            peers.floor()

    workers = [threading.Thread(target=loop) for _ in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return commands / (time.perf_counter() - started)


TARGETS_F = {
    "stateless command": 1.3,
    "stateful command": 0.25,
    "slot create": 5.0,
    "reset": 6.0,
    f"fork of {FEW} files": 5.0,
    f"fork of {MANY} files": 5.0,
    "sealed grading view": 10.0,
    "file of sealed work": 1.0,
    "read of 4 KiB": 0.15,
    "write of 4 KiB": 0.15,
}
BULK_TARGET_MB_S, THROUGHPUT_TARGET = 500.0, 0.9


@dataclass
class Samples:
    """The seconds of one case and of the floor, measured alternately."""

    own: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)


async def latencies(cases: dict[str, Case], rounds: int, mixed: bool) -> dict[str, Samples]:
    """Measure every case, alternating with the floor: one case after the other, or all cases in each round."""
    found = {name: Samples() for name in cases}
    whole = rounds if mixed else 1
    for number in range(whole):
        for name, case in cases.items():
            measure.progress(f"round {number + 1} of {whole}: {name}")
            for _ in range(rounds // whole):
                found[name].floor.append(peers.floor())
                found[name].own.append(await case())
    measure.progress("")
    return found


async def throughputs(slots: Slots, rounds: int, commands: int) -> tuple[float, float]:
    """Return the commands per second of the slots and of the best bare loop, as medians over alternating rounds."""
    ours: list[float] = []
    bare: dict[int, list[float]] = {1: [], 4: [], 8: []}
    for _ in range(rounds):
        ours.append(await slots.throughput(commands))
        for threads, rates in bare.items():
            rates.append(bare_throughput(commands, threads))
    return statistics.median(ours), max(statistics.median(rates) for rates in bare.values())


def start_peers(stack: ExitStack, interpreter: str | None) -> dict[str, peers.Peer]:
    """Return the peers that this machine has; print the others with the reason."""
    found: dict[str, peers.Peer] = {}
    for name, start in peers.peers(interpreter).items():
        try:
            peer = stack.enter_context(start())
            peer()
            found[name] = peer
        except peers.Absent as error:
            print(f"absent: {name}: {error}", file=sys.stderr)
    return found


def case_of(peer: peers.Peer) -> Case:
    """Return a peer, which measures its own time, as a case."""

    async def case() -> float:
        return peer()

    return case


async def run(options: argparse.Namespace, others: dict[str, peers.Peer]) -> list[measure.Row]:
    """Measure all rows. Peers are slow, so they run only a tenth of the rounds."""
    rung = None if options.rung is None else Rung[options.rung.upper()]
    async with SlotPool(SlotPoolConfig(max_slots=16), LocalBackend(rung=rung)) as pool:
        slots = Slots(pool)
        await slots.prepare()
        await latencies(slots.cases(), 2, mixed=True)
        found = await latencies(slots.cases(), options.rounds, options.mixed)
        theirs = {name: case_of(peer) for name, peer in others.items()}
        found |= await latencies(theirs, max(1, options.rounds // 10), options.mixed)
        bulk = [await slots.bulk() for _ in range(max(3, options.rounds // 20))]
        rate, bare = await throughputs(slots, 1 if options.quick else 5, 200 if options.quick else 1000)
        floor = [seconds for samples in found.values() for seconds in samples.floor]
        rows = latency_rows("F: posix_spawn of bash -c true", Samples(floor, floor))
        rows += [row for name, samples in found.items() for row in latency_rows(name, samples)]
        for way in ("write", "read"):
            speed = statistics.median(sample[way] for sample in bulk)
            rows.append(
                measure.with_floor(measure.Row(f"{way} of {BULK_BYTES >> 20} MiB", speed, "MB/s"), BULK_TARGET_MB_S)
            )
        rows.append(measure.Row("best bare posix_spawn loop", bare, "commands/s", 1.0))
        row = measure.Row(f"commands with {IN_FLIGHT} in flight", rate, "commands/s", rate / bare)
        rows.append(measure.judged(row, THROUGHPUT_TARGET, rate / bare >= THROUGHPUT_TARGET))
        print(f"rung: {pool.rung.label}", file=sys.stderr)
        return rows


def latency_rows(name: str, samples: Samples) -> list[measure.Row]:
    """Return the rows of the median, with its ratio to the floor's median and its target if it has one, and of the
    lowest tenth."""
    median, low = statistics.median(samples.own), _lowest_tenth(samples.own)
    ratio = median / statistics.median(samples.floor)
    row = measure.Row(name, median * 1e3, "ms", ratio)
    if name in TARGETS_F:
        row = measure.judged(row, TARGETS_F[name], ratio <= TARGETS_F[name])
    return [row, measure.Row("… lowest tenth", low * 1e3, "ms", low / _lowest_tenth(samples.floor))]


def _lowest_tenth(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 10]


def main() -> int:
    """Measure everything in turns and print the table."""
    parser = measure.options_parser(__doc__)
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has swe-rex and mini-swe-agent")
    parser.add_argument("--mixed", action="store_true", help="also alternate all rows with each other")
    parser.add_argument("--rung", choices=("full", "userns"), help="the isolation level (default: the best that works)")
    options = parser.parse_args()
    options.rounds = options.rounds or (5 if options.quick else 100)
    with ExitStack() as stack:
        others = start_peers(stack, options.peers)
        rows = asyncio.run(run(options, others))
    return measure.report("Slots next to bare processes; targets are ratios to F", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
