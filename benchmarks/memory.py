"""Whether a long run's memory stays flat: python benchmarks/memory.py [--quick] [--rollouts N] [--json FILE]

A run of 10,000 short rollouts in groups of four, as the command line starts it: tasks, scripted engine, tool, score,
the journal on disk, the groups file, metrics, and at the end summary and report. The rollouts lease no slots, so only
the memory that the run itself keeps is measured. Each sample is a whole run in a separate process.

Resident memory is read at every 25th task. The first fifth of the readings is left out, because caches and the
allocator settle then; a line is fitted to the rest. `growth` is the slope of this line per rollout. `at the end` is the
rise of memory above the last reading while the run is closed. `journal` is the size of the journal: the memory that the
run would need if it kept everything.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator

import _measure as measure

from palaestra import Task, ToolStep, environment

GROUP = 4
ROLLOUTS, QUICK = 10_000, 1_000
READ_EVERY = 25
SETTLED = 0.2
GROWTH_TARGET_KB = 0.25
"""Maximum growth per rollout; 2.5 MB for the whole run. A rollout's record is about thirty times as large."""
END_TARGET_KB = 16_000.0
"""Maximum rise at the end. The report is computed one group at a time, so the limit does not depend on the run's
length."""

read_kb: list[float] = []


@environment(toolsets=[])
def sums(n: int = 1) -> Iterator[Task]:
    """Yield tasks that add two numbers with four calls each."""
    for number in range(n):
        if number % READ_EVERY == 0:
            read_kb.append(measure.resident_kb())
        call = ToolStep("add", {"a": number, "b": 1})
        yield Task(id=f"sum-{number}", prompt=f"What is {number} + 1? {'x' * 960}", solution=[call] * 4, answer="")
    read_kb.append(measure.resident_kb())
    measure.forget_peak()


@sums.tool
def add(a: int, b: int) -> str:
    """Add two integers."""
    return f"{a + b} {'y' * 180}"


@sums.score
async def asked(rollout) -> float:  # type: ignore[no-untyped-def]
    """Score 1.0 if the tool was called."""
    return float(any(message["role"] == "tool" for message in rollout.messages))


async def sample(rollouts: int) -> measure.Sample:
    """Run the whole environment in this process and in this folder."""
    from palaestra.envs.config.command_line import CommandLine, Parsed
    from palaestra.envs.discovery import form_of
    from palaestra.envs.run.run import run
    from palaestra_tokens.config import APIServerConfig

    form = form_of(sums)
    line = CommandLine(prog="memory", env_type=form.config_type(), server_type=APIServerConfig)
    flags = ["--policy", "oracle", "--env.n", str(rollouts // GROUP), "--group", str(GROUP)]
    parsed = line.parse(["process", *flags, "--env.ensure_scores_are_not_same", "false"], {})
    assert isinstance(parsed, Parsed)
    report = await run(form, parsed, stream=io.StringIO())
    assert (report.totals.scored, report.totals.mean_reward) == (rollouts, 1.0), report.totals.errors
    settled = read_kb[int(SETTLED * len(read_kb)) : -1]
    places = [float(READ_EVERY * GROUP * number) for number in range(len(settled))]
    return {
        "growth_kb": statistics.linear_regression(places, settled).slope,
        "end_kb": measure.peak_kb() - read_kb[-1],
        "resident_kb": settled[-1],
        "journal_kb": report.journal.stat().st_size / 1024,
    }


def rows(found: dict[str, float], rollouts: int) -> list[measure.Row]:
    """Return the rows of the table."""
    growth = measure.Row(f"growth over {rollouts} rollouts", found["growth_kb"], "KB/rollout")
    end = measure.Row("at the end, above the last reading", found["end_kb"], "KB")
    return [
        measure.with_ceiling(growth, GROWTH_TARGET_KB),
        measure.with_ceiling(end, END_TARGET_KB),
        measure.Row("resident, last reading", found["resident_kb"], "KB"),
        measure.Row("journal", found["journal_kb"], "KB"),
    ]


def main() -> int:
    """Measure and print the table."""
    parser = measure.options_parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=None, help=f"the number of rollouts (default {ROLLOUTS})")
    options = parser.parse_args()
    rollouts = options.rollouts or (QUICK if options.quick else ROLLOUTS)
    rounds = options.rounds or 1
    case = {"run": lambda: measure.fresh_process(__file__, "--sample", str(rollouts))}
    found = measure.interleaved(case, rounds)["run"]
    return measure.report(f"Memory of a run of {rollouts} rollouts of 5 turns", rows(found, rollouts), options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sample"]:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            print(json.dumps(asyncio.run(sample(int(sys.argv[2])))))
    else:
        sys.exit(main())
