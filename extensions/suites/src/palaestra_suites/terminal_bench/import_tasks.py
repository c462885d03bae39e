"""`palaestra env import`: try every terminal task of a source with the no-op policy, its reference solution and, if its
author shows one, its cheat (`cheat/solve.sh`).

All attempts use the real agent loop, slots and grading. Doing nothing must fail, the solution must pass, and the cheat
must fail or be labelled. A task whose solution passes only if it is graded in the agent's own slot is about a running
service, and is reported as such.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

import click

from palaestra.envs.config.build import make_pool
from palaestra.envs.policy_runs import FULL, PolicyRuns, parse_settings, policy_runs
from palaestra.envs.run.run import serve_limit
from palaestra.rollouts.environment import WORK_BREAKS_CHECK
from palaestra.rollouts.records import Trajectory
from palaestra.rollouts.schedule import numbered
from palaestra_slots.core.errors import PalaestraError
from palaestra_slots.core.types import JSON, Outcome, Task
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_suites.swe.failure_cause import cause_of
from palaestra_suites.terminal_bench.find_tasks import LeftOut
from palaestra_suites.terminal_bench.service import MAIN
from palaestra_suites.terminal_bench.terminal_task import TerminalTask
from palaestra_suites.terminal_bench.terminalbench_2 import TerminalBenchEnvironment
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from palaestra_tokens.engines.scripted import NoopPolicy, OraclePolicy, Policy

_STILL_RUNS = 124
"""The exit code of a command that its time limit ended, as of `timeout`."""


class Finding(StrEnum):
    """The result of trying a task."""

    GOOD = "good"
    NEEDS_LIVE = "needs live grading"
    UNPROVEN = "no solution to try"
    NOOP_PASSES = "doing nothing passes"
    SOLUTION_FAILS = "its solution does not pass"
    CHEAT_PASSES = "its cheat passes"
    VERIFIER_FAILS = "its verifier does not work"
    REFUSED = "refused"
    READ = "can be read"


@dataclass(frozen=True, slots=True)
class TriedTask:
    """One task. A reward is None if the attempt gave none, or there was none; `cheat` is that of a task's own cheat.
    `reason` explains why the task is not good, and begins with the cause if an output shows it."""

    name: str
    finding: Finding
    noop: float | None = None
    solution: float | None = None
    cheat: float | None = None
    reason: str = ""
    category: str = ""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result for every task of the source in order, then for the tasks that could not be read."""

    lines: tuple[TriedTask, ...]

    @property
    def bad(self) -> tuple[TriedTask, ...]:
        """The tasks that are not good."""
        return tuple(line for line in self.lines if line.finding not in (Finding.GOOD, Finding.READ))

    def to_json(self) -> dict[str, JSON]:
        """Return the report as JSON."""
        return {"tasks": [asdict(line) for line in self.lines], "good": len(self.lines) - len(self.bad)}


@dataclass(frozen=True, slots=True)
class _Played:
    """The result of one attempt. `error` begins with the cause, and `ended` describes how a solution failed to run."""

    reward: float | None
    error: str
    ran: bool
    labelled: bool = False
    ended: str = ""


async def try_tasks(
    environment: TerminalBenchEnvironment,
    pool: SlotPool,
    left_out: Sequence[LeftOut],
    progress: Callable[[TriedTask], None] = lambda line: None,
    limit: int | None = None,
) -> ImportReport:
    """Try at most `limit` tasks of an open environment. `left_out` are the tasks that the environment could not read;
    they are reported as refused."""
    tasks = [task async for _, task in numbered(environment.chosen_tasks(), 0, limit)]
    width = asyncio.Semaphore(os.cpu_count() or 1)

    async def try_task(task: Task, runs: PolicyRuns) -> TriedTask:
        async with width:
            line = await _try_task(task, runs)
            if line.finding is Finding.GOOD:
                line = await _try_cheat(line, task, environment, runs)
        progress(line)
        return line

    async with policy_runs(environment, pool) as runs, asyncio.TaskGroup() as group:
        tries = [group.create_task(try_task(task, runs)) for task in tasks]
    refused = [TriedTask(each.name, Finding.REFUSED, reason=each.reason) for each in left_out]
    for line in refused:
        progress(line)
    return ImportReport((*(each.result() for each in tries), *refused))


