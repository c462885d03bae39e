"""Roll out real bug-fixing tasks in local sandboxes, with the reference solutions and with a policy that does nothing.

The exit code is 0 only if the oracle scores 1.0 and doing nothing 0.0 in every rollout of every task.
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

import palaestra
from palaestra import Group, Run, Trajectory
from palaestra_contract import SweSmithOracleEnv
from palaestra_suites import SweBuildOptions, SweSmithOracleEnvConfig

TASKS = Path("data/demo/tasks.jsonl")
GROUP_SIZES = {"oracle": 4, "noop": 1}
"""The rollouts of a task by policy. Doing nothing once shows that the tests fail."""


@dataclass(frozen=True)
class Played:
    """One policy's run over all tasks."""

    policy: str
    wanted: float
    run: Run

    @property
    def groups(self) -> dict[str, Group]:
        return {group.task_id: group for group in self.run.groups}

    @property
    def right(self) -> bool:
        """Whether every rollout of every task got the required official verdict and reward."""
        groups = self.run.groups
        figures = [[(each.official_reward, each.reward) for each in group.trajectories] for group in groups]
        wanted = [(self.wanted, self.wanted)] * GROUP_SIZES[self.policy]
        return bool(groups) and all(each == wanted for each in figures)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tasks", type=int, default=12, help="the number of tasks (default 12)")
    wanted = arguments.parse_args()
    started = time.monotonic()
    print(f"building {wanted.tasks} tasks from real packages (the first build uses the package index) …", flush=True)
    asyncio.run(build_tasks(wanted.tasks))
    built = time.monotonic()
    played = [Played("oracle", 1.0, play("oracle")), Played("noop", 0.0, play("noop"))]
    Console(width=None if sys.stdout.isatty() else 170).print(table(played))
    for each in played:
        print(f"{each.policy:7} {each.run.path}")
    tasks, rollouts = len(played[0].groups), sum(len(each.run.trajectories) for each in played)
    print(
        f"{tasks} tasks, {rollouts} rollouts; building took {built - started:.0f} s, "
        f"rolling out {time.monotonic() - built:.0f} s"
    )
    return verdict(played)


async def build_tasks(count: int) -> None:
    """Build the first tasks of the manifest, which lists tasks of different packages in turn."""
    TASKS.parent.mkdir(parents=True, exist_ok=True)
    options = SweBuildOptions(out=TASKS, cache=Path(SweSmithOracleEnvConfig().cache_dir).expanduser(), limit=count)
    async with palaestra.SlotPool() as pool:
        await palaestra.build_swe_tasks([], None, pool, options, progress=lambda line: print(f"  {line}", flush=True))


def play(policy: str) -> Run:
    """Run the environment over the tasks with one policy."""
    return palaestra.run_sync(
        SweSmithOracleEnv,
        policy=policy,
        tasks=-1,
        group_size=GROUP_SIZES[policy],
        dataset_name=str(TASKS),
        shuffle=False,
        progress=True,
    )


def table(played: list[Played]) -> Table:
    """Return one row per task, with the official verdicts and the rewards of both policies. `uncontrolled` counts tests
    that have no falsified copy.

    A group is prepared once; seconds and the time to get a slot are medians over its rollouts.
    """
    shown = Table(
        title="Real bugs, fixed and unfixed",
        caption="slot ms: until a rollout had its slot, with the wait for the processors that other rollouts used; "
        "benchmarks/slots.py measures the fork alone",
    )
    shown.add_column("task", no_wrap=True)
    for column in ("F2P", "P2P", "uncontrolled", "oracle official", "oracle reward", "noop official", "noop reward",
                   "seconds", "prepare ms", "slot ms"):  # fmt: skip
        shown.add_column(column, justify="right")
    oracle, noop = played
    for task_id, group in oracle.groups.items():
        first = group.trajectories[0] if group.trajectories else None
        shown.add_row(
            task_id,
            _passed(first, "f2p"),
            _passed(first, "p2p"),
            _uncontrolled(first),
            _figures(group, "official_reward"),
            _figures(group, "reward"),
            _figures(noop.groups.get(task_id), "official_reward"),
            _figures(noop.groups.get(task_id), "reward"),
            f"{_median([t.beside.duration_s - t.beside.stages.get('admit', 0.0) for t in group.trajectories]):.2f}",
            f"{group.prepare_s * 1000:.0f}",
            f"{_median([t.beside.stages.get('acquire', 0.0) for t in group.trajectories]) * 1000:.1f}",
        )
    return shown


def _passed(trajectory: Trajectory | None, kind: str) -> str:
    if trajectory is None or trajectory.reward is None:
        return "-"
    return f"{trajectory.detail[f'{kind}_passed']}/{trajectory.detail[f'{kind}_total']}"


def _uncontrolled(trajectory: Trajectory | None) -> str:
    return "-" if trajectory is None else str(len(trajectory.detail.get("uncontrolled", ())))


def _figures(group: Group | None, name: str) -> str:
    if group is None or not group.trajectories:
        return "-"
    figures = [getattr(trajectory, name) for trajectory in group.trajectories]
    return " ".join("?" if figure is None else f"{figure:g}" for figure in figures)


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def verdict(played: list[Played]) -> int:
    """Return 0 if every reward is as required; otherwise print the errors and return 1."""
    for each in played:
        if not each.right:
            print(f"{each.policy}: not every reward is {each.wanted:g}", file=sys.stderr)
            errors = {group.error for group in each.run.groups} | {t.error for t in each.run.trajectories}
            for error in sorted(errors - {""})[:5]:
                print(f"  {error}", file=sys.stderr)
    good = all(each.right for each in played)
    print("oracle 1.0 and noop 0.0 on every rollout" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
