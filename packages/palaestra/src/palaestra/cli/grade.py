"""`palaestra grade RUN`: score the kept workspaces of a run again, without an agent."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from palaestra.cli.completion import complete_runs
from palaestra_slots.core.exits import plural

if TYPE_CHECKING:
    from palaestra.envs.run.regrade import Regraded
    from palaestra.rollouts.finished_run import Run
    from palaestra.rollouts.regraded import Grade
    from palaestra_slots.core.types import JSON

_NAMED = 10


@click.command(
    "grade",
    help="""Score the kept workspaces of a run again, with the environment's current code and without an agent.

    \b
      palaestra run my_env.py --keep-workspaces --base-url URL --model NAME
      palaestra grade last                         # after you change the scoring in my_env.py
      palaestra grade RUN --environment other_env.py:NAME --json
      palaestra grade RUN --env.reward official    # pay the benchmark's own verdict

    RUN is a run's folder, an id or the beginning of one, or `last`. The run must have kept its workspaces (`palaestra
    run ENV --keep-workspaces`, which sets --env.save_workspaces). Without that, a run keeps only the work of rollouts
    whose check failed, until this command has scored it. The command lists the rollouts whose reward or official
    verdict changed and those that pass or fail now, prints the old and the new means, and appends the new rewards to
    grades.jsonl in the run's folder, so `palaestra view` shows both. The journal does not change. Settings are those of
    the run, unless an option replaces them. The exit code is 1 if a check failed.
    """,
)
@click.argument("run", shell_complete=complete_runs)
@click.option(
    "--environment", "--env", "environment", metavar="FILE.py:NAME", help="The environment's file, if it has moved."
)
@click.option(
    "--env.reward", "reward", type=click.Choice(["official", "guarded", "strict"]), help="How a score becomes a reward."
)
@click.option("--env.strict_labels", "strict_labels", metavar="NAMES", help="The labels that `strict` does not accept.")
@click.option(
    "--env.graded_paths", "graded_paths", metavar="PATHS", help="Further paths that checks show as the agent left them."
)
@click.option(
    "--env.graded_programs", "graded_programs", metavar="NAMES", help="Programs there that an agent may replace."
)
@click.option("--network", is_flag=True, help="Give the checks the network access that their tasks request.")
@click.option("--json", "as_json", is_flag=True, help="Print every rollout as one line of JSON.")
@click.pass_context
def command(
    context: click.Context,
    run: str,
    environment: str | None,
    reward: str | None,
    strict_labels: str | None,
    graded_paths: str | None,
    graded_programs: str | None,
    network: bool,
    as_json: bool,
) -> None:
    from palaestra.envs.run.regrade import grade_run
    from palaestra.rollouts.finished_run import open_run
    from palaestra.rollouts.regraded import write_grade
    from palaestra_slots.core.errors import ConfigError, DiskError

    lists = {"strict_labels": strict_labels, "graded_paths": graded_paths, "graded_programs": graded_programs}
    settings: dict[str, JSON] = {} if reward is None else {"reward": reward}
    settings |= {name: words.split(",") for name, words in lists.items() if words is not None}

    opened, unwritten = open_run(run), list[str]()

    async def grade() -> list[Regraded]:
        found = []
        async for regraded in grade_run(opened, environment, network=network, settings=settings):
            # Each is written when it is known, so that an interrupted command keeps what it has graded.
            found.append(regraded)
            try:
                write_grade(opened.path, _grade(regraded))
            except (ConfigError, DiskError) as error:  # the run of somebody else, for example
                unwritten.append(str(error))
            else:
                # Only now: without the new reward on the disk, another attempt needs this workspace again.
                if regraded.only_until_scored is not None:
                    await asyncio.to_thread(shutil.rmtree, regraded.only_until_scored, ignore_errors=True)
            if as_json:
                click.echo(json.dumps(_fields(regraded)))
            elif regraded.changed or regraded.score is None:
                click.echo(_line(regraded))
        return found

    found = asyncio.run(grade())
    if not found:
        raise ConfigError(f"{run} has no rollout to grade: no finished group has a rollout whose outcome is scored")
    for line in _graded_lines(opened, found, unwritten):
        click.echo(line, err=True)
    context.exit(1 if any(each.score is None for each in found) else 0)


def _graded_lines(run: Run, found: Sequence[Regraded], unwritten: Sequence[str]) -> Iterator[str]:
    if unwritten:
        yield f"note: the new rewards are not kept: {unwritten[0]}"
    yield from _flipped(found)
    if not unwritten:
        yield _means(run)
    if (judges := _judges(found)) is not None:
        yield judges
    failed, changed = sum(each.score is None for each in found), sum(each.changed for each in found)
    yield f"{plural(len(found), 'rollout')} graded, {changed} with a different reward, {failed} failed"


def _judges(found: Sequence[Regraded]) -> str | None:
    """Return how many questions models were asked, and what that cost; None if the scores ask no model."""
    from palaestra.rollouts.records import KNOWN_REPLIES, MODEL_CALLS, MODEL_COST

    metrics = [each.score.metrics for each in found if each.score is not None]
    names = (MODEL_CALLS, KNOWN_REPLIES, MODEL_COST)
    asked, known, cost = (sum(each.get(name, 0.0) for each in metrics) for name in names)
    if not asked and not known:
        return None
    price = f", cost {cost:.4f}" if cost else ""
    return f"judges: {plural(round(asked), 'question')} asked{price}, {round(known)} answered from the run's recording"


def _flipped(found: Sequence[Regraded]) -> Iterator[str]:
    """Yield the names of the rollouts that pass now and did not before, and the reverse."""
    from palaestra.rollouts.observe.metrics import PASSED

    # A rollout without an earlier reward counts as failed, so that its first passing score is shown.
    pairs = [(each.trajectory, (each.trajectory.reward or 0.0) >= PASSED, each.score) for each in found]
    for verdict, passes in (("pass", True), ("fail", False)):
        names = [
            was.rollout_id
            for was, passed, score in pairs
            if score is not None and passed != passes and (score.reward >= PASSED) == passes
        ]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            yield f"now {verdict}: {', '.join(names[:_NAMED])}{more}"


def _means(run: Run) -> str:
    """Return the mean reward and pass@1 of the run, as recorded and with the new scores."""
    from palaestra.envs.run.run_table import figures_of
    from palaestra.rollouts.observe.intervals import in_words

    (old, tasks), (new, _) = figures_of(run, run), figures_of(run, run.graded_groups())

    def figure(found: Mapping[str, JSON], name: str) -> str:
        if name not in found:
            return "none"
        interval = (found[f"{name}/low"], found[f"{name}/high"]) if f"{name}/low" in found else None
        return f"{found[name]:.3f}{in_words(interval)}"

    names = {"mean_reward": "mean reward", "pass@1": "pass@1"}
    parts = [f"{title} {figure(old, name)} -> {figure(new, name)}" for name, title in names.items()]
    return f"{', '.join(parts)} over {plural(len(tasks), 'task')}"


def _grade(regraded: Regraded) -> Grade:
    from palaestra.rollouts.regraded import GRADE_SCHEMA, Grade

    score = regraded.score
    return Grade(
        schema=GRADE_SCHEMA,
        at=time.time(),
        rollout_id=regraded.trajectory.rollout_id,
        before=regraded.trajectory.reward,
        reward=None if score is None else score.reward,
        official=None if score is None else score.official,
        labels=[] if score is None else list(score.labels),
        metrics={} if score is None else dict(score.metrics),
        error=regraded.error,
    )


def _fields(regraded: Regraded) -> dict[str, object]:
    from palaestra.rollouts.records import verdict_fields

    score = regraded.score
    return {
        "rollout_id": regraded.trajectory.rollout_id,
        "task_id": regraded.trajectory.task_id,
        "reward_before": regraded.trajectory.reward,
        "reward": score.reward if score is not None else None,
        "metrics": dict(score.metrics) if score is not None else {},
        "error": regraded.error,
        **verdict_fields(score),
    }


def _line(regraded: Regraded) -> str:
    before, score = regraded.trajectory, regraded.score
    was = "unscored" if before.reward is None else f"{before.reward:g}"
    now = regraded.error if score is None else f"{score.reward:g}"
    if score is not None and (score.official is not None or before.official is not None):
        was += f" (official {before.official_reward:g})"
        now += f" (official {score.reward if score.official is None else score.official:g})"
        now += "".join(f", {label.name}" for label in score.labels)
    return f"{before.rollout_id}: {was} -> {now}"
