"""`palaestra grade RUN`: score the recorded work of runs again, without an agent."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from palaestra.cli.completion import complete_runs
from palaestra_slots.core.exits import plural

if TYPE_CHECKING:
    from palaestra.envs.run.regrade import Regraded
    from palaestra.rollouts.finished_run import Run
    from palaestra_slots.core.types import JSON

_NAMED = 10


@click.command(
    "grade",
    context_settings={"ignore_unknown_options": True},
    help="""Score the recorded work of runs again, with the environment's current code and without an agent.

    \b
      palaestra run my_env.py --keep-workspaces --base-url URL --model NAME
      palaestra grade last                         # after you change the scoring in my_env.py
      palaestra grade RUN --environment other_env.py:NAME --json
      palaestra grade RUN --env.reward official    # pay the benchmark's own verdict
      palaestra grade runs/set--…                  # all runs of an evaluation set

    RUN is a run's folder, an id or the beginning of one, `last`, or a folder of runs. A score that reads the sandbox
    needs the kept workspaces (`palaestra run ENV --keep-workspaces`, which sets --env.save_workspaces). Without them, a
    run keeps only the work of rollouts whose check failed, until this command has scored it. A score without a
    `sandbox` parameter needs no workspace.

    The command lists the rollouts whose reward or official verdict changed and those that pass or fail now, and prints
    the old and the new means. The new scores go to grades.jsonl in the run's folder when the last rollout is graded, so
    an interrupted command changes no score. All other commands then use them; the journal keeps the recorded ones. A
    rollout that cannot be graded keeps its score, and the exit code is then 1. Settings are those of the run, unless
    --env.NAME after RUN replaces them.
    """,
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=complete_runs)
@click.option(
    "--environment", "--env", "environment", metavar="FILE.py:NAME", help="The environment's file, if it has moved."
)
@click.option("--network", is_flag=True, help="Give the checks the network access that their tasks request.")
@click.option("--json", "as_json", is_flag=True, help="Print every rollout as one line of JSON.")
@click.pass_context
def command(
    context: click.Context, runs: tuple[str, ...], environment: str | None, network: bool, as_json: bool
) -> None:
    from palaestra.envs.run.set_file import find_runs
    from palaestra.rollouts.finished_run import Run
    from palaestra.rollouts.journal.reader import run_name
    from palaestra_slots.core.errors import ConfigError

    names, settings = _runs_and_settings(runs)
    folders = find_runs(names)
    codes = []
    for folder in folders:
        if len(folders) == 1:
            context.exit(_grade_run(Run(folder), environment, settings, network=network, as_json=as_json))
        click.echo(f"{folder}:", err=True)
        try:
            name = f"{run_name(folder)} "
            codes.append(_grade_run(Run(folder), environment, settings, network=network, as_json=as_json, name=name))
        except ConfigError as error:
            codes.append(error.exit_code)
            click.echo(f"not graded: {error}", err=True)
    context.exit(max(codes))


def _runs_and_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of the runs, and the settings after them. Raises `ConfigError`."""
    from palaestra.envs.config.command_line import first_word, flags_of, is_flag
    from palaestra_slots.core.errors import ConfigError

    named, rest = first_word(words, "RUN")
    names = [named, *itertools.takewhile(lambda word: not is_flag(word), rest)]
    settings = rest[len(names) - 1 :]
    for flag, *_ in flags_of(settings):
        if not flag.startswith("--env."):
            known = "--environment, --network, --json and settings of the environment, --env.NAME"
            raise ConfigError(f"unknown option {flag}: palaestra grade has {known}")
    return names, settings


