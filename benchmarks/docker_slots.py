"""Slots in docker containers against `docker exec`: python benchmarks/docker_slots.py --image NAME [--host ADDRESS]

Needs a docker daemon and an image with Python 3.11. The cases alternate: a command in a slot of a container, the same
command with `docker exec`, and the same in a slot on this machine; then a slot from a snapshot and a new container;
finally 200 slots in 10 containers concurrently.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import _measure as measure
import _slot_turns as turns

from palaestra_slots.sandbox.backends.docker import DockerBackend
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import SlotSpec

TIMES_FASTER = 10.0
"""The factor by which a command in a slot must be faster than `docker exec`."""
CONTAINERS, SLOTS = 10, 200


async def run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    assert await process.wait() == 0, command


async def commands(image: str, docker: list[str], hosts: list[str], rounds: int) -> list[measure.Row]:
    """Measure the milliseconds of a command and of a fresh workspace, in each way."""
    name = f"palaestra-benchmark-{time.time_ns()}"
    found: dict[str, list[float]] = {}
    async with DockerBackend(image, hosts=hosts) as backend, LocalBackend() as local:
        await run(*docker, "run", "-d", "--rm", "--name", name, "--network", "none", image, "sleep", "3600")
        try:
            slot, here = await backend.create(SlotSpec(), "slot"), await local.create(SlotSpec(), "here")
            snapshot = await backend.seal(await backend.create(SlotSpec(), "sealed"))

            async def fresh() -> None:
                made = await backend.create(snapshot.spec, "fresh", snapshot)
                await made.execute("true")
                await backend.destroy(made)

            cases: dict[str, Callable[[], Awaitable[object]]] = {
                "command in a slot of a container": lambda: slot.execute("true"),
                "command by docker exec": lambda: run(*docker, "exec", name, "bash", "-c", "true"),
                "command in a slot of this machine": lambda: here.execute("true"),
                "fresh slot from a snapshot": fresh,
                "fresh container": lambda: run(*docker, "run", "--rm", "--network", "none", image, "true"),
            }
            for _ in range(rounds):
                for case, call in cases.items():
                    found.setdefault(case, []).append(await turns.timed(call))
        finally:
            await run(*docker, "kill", name)
    median = {case: statistics.median(each) for case, each in found.items()}
    peers = {"fresh slot from a snapshot": "fresh container"}
    table = []
    for case, value in median.items():
        ratio = value / median[peers.get(case, "command by docker exec")]
        row = measure.Row(case, value, "ms", ratio)
        mine = case == "command in a slot of a container"
        table.append(measure.judged(row, 1 / TIMES_FASTER, ratio <= 1 / TIMES_FASTER) if mine else row)
    return table


async def many(image: str, hosts: list[str]) -> list[measure.Row]:
    """Measure the seconds until this many slots have run a command."""
    backend = DockerBackend(image, hosts=hosts, containers=CONTAINERS, slots_per_container=SLOTS // CONTAINERS)
    return await turns.many_slots(backend, SLOTS, "containers", CONTAINERS)


def main() -> int:
    """Measure and print the table."""
    parser = measure.options_parser(__doc__)
    parser.add_argument("--image", required=True, help="an image with Python 3.11")
    parser.add_argument("--host", default="", help="the daemon's address")
    options = parser.parse_args()
    docker = ["docker", "--host", options.host] if options.host else ["docker"]
    rounds = options.rounds or (20 if options.quick else 100)
    rows = asyncio.run(commands(options.image, docker, [options.host], rounds))
    rows += asyncio.run(many(options.image, [options.host]))
    measure.report("Slots in docker containers", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
