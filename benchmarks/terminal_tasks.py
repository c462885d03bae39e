"""How many terminal tasks are generated, and held to their triple check, per minute.

    .venv/bin/python benchmarks/terminal_tasks.py --n 200 --seed 7

Prints one line for each: tasks, seconds, tasks per minute, and the processors that this process may use.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

from palaestra.envs.config import HermesAgentEnvConfig
from palaestra.envs.endless_terminals.command import build
from palaestra.envs.endless_terminals.compose import Choice, generate
from palaestra.envs.endless_terminals.tasks import to_line
from palaestra.envs.settings import make_pool


def report(what: str, count: int, seconds: float) -> None:
    processors = len(os.sched_getaffinity(0))
    print(
        f"{what}: {count} tasks in {seconds:.1f} s, {60 * count / seconds:,.0f} per minute on {processors} processors"
    )


async def checked(choice: Choice, count: int) -> None:
    async with make_pool(HermesAgentEnvConfig()) as pool:
        begun = time.perf_counter()
        built = await build(choice, count, pool, parallel=max(1, pool.total_slots // 2))
        report(f"generated and checked ({len(built.problems)} left out)", count, time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    choice = Choice(options.seed)
    begun = time.perf_counter()
    written = sum(len(to_line(task)) for task in generate(choice, options.n))
    report(f"generated ({written:,} bytes)", options.n, time.perf_counter() - begun)
    asyncio.run(checked(choice, options.n))


if __name__ == "__main__":
    main()