async def _try_task(task: Task, runs: PolicyRuns) -> TriedTask:
    line = TriedTask(task.id, Finding.GOOD, category=task.data.metadata.category)
    noop = await _play_policy(NoopPolicy(), task, runs)
    if not noop.ran:
        return replace(line, finding=Finding.REFUSED, reason=noop.error)
    line = replace(line, noop=noop.reward)
    if task.data.solution is None:
        if noop.reward is None:
            return replace(line, finding=Finding.VERIFIER_FAILS, reason=noop.error)
        return replace(line, finding=Finding.NOOP_PASSES if noop.reward >= FULL else Finding.UNPROVEN)
    solved = await _play_policy(OraclePolicy(), task, runs)
    line = replace(line, solution=solved.reward)
    if solved.reward is not None and solved.reward >= FULL:
        if noop.reward is None:
            return replace(line, finding=Finding.VERIFIER_FAILS, reason=noop.error)
        return replace(line, finding=Finding.NOOP_PASSES if noop.reward >= FULL else Finding.GOOD)
    if solved.reward is not None and not task.data.live:
        live = await _play_policy(OraclePolicy(), replace(task, data=replace(task.data, live=True)), runs)
        if live.reward is not None and live.reward >= FULL:
            reason = "it passes in the agent's own slot: add it to live_tasks, or set its metadata.grading, or the "
            reason += "column grading of its row, to 'live'"
            return replace(line, finding=Finding.NEEDS_LIVE, reason=reason)
    fails = Finding.VERIFIER_FAILS if solved.reward is None else Finding.SOLUTION_FAILS
    return replace(line, finding=fails, reason="\n".join(filter(None, [solved.ended, solved.error])))


async def _try_cheat(line: TriedTask, task: Task, environment: TerminalBenchEnvironment, runs: PolicyRuns) -> TriedTask:
    """Play the cheat of a task that is good otherwise. It may pass if a label says so: then a reader sees it."""
    try:
        steps = await environment.cheat_steps(task)
    except PalaestraError as error:
        return replace(line, finding=Finding.REFUSED, reason=f"cheat/solve.sh: {error}")
    if steps is None:
        return line
    played = await _play_policy(OraclePolicy(1), replace(task, solutions=(steps,)), runs)
    line = replace(line, cheat=played.reward)
    if played.reward is None:
        return replace(line, finding=Finding.VERIFIER_FAILS, reason=f"with cheat/solve.sh: {played.error}")
    if played.reward >= FULL and not played.labelled:
        return replace(line, finding=Finding.CHEAT_PASSES, reason="cheat/solve.sh gets the full reward, and no label")
    return line


async def _play_policy(policy: Policy, task: Task, runs: PolicyRuns) -> _Played:
    group = await runs.play(policy, task)
    if not group.trajectories:
        return _Played(None, _with_cause(group.error or "", group.error or ""), False)
    trajectory = group.trajectories[0]
    shows = (trajectory.difference, *(trajectory.detail.get(key) for key in ("output", WORK_BREAKS_CHECK)))
    error = trajectory.error or str(next(filter(None, shows), ""))
    shown = error[:800] if trajectory.error else error[-800:].strip()
    ended = _ended(trajectory)
    return _Played(
        trajectory.reward, shown if ended else _with_cause(error, shown), True, bool(trajectory.labels), ended
    )


def _with_cause(output: str, shown: str) -> str:
    """Return what is shown of an output, after a line with the cause of the failure if the output shows it."""
    cause = cause_of(output)
    return f"{cause}\n{shown}" if cause else shown


def _ended(trajectory: Trajectory) -> str:
    """Return in one line why a solution failed to run; empty if it ended well and its output shows no cause. The line
    begins with the cause."""
    outputs, status = [], 0
    for message in trajectory.messages:
        if message.get("role") != "tool":
            continue
        try:
            result = json.loads(str(message.get("content")))
            outputs.append(f"{result['output']}\n{result['error'] or ''}")
            status = result["exit_code"]
        except (ValueError, KeyError, TypeError):  # the result of another tool
            continue
    if status == _STILL_RUNS or trajectory.outcome is Outcome.BUDGET:
        return "out of time: the solution still ran when the agent's time was over"
    output = "\n".join(outputs).strip()
    how = f"the solution ended with exit code {status}"
    if cause := cause_of(output, status):
        return f"{cause} ({how})"
    return f"{how}: {output.splitlines()[-1][-300:] if output else 'it printed nothing'}" if status else ""


def read_tasks(source: str, settings: Sequence[str]) -> ImportReport:
    """List every task of a source with its services, and the reason for each one that is refused. Starts nothing.
    Raises `ConfigError` for an unknown setting or a source without tasks."""
    config = _config(source, settings)

    async def main() -> ImportReport:
        environment = TerminalBenchEnvironment(config)
        environment.choose(config.only_tasks)
        await environment.sort_out()
        choice = environment.choice and environment.choice.among([each.name for each in environment.items])
        lines = [
            TriedTask(each.name, Finding.READ, reason=_needs(each), category=each.metadata.category)
            for each in environment.items
            if choice is None or each.name in choice
        ]
        refused = [each for each in environment.left_out if isinstance(each, LeftOut)]
        return ImportReport((*lines, *(TriedTask(each.name, Finding.REFUSED, reason=each.reason) for each in refused)))

    return asyncio.run(main())


