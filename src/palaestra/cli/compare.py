"""`palaestra compare RUN OTHER`: two runs of the same tasks beside each other."""

from __future__ import annotations

import json

import click

_SHOWN = 20


@click.command(
    "compare",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Say which of two runs of the same tasks did better, and how sure that is.

    \b
      palaestra compare runs/my_env--NEW/… runs/my_env--OLD/…
      palaestra compare RUN OTHER --json | jq .difference

    Tasks are paired by their id, each with the mean reward of its rollouts; the difference is RUN minus OTHER, with the
    95 % interval of its mean over the tasks. If the interval contains 0, these tasks do not show a difference.
    Rollouts that infrastructure failures ended are left out; if there are any, a second line counts them as 0.
    """,
)
@click.argument("run")
@click.argument("other")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, with every task.")
def command(run: str, other: str, as_json: bool) -> None:
    from palaestra.core.errors import ConfigError
    from palaestra.rollouts.journal.reader import open_recording
    from palaestra.rollouts.observe.compare_runs import compare

    first, second = open_recording(run), open_recording(other)
    try:
        found = compare(first, second)
        whole = compare(first, second, unscored=0.0)
    except ValueError as error:
        raise ConfigError(f"{run} and {other} cannot be compared: {error}") from None
    if as_json:
        beside = {"difference": whole.difference, "low": whole.low, "high": whole.high, "tasks": len(whole.pairs)}
        click.echo(json.dumps(found.to_json() | {"with_unscored": beside}, indent=2))
        return
    changed = sorted((pair for pair in found.pairs if pair.difference), key=lambda pair: -abs(pair.difference))
    for pair in sorted(changed[:_SHOWN], key=lambda pair: pair.difference):
        click.echo(f"{pair.difference:+8.3f}  {pair.first:.3f} against {pair.other:.3f}  {pair.task}")
    if len(changed) > _SHOWN:
        click.echo(f"          the {_SHOWN} tasks that differ most are shown, of {len(changed)}")
    counts = f"{len(found.pairs)} tasks: better on {found.better}, worse on {found.worse}"
    click.echo(f"{found.difference:+.3f}{found.interval} over {counts}")
    if whole.pairs != found.pairs:
        click.echo(f"{whole.difference:+.3f}{whole.interval} with the unscored as 0, over {len(whole.pairs)} tasks")
    if found.asked_otherwise:
        click.echo(
            f"{len(found.asked_otherwise)} of these tasks, {found.asked_otherwise[0]} first, asked something else in "
            f"{other}: the prompt is another there, or the id (the number of an item, say) names another task",
            err=True,
        )
    for where, tasks in ((run, found.only_first), (other, found.only_other)):
        if tasks:
            click.echo(f"{len(tasks)} tasks have a reward only in {where}", err=True)
