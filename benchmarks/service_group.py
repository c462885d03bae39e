"""Measure what it costs to start and end a group of three slots, next to single slots, and `docker compose up`.

python benchmarks/service_group.py [--count 40] [--rung full] prints one JSON object: medians in milliseconds.

`groups_of_three` makes a pool's lease of three slots in a network of their own and ends it; `single_slot` makes one
slot and ends it. No program runs in the slots, so a service's own start is not in these numbers. `docker_compose` is
`docker compose up --detach` and `down` of three containers of a local image that sleep, if a daemon is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from palaestra.sandbox.backends.local import LocalBackend
from palaestra.sandbox.pool import SlotPool
from palaestra.sandbox.slot import GroupAddress, SlotSpec

COMPOSE = "services:\n" + "".join(
    f"  s{number}: {{image: {{image}}, command: [sleep, infinity], stop_signal: SIGKILL}}\n" for number in range(3)
)


async def medians(count: int, bodies: dict[str, Callable[[], Awaitable[None]]]) -> dict[str, float]:
    """Return the median time of each body, in milliseconds. They take turns, so that they share the machine's load."""
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(count):
        for name, body in bodies.items():
            started = time.perf_counter()
            await body()
            times[name].append(time.perf_counter() - started)
    return {name: round(1000 * statistics.median(each), 2) for name, each in times.items()}


async def measure(count: int, rung: str) -> dict[str, float]:
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
        return await medians(count, {"single_slot": single, "groups_of_three": three})


def measure_docker(count: int) -> float | str:
    """Return the median of docker compose, or why there is none."""
    docker = shutil.which("docker")
    if docker is None:
        return "docker is not installed"
    images = subprocess.run([docker, "images", "-q"], capture_output=True, text=True)
    if images.returncode or not images.stdout.split():
        return (images.stderr.strip() or "docker has no local image")[:200]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "compose.yaml").write_text(COMPOSE.format(image=images.stdout.split()[0]))
        times = []
        for _ in range(count):
            started = time.perf_counter()
            for words in (["up", "--detach", "--quiet-pull"], ["down", "--timeout", "0"]):
                done = subprocess.run([docker, "compose", *words], cwd=folder, capture_output=True, text=True)
                if done.returncode:
                    return done.stderr.strip()[-200:]
            times.append(time.perf_counter() - started)
    return round(1000 * statistics.median(times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--rung", default="best")
    options = parser.parse_args()
    found: dict[str, object] = dict(asyncio.run(measure(options.count, options.rung)))
    found["times_single"] = round(float(str(found["groups_of_three"])) / float(str(found["single_slot"])), 2)
    found["docker_compose"] = measure_docker(max(1, options.count // 10))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
