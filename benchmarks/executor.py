"""Whether one trajectory's slow call delays the others: python benchmarks/executor.py [--quick] [--json FILE]

First: 200 trajectories, each in its own slot, make `terminal` calls through `ToolExecutor`; between calls their model
"thinks" (seeded). The trajectories run alternately alone and next to a trajectory whose call sleeps for a minute.
Target: next to this call, the 99th percentile of their latencies is at most 1.5 times as high as alone.

Then: 100 rollouts with calls like these, while reward functions written with synchronous calls (`ctx.terminal(…)`)
score other rollouts in the same event loop. Target: at the 99th percentile, a timer fires at most 50 ms late.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time

import _measure as measure

from palaestra.tools.call_text import ToolCall
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_contract.tool_context import ToolContext
from palaestra_contract.tools.executor import ToolExecutor
from palaestra_slots.core.sync_bridge import bridged
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import SlotSpec

TRAJECTORIES, CALLS = 200, 6
THINKS_S = (0.5, 4.0)
ROLLOUTS, REWARDS = 100, 8
"""The number of concurrent rollouts, and the number of reward functions that run at the same time."""

RATIO_TARGET, LAG_TARGET_MS = 1.5, 50.0
TRUE = ToolCall("terminal", {"command": "true"})
SLOW = ToolCall("terminal", {"command": "sleep 60", "timeout": 90})


async def trajectory(executor: ToolExecutor, number: int, calls: int = CALLS) -> list[float]:
    """Measure the latencies of one trajectory's calls, except the first, which creates the slot."""
    rng, name, latencies = random.Random(number), f"trajectory-{number}", []
    await asyncio.sleep(rng.uniform(0, THINKS_S[1]))
    for _ in range(1 + calls):
        started = time.perf_counter()
        assert (await executor.execute(name, TRUE)).success
        latencies.append(time.perf_counter() - started)
        await asyncio.sleep(rng.uniform(*THINKS_S))
    await executor.release_trajectory(name)
    return latencies[1:]


async def side_by_side(pool: SlotPool, count: int, calls: int, disturbed: bool) -> list[float]:
    """Measure all latencies of this many concurrent trajectories."""
    async with ToolExecutor(pool, build_tool_registry(["terminal"])) as executor:
        slow = asyncio.create_task(executor.execute("slow", SLOW)) if disturbed else None
        done = await asyncio.gather(*(trajectory(executor, number, calls) for number in range(count)))
        if slow is not None:
            assert not slow.done(), "the slow call ended before the others"
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
    return [latency for latencies in done for latency in latencies]


async def reward(ctx: ToolContext) -> float:
    """Score as reward functions do: with synchronous calls, one after the other."""
    ctx.write_file("seen.txt", "seen\n")
    passed = ctx.terminal("python3 -c 'print(sum(range(10**5)))'")["exit_code"] == 0
    return float(passed and ctx.read_file("seen.txt")["content"] == "seen\n")


async def scoring(pool: SlotPool, seconds: float) -> int:
    """Score one rollout after the other until the time is over; returns their number."""
    registry, until, count = build_tool_registry(["terminal"]), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        slot = await pool.acquire("scored", spec=SlotSpec())

        async def here(slot=slot):
            return slot

        ctx = ToolContext("scored", slot=here, tools=ToolRuntime(registry, here, task_id="scored"))
        assert await bridged(reward(ctx)) == 1.0
        await pool.release(slot)
        count += 1
    return count


async def run(options: argparse.Namespace) -> list[measure.Row]:
    """Measure all rows."""
    count, calls = (40, 2) if options.quick else (TRAJECTORIES, CALLS)
    p50s: dict[bool, list[float]] = {False: [], True: []}
    p99s: dict[bool, list[float]] = {False: [], True: []}
    async with SlotPool(SlotPoolConfig(max_slots=2 * TRAJECTORIES), LocalBackend()) as pool:
        for number in range(options.rounds):
            for disturbed in (False, True):
                measure.progress(
                    f"round {number + 1} of {options.rounds}: {'beside a sleeper' if disturbed else 'alone'}"
                )
                latencies = await side_by_side(pool, count, calls, disturbed)
                p50s[disturbed].append(measure.quantile(latencies, 0.5) * 1e3)
                p99s[disturbed].append(measure.quantile(latencies, 0.99) * 1e3)
        measure.progress("reward functions during rollouts")
        seconds = 5.0 if options.quick else 20.0
        async with ToolExecutor(pool, build_tool_registry(["terminal"])) as executor, measure.lag() as late:
            others = [asyncio.create_task(trajectory(executor, number, calls)) for number in range(ROLLOUTS)]
            scored = sum(await asyncio.gather(*(scoring(pool, seconds) for _ in range(REWARDS))))
            await asyncio.gather(*others)
    alone, beside = statistics.median(p99s[False]), statistics.median(p99s[True])
    return [
        measure.Row(f"{count} trajectories alone, p50", statistics.median(p50s[False]), "ms"),
        measure.Row("… p99", alone, "ms", 1.0),
        measure.Row("next to a call that sleeps, p50", statistics.median(p50s[True]), "ms"),
        measure.judged(
            measure.Row("… p99", beside, "ms", beside / alone), RATIO_TARGET, beside <= RATIO_TARGET * alone
        ),
        measure.Row(f"rewards scored during {ROLLOUTS} rollouts", scored / seconds, "1/s"),
        measure.with_ceiling(
            measure.Row("event loop lag meanwhile, p99", measure.quantile(late, 0.99) * 1e3, "ms"), LAG_TARGET_MS
        ),
    ]


def main() -> int:
    """Measure and print the table."""
    options = measure.options_parser(__doc__).parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    rows = asyncio.run(run(options))
    return measure.report(f"Calls during a slow call, median of {options.rounds}", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