def _grade_run(
    run: Run, environment: str | None, settings: Sequence[str], *, network: bool, as_json: bool, name: str = ""
) -> int:
    """Grade one run, print what changed, and return the exit code. If there are several runs, each line begins with the
    `name` of the run."""
    from palaestra.envs.run.regrade import regrade
    from palaestra_slots.core.errors import ConfigError

    def show(regraded: Regraded) -> None:
        if as_json:
            click.echo(json.dumps(({"run": name.strip()} if name else {}) | _fields(regraded)))
        elif regraded.changed or regraded.score is None:
            click.echo(f"{name}{_regraded_line(regraded)}")

    changed = _changed_settings(run, environment, settings) if settings else {}
    found = asyncio.run(regrade(run, environment, network=network, settings=changed, on_rollout=show))
    if not found:
        raise ConfigError(
            f"{run.path} has no rollout to grade: no finished group has a rollout whose outcome is scored"
        )
    for line in _graded_lines(run, found):
        click.echo(line, err=True)
    return 1 if any(each.score is None for each in found) else 0


def _changed_settings(run: Run, environment: str | None, settings: Sequence[str]) -> dict[str, JSON]:
    """Return the settings that the words set. Raises `ConfigError`."""
    from palaestra.envs.config.command_line import Parsed, flags_of, setting_of
    from palaestra.envs.run.command import command_line
    from palaestra.envs.run.replay_run import recorded_form
    from palaestra_slots.core.config import find_setting
    from palaestra_slots.core.errors import ConfigError

    line = command_line(recorded_form(run.recording, environment), "palaestra grade", "process", argv=settings)
    parsed = line.parse(settings, {}, {}, run.recording.meta.config)
    assert isinstance(parsed, Parsed)  # no flag asks for help
    config = parsed.env_config
    found: dict[str, JSON] = {}
    for flag, *_ in flags_of(settings):
        name = setting_of(flag.partition("=")[0]).removeprefix("env.")
        if find_setting(type(config), name) is None:  # an old name, which stands for several settings
            raise ConfigError(f"{flag} is not a setting of {run.recording.meta.env} any more")
        found[name] = getattr(config, name)
    return found


def _graded_lines(run: Run, found: Sequence[Regraded]) -> Iterator[str]:
    yield from _flipped(found)
    yield _means(run)
    if (judges := _judges(found)) is not None:
        yield judges
    graded, changed = sum(each.score is not None for each in found), sum(each.changed for each in found)
    yield f"{graded} of {plural(len(found), 'rollout')} graded, {changed} with a different reward"
    reasons = [each.error for each in found if each.score is None]
    if reasons:
        yield f"the earlier score of {plural(len(reasons), 'rollout')} still counts, first reason: {reasons[0]}"


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
    """Return the mean reward and pass@1 of the run before and after, and the number of tasks with a score."""
    from palaestra.envs.run.run_table import figures_of
    from palaestra.rollouts.finished_run import Run
    from palaestra.rollouts.observe.intervals import in_words, interval_of

    (old, tasks), (new, _) = figures_of(run, run), figures_of(run, Run(run.path))

    def figure(found: Mapping[str, JSON], name: str) -> str:
        if name not in found:
            return "none"
        return f"{found[name]:.3f}{in_words(interval_of(found, name))}"

    names = {"mean_reward": "mean reward", "pass@1": "pass@1"}
    parts = [f"{title} {figure(old, name)} -> {figure(new, name)}" for name, title in names.items()]
    before, after = (int(found.get("pass@1/tasks", 0)) for found in (old, new))
    scored = "" if before == after == len(tasks) else f"{after} of " if before == after else f"{before} -> {after} of "
    return f"{', '.join(parts)} over {scored}{plural(len(tasks), 'task')}"


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


def _regraded_line(regraded: Regraded) -> str:
    before, score = regraded.trajectory, regraded.score
    was = "unscored" if before.reward is None else f"{before.reward:g}"
    if score is None:
        return f"{before.rollout_id}: {was}, not graded: {regraded.error}"
    now = f"{score.reward:g}"
    if score.official is not None or before.official is not None:
        was += f" (official {before.official_reward:g})"
        now += f" (official {score.reward if score.official is None else score.official:g})"
        now += "".join(f", {label.name}" for label in score.labels)
    return f"{before.rollout_id}: {was} -> {now}"
