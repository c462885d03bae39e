"""Measure what it costs to start and end a group of three slots, next to a single slot and to `docker compose up`.

    .venv/bin/python benchmarks/service_group.py                # --rung full|userns chooses the isolation level

A group is a pool's lease of three slots in a network of their own. No program runs in the slots, so a service's own
start is not in these numbers. `docker compose` starts and ends three containers of a local image that sleep, if a
daemon is there. The target is the ratio to one slot.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import _measure as measure

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import GroupAddress, SlotSpec

MOST = 4.0  # of the time of one slot
COMPOSE = "services:\n" + "".join(
    f"  s{number}: {{image: IMAGE, command: [sleep, infinity], stop_signal: SIGKILL}}\n" for number in range(3)
)


async def medians(count: int, bodies: dict[str, Callable[[], Awaitable[None]]]) -> dict[str, float]:
    """Return the median time of each body, in seconds. They take turns, so that they share the machine's load."""
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(count):
        for name, body in bodies.items():
            started = time.perf_counter()
            await body()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in times.items()}


async def measure_slots(count: int, rung: str) -> dict[str, float]:
    """Return the medians for slots."""
    async with SlotPool(backend=LocalBackend.from_isolation(rung)) as pool:

        async def single() -> None:
            await pool.release(await pool.acquire("single"))

        async def three() -> None:
            first = await pool.acquire("main", spec=SlotSpec(group=GroupAddress("", 2, 3)))
            await asyncio.gather(*(pool.add(first, number, SlotSpec(), f"s{number}") for number in (3, 4)))
            await pool.release(first)

        await single()
        await three()
        return await medians(count, {"one slot": single, "a group of three": three})


def measure_docker(count: int) -> float | str:
    """Return the median time of docker compose in seconds, or why it was not measured."""
    docker = shutil.which("docker")
    if docker is None:
        return "docker is not installed"
    images = subprocess.run([docker, "images", "-q"], capture_output=True, text=True)
    if images.returncode or not images.stdout.split():
        return (images.stderr.strip() or "docker has no local image")[:200]
    has_plugin = not subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    compose = [docker, "compose"] if has_plugin else [shutil.which("docker-compose") or ""]
    if not compose[0]:
        return "docker has no compose plugin, and docker-compose is not installed"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "compose.yaml").write_text(COMPOSE.replace("IMAGE", images.stdout.split()[0]))
        times = []
        for _ in range(count):
            started = time.perf_counter()
            for words in (["up", "--detach", "--quiet-pull"], ["down", "--timeout", "0"]):
                done = subprocess.run([*compose, *words], cwd=folder, capture_output=True, text=True)
                if done.returncode:
                    return done.stderr.strip()[-200:]
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> int:
    parser = measure.options_parser(__doc__, rounds=40)
    parser.add_argument("--rung", default="best", help="the isolation level (default: the best that works here)")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 40)
    slots = asyncio.run(measure_slots(rounds, options.rung))
    single, group = slots["one slot"], slots["a group of three"]
    rows = [
        measure.Row("one slot, started and ended", 1000 * single, "ms", 1.0),
        measure.judged(
            measure.Row("a group of three slots", 1000 * group, "ms", group / single), MOST, group <= MOST * single
        ),
    ]
    docker = measure_docker(max(1, rounds // 10))
    if isinstance(docker, str):
        print(f"docker compose was not measured: {docker}")
    else:
        rows.append(measure.Row("docker compose up and down, three containers", 1000 * docker, "ms", docker / single))
    return measure.report("Groups of slots", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
