"""The main job, shown: real bug-fixing tasks, rolled out and scored in local slots, by the oracle and by doing nothing.

Ends with exit code 0 only when the oracle scores 1.0 and doing nothing 0.0 on every rollout of every task.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from palaestra.envs.config.build import make_pool
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.discovery import form_of
from palaestra.envs.run.run import RunLine, RunReport, run
from palaestra.inference.config import APIServerConfig
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Group, Trajectory
from palaestra.suites.swe.authoring.build_tasks import BuildOptions, build
from palaestra.suites.swe.swe_smith_oracle import SweSmithOracleEnv, SweSmithOracleEnvConfig

TASKS = Path("data/demo/tasks.jsonl")
GROUP_SIZE = 4


@dataclass(frozen=True)
class Played:
    """One policy's run over all tasks."""

    policy: str
    wanted: float
    report: RunReport
    groups: dict[str, Group]

    @property
    def right(self) -> bool:
        """Whether every rollout of every task got the reward that it must get."""
        return self.report.exit_code == 0 and all(
            len(group.trajectories) == GROUP_SIZE and all(t.reward == self.wanted for t in group.trajectories)
            for group in self.groups.values()
        )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tasks", type=int, default=12, help="how many tasks (default 12)")
    wanted = arguments.parse_args()
    started = time.monotonic()
    print(f"building {wanted.tasks} tasks from real packages (the first time asks the package index) …", flush=True)
    asyncio.run(build_tasks(wanted.tasks))
    built = time.monotonic()
    played = [play("oracle", 1.0), play("noop", 0.0)]
    Console(width=None if sys.stdout.isatty() else 130).print(table(played))
    for each in played:
        print(f"{each.policy:7} groups {each.report.groups}\n        report {each.report.report}")
    tasks, rollouts = len(played[0].groups), sum(each.report.totals.rollouts for each in played)
    print(
        f"{tasks} tasks, {rollouts} rollouts; building took {built - started:.0f} s, "
        f"rolling out {time.monotonic() - built:.0f} s"
    )
    return verdict(played)


async def build_tasks(count: int) -> None:
    """Build the first tasks of the manifest; they lie in rounds over its packages."""
    TASKS.parent.mkdir(parents=True, exist_ok=True)
    settings = SweSmithOracleEnvConfig()
    options = BuildOptions(out=TASKS, cache=Path(settings.cache_dir).expanduser(), limit=count)
    async with make_pool(settings) as pool:
        await build([], None, pool, options, progress=lambda line: print(f"  {line}", flush=True))


def play(policy: str, wanted: float) -> Played:
    """Run the environment over the tasks with one policy."""
    form = form_of(SweSmithOracleEnv)
    command_line = CommandLine("demo", SweSmithOracleEnvConfig, APIServerConfig, name=f"demo_{policy}")
    settings = {"dataset_name": TASKS, "shuffle": "false", "total_steps": -1, "group_size": GROUP_SIZE}
    flags = [f"--env.{name}={value}" for name, value in settings.items()]
    parsed = command_line.parse(["process", "--policy", policy, *flags])
    assert isinstance(parsed, Parsed)
    line: RunLine = parsed
    report = asyncio.run(run(form, line))
    return Played(policy, wanted, report, {group.task_id: group for group in Recording(report.journal)})


def table(played: list[Played]) -> Table:
    """One row per task. Preparing is once per group; seconds and the time to fork slots are a rollout's, the median."""
    shown = Table(title="Real bugs, fixed and left alone")
    shown.add_column("task", no_wrap=True)
    for column in ("F2P", "P2P", "oracle", "noop", "seconds", "prepare ms", "fork ms"):
        shown.add_column(column, justify="right")
    oracle, noop = played
    for task_id, group in oracle.groups.items():
        first = group.trajectories[0] if group.trajectories else None
        shown.add_row(
            task_id,
            _passed(first, "f2p"),
            _passed(first, "p2p"),
            _rewards(group),
            _rewards(noop.groups.get(task_id)),
            f"{_median([t.beside.duration_s - t.beside.stages.get('admit', 0.0) for t in group.trajectories]):.2f}",
            f"{group.prepare_s * 1000:.0f}",
            f"{_median([t.beside.stages.get('fork', 0.0) for t in group.trajectories]) * 1000:.1f}",
        )
    return shown


def _passed(trajectory: Trajectory | None, kind: str) -> str:
    if trajectory is None or trajectory.reward is None:
        return "-"
    return f"{trajectory.detail[f'{kind}_passed']}/{trajectory.detail[f'{kind}_total']}"


def _rewards(group: Group | None) -> str:
    if group is None or not group.trajectories:
        return "-"
    return " ".join("?" if t.reward is None else f"{t.reward:g}" for t in group.trajectories)


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def verdict(played: list[Played]) -> int:
    """0 when every reward is what it must be; else 1, with what went wrong."""
    for each in played:
        if not each.right:
            print(f"{each.policy}: not every reward is {each.wanted:g}", file=sys.stderr)
            for error in each.report.totals.errors:
                print(f"  {error}", file=sys.stderr)
    good = all(each.right for each in played)
    print("oracle 1.0 and noop 0.0 on every rollout" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