def _needs(task: TerminalTask) -> str:
    """Return what a task needs besides one slot and its verifier in it, and which of its settings are ignored."""
    others = [each.name for each in task.services if each.name != MAIN]
    parts = [step.verifier for step in task.steps] or [task.verifier]
    apart = any(each.environment is not None for each in parts)
    needs = [f"services {', '.join(others)}"] if others else []
    needs += ["a verifier of its own"] if apart else []
    needs += [f"{len(task.steps)} steps"] if task.steps else []
    needs += [f"ignored, because the format has no such keys: {', '.join(task.ignored[:5])}"] if task.ignored else []
    return "; ".join(needs)


def _config(source: str, settings: Sequence[str]) -> TerminalBench2EvalConfig:
    parsed = parse_settings(f"palaestra env import {source}", settings, env_type=TerminalBench2EvalConfig)
    assert isinstance(parsed.env_config, TerminalBench2EvalConfig)
    return parsed.env_config.model_copy(update={"dataset_name": source, "total_steps": -1})


def import_tasks(
    source: str, settings: Sequence[str], *, progress: Callable[[TriedTask], None] = lambda line: None
) -> ImportReport:
    """Try every task of a source. Raises `ConfigError` for an unknown setting or a source without tasks."""
    parsed = parse_settings(f"palaestra env import {source}", settings, env_type=TerminalBench2EvalConfig)
    assert isinstance(parsed.env_config, TerminalBench2EvalConfig)
    limit = serve_limit(parsed.env_config.total_steps, parsed.sources["env.total_steps"])
    config = parsed.env_config.model_copy(update={"dataset_name": source, "total_steps": -1})

    async def main() -> ImportReport:
        async with make_pool(config) as pool:
            environment = TerminalBenchEnvironment(config)
            environment.choose(config.only_tasks)
            await environment.sort_out()
            refused = [error for error in environment.left_out if isinstance(error, LeftOut)]
            if refused and not environment.items:
                return ImportReport(
                    tuple(TriedTask(each.name, Finding.REFUSED, reason=each.reason) for each in refused)
                )
            return await try_tasks(environment, pool, refused, progress, limit)

    return asyncio.run(main())


@click.command(
    "import",
    context_settings={
        "ignore_unknown_options": True,
    },
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--dry-run", is_flag=True, help="Only read the tasks: list their services, and why others are refused.")
@click.argument("source", metavar="DIR")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(context: click.Context, as_json: bool, dry_run: bool, source: str, settings: tuple[str, ...]) -> None:
    """Try every terminal task of a folder.

    \b
      palaestra env import tasks/
      palaestra env import tasks/ --dry-run
      palaestra env import tasks/ --env.image_dir roots/
      palaestra env import tasks/ --tasks 5 --json
      palaestra env import tasks.parquet --env.base_image debian-root/ --env.allow_network true

    A task is good if doing nothing fails, its reference solution passes, and its author's cheat (cheat/solve.sh, if
    there is one) fails or gets a label. DIR contains task directories of Harbor or
    Terminal-Bench 1; a JSONL or Parquet file of packed tasks also works. Settings of the environment terminalbench_2
    follow DIR. The exit code is 1 if a task is not good; each such task is listed with the reason.
    """
    if dry_run:
        report = read_tasks(source, settings)
    else:
        report = import_tasks(
            source, settings, progress=lambda line: click.echo(f"{line.name}: {line.finding.value}", err=True)
        )
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    elif dry_run:
        for line in report.lines:
            click.echo(f"{line.name:<32} {line.finding.value}{': ' + line.reason[:400] if line.reason else ''}")
    else:
        _show_report(report)
    context.exit(1 if report.bad else 0)


def _show_report(report: ImportReport) -> None:
    for line in report.lines:
        tried = (line.noop, line.solution, line.cheat)
        noop, solution, cheat = (" - " if reward is None else f"{reward:3g}" for reward in tried)
        click.echo(f"{line.name:<32} no-op {noop}   solution {solution}   cheat {cheat}   {line.finding.value}")
    for line in report.bad:
        reason = " ".join(line.reason.split())
        click.echo(f"{line.name}: {line.finding.value}{': ' + reason[:400] if reason else ''}")
    click.echo(f"{len(report.lines) - len(report.bad)} of {len(report.lines)} tasks are good")
    if report.bad:
        click.echo(
            f"to skip the tasks that are not good: --env.skip_tasks {','.join(line.name for line in report.bad)}"
        )
