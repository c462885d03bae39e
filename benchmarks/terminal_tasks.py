"""The number of terminal tasks that are generated, and pass through the triple check, per minute.

    .venv/bin/python benchmarks/terminal_tasks.py --n 200 --seed 7

Prints one line for generating and one for checking: tasks, seconds, tasks per minute, and the processor time of one
task. The processor time includes this process, its slot server and all processes in slots; on a busy machine it is more
reliable than the wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import time

from palaestra.envs.config.build import make_pool
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_suites.endless_terminals.build_terminal import build
from palaestra_suites.endless_terminals.compose_tasks import TaskSelection, generate
from palaestra_suites.endless_terminals.generated_task import to_line


class Stopwatch:
    """Measures the time, and the processor time of this process and of the child processes that it has waited for."""

    def __init__(self) -> None:
        self._begun, self._used = time.perf_counter(), self._processor()

    @staticmethod
    def _processor() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)

    def report(self, what: str, count: int) -> None:
        """Print one line."""
        seconds, processor = time.perf_counter() - self._begun, self._processor() - self._used
        print(
            f"{what}: {count} tasks in {seconds:.1f} s, {60 * count / seconds:,.0f} per minute on "
            f"{len(os.sched_getaffinity(0))} processors, {1000 * processor / count:.1f} ms of processor time each"
        )


async def checked(choice: TaskSelection, count: int) -> int:
    """Build the tasks; returns the number of tasks that failed a check."""
    async with make_pool(HermesAgentEnvConfig()) as pool:
        return len((await build(choice, count, pool, parallel=max(1, pool.total_slots // 2))).problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    choice = TaskSelection(options.seed)

    watch = Stopwatch()
    written = sum(len(to_line(task)) for task in generate(choice, options.n))
    watch.report(f"generated ({written:,} bytes)", options.n)

    watch = Stopwatch()
    left_out = asyncio.run(checked(choice, options.n))
    watch.report(f"generated and checked ({left_out} left out)", options.n)


if __name__ == "__main__":
    main()
