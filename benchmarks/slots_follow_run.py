"""Whether slots keep up with the model server: python benchmarks/slots_follow_run.py [--quick] [--json FILE]

The model server takes one second per call and runs in a separate process. Rollouts in groups of eight run in slots, 64
and 512 concurrently. A rollout has `CALLS` model calls and nine commands, and its score reads a file in a fresh slot.
If no rollout waits for a slot, N concurrent rollouts finish at the ideal rate of N/CALLS per second, to which the ratio
refers. The pool has its default settings, so only the machine limits the number of slots. With 512 rollouts, each
rollout makes more calls, because two cores execute only about 300 commands a second; otherwise this would limit the
rate.

A run has `WAVES` times N rollouts. The rate counts the rollouts that end after the first N and before the last N, so
that N rollouts are always in flight: all slots are created in the first wave, and in the last wave no new rollouts
begin. `whole run` is the rate from the start of the run to the end of the last rollout.

`processors` is how many of the machine's processors were busy during the run, on average; `main process` is how many of
them the run itself used, at most 1, because it is one thread. Rollouts that begin together also ask for their slots
together: each wave begins with as many new slots as rollouts, which takes about two seconds for 512.

`memory` is the largest decrease of the available memory, per rollout in flight. `leftovers` is the number of slots that
are still in use after the last rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import _measure as measure
from _instant_server import chat_reply, serve

from palaestra import Task, environment
from palaestra.rollouts.events import RolloutEnded
from palaestra.rollouts.journal.journal import EventStream, Journal
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.spec import RunContext, RunSettings
from palaestra.rollouts.workspaces import Workspaces
from palaestra_slots.sandbox.admission import available_memory
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.server_group import ServerGroup

CALL_S, COMMANDS, GROUP = 1.0, 9, 8
WAVES, QUICK_WAVES, ROUNDS = 4, 3, 3
CALLS = {64: 10, 512: 20}
"""The number of model calls per rollout, by the number of concurrent rollouts."""
TARGET = 0.9
PROMPT = "Do the steps of task.txt"


def conversation(calls: int) -> list[bytes]:
    """Return the replies of one rollout. `COMMANDS` of them run a command, the last is text, and the others read the
    task."""
    replies = []
    for turn in range(calls - 1):
        runs = (turn + 1) * COMMANDS // (calls - 1) > turn * COMMANDS // (calls - 1)
        tool = ("terminal", {"command": "echo step >> done.txt"}) if runs else ("read_file", {"path": "task.txt"})
        replies.append(chat_reply(None, [tool], turn))
    return [*replies, chat_reply("All done.")]


@environment(toolsets=["terminal", "file"])
async def steps(n: int = 8):
    """Yield tasks whose workspace is prepared once per group."""
    for number in range(n):
        yield Task(id=f"t{number}", prompt=PROMPT, files={"task.txt": "ten steps\n"})


@steps.score
async def right(sandbox):
    """Score 1.0 if all commands ran."""
    return await sandbox.read_text("done.txt", missing="") == "step\n" * COMMANDS


class Ends:
    """Records the time at which each rollout ended. Subscribes to the events of a run."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def handlers(self) -> dict[type, Callable[[RolloutEnded], None]]:
        return {RolloutEnded: lambda event: self.times.append(time.perf_counter())}


@contextlib.asynccontextmanager
async def lowest_memory() -> AsyncIterator[list[int]]:
    """Record the available memory at the start, and the lowest value after that."""
    seen = [available_memory()] * 2

    async def look() -> None:
        while True:
            await asyncio.sleep(0.5)
            seen[1] = min(seen[1], available_memory())

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        looking.cancel()


def busy_s() -> float:
    """Return the seconds that the machine's processors were busy since its start, added up (`man 5 proc_stat`)."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


async def run(url: str, at_once: int, waves: int) -> dict[str, float]:
    """Measure the rollouts per second with this many in flight, and the memory that they use."""
    with tempfile.TemporaryDirectory() as folder:
        engine = ServerGroup(APIServerConfig(base_url=url, model_name="m", health_check=False))
        await engine.start()
        async with SlotPool(SlotPoolConfig(), LocalBackend()) as pool:
            workspaces, ends = Workspaces(pool), Ends()
            journal = Journal(Path(folder, "journal.jsonl"))
            events = EventStream(journal, ends)
            context = RunContext(engine, workspaces, events, settings=RunSettings(group_size=GROUP))
            tasks = steps.build(steps.config_type()(n=waves * at_once // GROUP))
            async with lowest_memory() as memory:
                started, busy, own = time.perf_counter(), busy_s(), time.process_time()
                totals = await Runner(tasks, context, concurrency=at_once // GROUP).run()
                took_s = time.perf_counter() - started
                busy, own = busy_s() - busy, time.process_time() - own
            journal.close()
            assert (totals.scored, totals.mean_reward) == (waves * at_once, 1.0), totals.errors
            await workspaces.aclose()
            left = pool.acquired_slots
        await engine.aclose()
    first, last = ends.times[at_once - 1], ends.times[(waves - 1) * at_once - 1]
    return {
        "per_s": (waves - 2) * at_once / (last - first),
        "whole_per_s": waves * at_once / (ends.times[-1] - started),
        "processors": busy / took_s,
        "main": own / took_s,
        "memory_kib": (memory[0] - memory[1]) / 1024 / at_once,
        "left": left,
    }


def rows(at_once: int, calls: int, found: measure.Sample) -> list[measure.Row]:
    """Return the rows for one number of rollouts; the target applies to the share of the ideal rate."""
    ideal = at_once / (calls * CALL_S)
    rate = measure.Row(f"{at_once} rollouts of {calls} calls", found["per_s"], "rollouts/s", found["per_s"] / ideal)
    return [
        measure.judged(rate, TARGET * ideal, found["per_s"] >= TARGET * ideal),
        measure.Row(f"whole run with {at_once}", found["whole_per_s"], "rollouts/s", found["whole_per_s"] / ideal),
        measure.Row(f"processors with {at_once}", found["processors"], f"of {os.cpu_count()}"),
        measure.Row(f"main process with {at_once}", found["main"], "of 1"),
        measure.Row(f"memory with {at_once}", found["memory_kib"], "KiB/rollout"),
        measure.with_ceiling(measure.Row(f"leftovers of {at_once}", found["left"], "slots"), 0),
    ]


def main() -> int:
    """Measure every size and print the table."""
    given = measure.parse_options(__doc__, ROUNDS)
    table: list[measure.Row] = []
    for at_once, calls in list(CALLS.items())[: 1 if given.quick else None]:
        with measure.serving(__file__, "--serve", str(calls)) as url:
            sample = ("--sample", url, str(at_once), str(QUICK_WAVES if given.quick else WAVES))
            cases = {f"{at_once} rollouts": lambda sample=sample: measure.fresh_process(__file__, *sample)}
            (found,) = measure.interleaved(cases, given.rounds).values()
        table += rows(at_once, calls, found)
    title = f"Model calls of {CALL_S:g} s, {COMMANDS} commands per rollout; ratios are to the ideal rate"
    return measure.report(title, table, given.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(serve(conversation(int(sys.argv[2])), delay_s=CALL_S))
    elif sys.argv[1:2] == ["--sample"]:
        print(json.dumps(asyncio.run(run(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))))
    else:
        sys.exit(main())
