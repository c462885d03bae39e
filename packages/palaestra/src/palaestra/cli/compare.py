"""`palaestra compare RUN OTHER…`: compare the rewards of runs of the same tasks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from palaestra.cli.completion import complete_runs
from palaestra_slots.core.exits import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from palaestra.rollouts.observe.compare_runs import RunComparison, RunScores
    from palaestra_slots.core.types import JSON

_SHOWN = 20
_SHOWN_SETTINGS = 15


@click.command(
    "compare",
    help="""Report which of several runs of the same tasks did better, and how certain that is.

    \b
      palaestra compare last last:2
      palaestra compare runs/my_env--NEW/… runs/my_env--OLD/… runs/my_env--OLDER/…
      palaestra compare RUN OTHER --json | jq .difference
      palaestra compare runs/set--NEW runs/set--OLD           # evaluation sets, run by run
      palaestra compare runs/set--NEW                         # the models of one evaluation set

    RUN is compared with each OTHER. Tasks are paired by their id, each with the mean reward of its rollouts; the
    difference is RUN minus OTHER, with the 95% interval of its mean over the tasks. No winner is named if the interval
    contains 0, if the runs do not have the same tasks and prompts, if different shares of their rollouts are scored, or
    if different versions of the environment's file scored them (`palaestra grade` gives all the present score).
    Unscored rollouts are left out; a second line counts them as 0 if that changes a task's reward. The models and the
    settings that differ are listed first. If a run has official verdicts, a further line compares these; with
    --by official, everything does.

    Of one evaluation set, the first model is compared with the others on each environment. Of several sets, the runs of
    the same environment and model are compared, or those of the same environment if each set has one run of it. With
    --json, `sets` has the comparisons.
    """,
)
@click.argument("run", shell_complete=complete_runs)
@click.argument("others", metavar="OTHER...", nargs=-1, shell_complete=complete_runs)
@click.option(
    "--by",
    type=click.Choice(["reward", "official"]),
    default="reward",
    show_default=True,
    help="Compare the rewards, or the benchmark's own verdicts (rewards where there is none).",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON with every task; further comparisons are in `others`."
)
def command(run: str, others: tuple[str, ...], by: str, as_json: bool) -> None:
    pairs = _runs_of_sets((run, *others))
    if pairs is None:
        found = _compare_runs((run, *others), by, as_json)
        if found is not None:
            click.echo(json.dumps(found, indent=2))
        return
    lines = [_compare_runs(each, by, as_json) for each in pairs]
    if as_json:
        click.echo(json.dumps({"sets": lines}, indent=2))


def _runs_of_sets(names: Sequence[str]) -> list[tuple[str, ...]] | None:
    """Return the runs to compare if the names are evaluation sets, as many in each tuple as there are sets; None if no
    name is a set."""
    from palaestra.envs.run.set_file import is_set, runs_by_model
    from palaestra.rollouts.journal.reader import find_run
    from palaestra_slots.core.errors import ConfigError

    folders = [find_run(each) for each in names]
    if len(folders) == 1:
        return _models_of(names[0], folders[0])
    if not any(map(is_set, folders)):
        return None
    for name, folder in zip(names, folders, strict=True):
        if not is_set(folder):
            raise ConfigError(
                f"{name} is not an evaluation set, so it cannot be compared with one; name a run of the set"
            )
    runs = [runs_by_model(folder) for folder in folders]
    if not (found := _partners(names, runs)):
        raise ConfigError(f"{' and '.join(names)} have no runs of the same environment")
    return found


def _models_of(name: str, folder: Path) -> list[tuple[str, ...]]:
    """Return for each environment of a set its runs, in the order of the models, if there are several. Raises
    `ConfigError` if none has several, or if this is the folder of a run."""
    from palaestra.envs.run.set_file import is_set, runs_by_model
    from palaestra_slots.core.errors import ConfigError

    if not is_set(folder):
        raise ConfigError(f"name the runs with which {name} is compared, or an evaluation set")
    found = dict[str, list[str]]()
    for (env, _), paths in runs_by_model(folder).items():
        found.setdefault(env, []).extend(map(str, paths))
    several = [tuple(paths) for paths in found.values() if len(paths) > 1]
    if not several:
        raise ConfigError(f"{name} has one run of each environment; name another set or run to compare with")
    return several


def _partners(names: Sequence[str], runs: Sequence[Mapping[tuple[str, str], Sequence[Path]]]) -> list[tuple[str, ...]]:
    """Return each run of the first set with those of the others that it is compared with, and name those without. A set
    may have several runs of an environment and a model, with different settings; these are paired in their order."""
    from palaestra.envs.run.set_file import not_one

    found = list[tuple[str, ...]]()
    for env, model in runs[0]:
        # With one model in each set, the models are what is compared, so they need not be the same.
        alone = all(sum(name == env for name, _ in each) == 1 for each in runs)
        partners = [_partner(each, env, None if alone else model) for each in runs]
        missing = [name for name, partner in zip(names, partners, strict=True) if not partner]
        if missing:
            click.echo(f"not compared: {env} with {model}, of which {' and '.join(missing)} has no run", err=True)
            continue
        if len({len(each) for each in partners}) > 1:
            name, several = max(zip(names, partners, strict=True), key=lambda each: len(each[1]))
            raise not_one(name, env, model, several)
        found += [tuple(map(str, each)) for each in zip(*partners, strict=True)]
    return found


def _partner(runs: Mapping[tuple[str, str], Sequence[Path]], env: str, model: str | None) -> Sequence[Path]:
    """Return the runs of an environment and a model, or of any model if that is None."""
    return next((paths for (name, its), paths in runs.items() if name == env and model in (its, None)), ())


def _compare_runs(names: Sequence[str], by: str, as_json: bool) -> dict[str, JSON] | None:
    """Compare the first run with the others. Print the result, or return it as JSON data."""
    from palaestra.rollouts.observe.compare_runs import differing_settings

    runs = [_scores(each) for each in names]
    # A run may have official verdicts beside its rewards. Then both are compared, because either can favour the other
    # run.
    judged = any(each.judged for each in runs) and by == "reward"
    runs = [each.by_official() for each in runs] if by == "official" else runs
    officials = [each.by_official() for each in runs] if judged else []
    found = [_compared(runs[0], other) for other in runs[1:]]
    settings = differing_settings(runs)
    if as_json:
        about: dict[str, JSON] = {"runs": [each.to_json() for each in runs], "settings": settings}
        return _as_json(found, officials, about)
    for each in runs:
        click.echo(each.line())
    _show_settings(settings)
    for number, (other, (scored, whole)) in enumerate(zip(runs[1:], found, strict=True), 1):
        _print_comparison(runs[0], other, scored, whole)
        if officials:
            _show_official(officials[0], officials[number])
    if len(found) > 1:
        click.echo(
            f"{len(found)} comparisons: on average, one 95% interval in 20 does not contain the true value", err=True
        )
    return None


def _compared(run: RunScores, other: RunScores) -> tuple[RunComparison, RunComparison]:
    """Compare the scored rollouts of two runs, and all rollouts with 0 for unscored ones."""
    from palaestra.rollouts.observe.compare_runs import compare
    from palaestra_slots.core.errors import ConfigError

    try:
        return compare(run, other), compare(run, other, unscored=0.0)
    except ValueError as error:
        raise ConfigError(f"{run.name} and {other.name} cannot be compared: {error}") from None


def _scores(run: str) -> RunScores:
    from palaestra.rollouts.journal.reader import open_recording
    from palaestra.rollouts.observe.compare_runs import RunScores
    from palaestra.rollouts.observe.status import RunReader

    recording = open_recording(run)
    meta = recording.meta
    scores = RunScores.of(recording, run, meta.env, meta.model, meta.config, recording.unfinished)
    status = RunReader(recording.path).read()
    scores.versions, scores.graded = status.score_versions, status.graded
    scores.filtered, scores.asked_again = status.filtered, status.asked_again
    return scores


def _as_json(
    found: Sequence[tuple[RunComparison, RunComparison]], officials: Sequence[RunScores], about: dict[str, JSON]
) -> dict[str, JSON]:
    from palaestra.rollouts.observe.compare_runs import compare

    first, *further = [_comparison_json(*pair) for pair in found]
    for line, other in zip((first, *further), officials[1:], strict=False):
        line["official"] = compare(officials[0], other).to_json()
    # The first comparison is at the top, because most reports have no other.
    return first | about | ({"others": further} if further else {})


def _comparison_json(scored: RunComparison, whole: RunComparison) -> dict[str, JSON]:
    with_unscored = {
        "difference": whole.difference,
        "low": whole.low,
        "high": whole.high,
        "tasks": len(whole.pairs),
    }
    return scored.to_json() | {"with_unscored": with_unscored}


def _show_settings(settings: dict[str, list[JSON]]) -> None:
    if settings:
        click.echo("settings that differ:")
    for name, values in list(settings.items())[:_SHOWN_SETTINGS]:
        click.echo(f"  {name}: {' | '.join(_short_json(value) for value in values)}")
    if len(settings) > _SHOWN_SETTINGS:
        click.echo(f"  and {len(settings) - _SHOWN_SETTINGS} more (--json)")


def _short_json(value: JSON) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _show_official(run: RunScores, other: RunScores) -> None:
    from palaestra.rollouts.observe.compare_runs import compare

    found = compare(run, other)
    best = run if found.winner > 0 else other
    verdict = f"no winner: {found.undecided}" if not found.winner else f"better: {best.name} ({best.model})"
    means = f"{run.mean:.3f} against {other.mean:.3f}"
    click.echo(f"by {run.scores}: {found.difference:+.3f}{found.interval}, {means}; {verdict} (--by official)")


def _print_comparison(run: RunScores, other: RunScores, found: RunComparison, whole: RunComparison) -> None:
    changed = sorted((pair for pair in found.pairs if pair.difference), key=lambda pair: -abs(pair.difference))
    click.echo(f"{run.name} against {other.name}:")
    for pair in sorted(changed[:_SHOWN], key=lambda pair: pair.difference):
        click.echo(f"{pair.difference:+8.3f}  {pair.first:.3f} against {pair.other:.3f}  {pair.task}")
    if len(changed) > _SHOWN:
        click.echo(f"          only the {_SHOWN} tasks that differ most are shown; {len(changed)} differ")
    counts = f"{plural(len(found.pairs), 'task')}: better on {found.better}, worse on {found.worse}"
    click.echo(f"{found.difference:+.3f}{found.interval} over {counts}")
    # A run can seem better because its failed rollouts are left out; this line shows the result if they count as 0.
    if whole.pairs != found.pairs:
        click.echo(
            f"{whole.difference:+.3f}{whole.interval} with unscored rollouts as 0, over "
            f"{plural(len(whole.pairs), 'task')}"
        )
    best = run if found.winner > 0 else other
    click.echo(f"no winner: {found.undecided}" if not found.winner else f"better: {best.name} ({best.model})")
    if found.asked_otherwise:
        click.echo(
            f"the prompt of {plural(len(found.asked_otherwise), 'task')} (the first is {found.asked_otherwise[0]}) is "
            f"different in {other.name}: the prompt changed, or the id belongs to a different task there",
            err=True,
        )
    for where, tasks in ((run, found.only_first), (other, found.only_other)):
        if tasks:
            click.echo(f"{plural(len(tasks), 'task')} with a reward only in {where.name}", err=True)
