"""`palaestra runs`: list the runs in this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from palaestra.cli.host_path import HostPath
from palaestra.core.exits import plural
from palaestra.core.types import JSON

if TYPE_CHECKING:
    from palaestra.rollouts.observe.status import RunStatus


@click.command(
    "runs",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""List the runs in this folder, the latest first.

    \b
      palaestra runs
      palaestra runs --limit 100 --json | jq -r '.[] | select(.state == "done") | .path'

    Each line shows the run's id, state, kind (run, eval, feed or batch), finished groups, mean reward (for a batch, the
    share of samples that are kept), scored and planned rollouts, environment and model. Other commands take the id, or
    its beginning, as RUN; `last` is the first run in this list, `last:2` the second. The list includes named
    batches (data/NAME).
    """,
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of runs to list."
)
@click.option(
    "--root",
    type=HostPath(exists=True, file_okay=False),
    help="The folder of the runs. [default: runs]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(limit: int, root: Path | None, as_json: bool) -> None:
    from palaestra.rollouts.journal.reader import JOURNAL_NAME, RUNS, list_runs
    from palaestra.rollouts.observe.status import RunReader, score_name
    from palaestra.rollouts.observe.verdicts import official_words

    folders = list_runs(root or RUNS)
    found = [(folder, RunReader(folder / JOURNAL_NAME).read()) for folder in folders[:limit]]
    if as_json:
        click.echo(json.dumps([_fields(*each) for each in found], indent=2))
        return
    for folder, status in found:
        mean = "-" if status.mean_reward is None else f"{status.mean_reward:.3f}"
        covered = f"{status.scored} of {status.planned} scored"
        covered += "" if status.official is None else f", {official_words(status.official_name)} {status.official:.3f}"
        counts = f"{plural(status.groups_ended, 'group'):>10}  {score_name(status.kind):>6} {mean:<5} ({covered})"
        click.echo(f"{folder.name:<21}  {status.state:<11} {status.kind:<5} {counts}  {status.env} with {status.model}")
    if not folders:
        click.echo(f"there are no runs in {(root or RUNS).resolve()}", err=True)
    elif len(folders) > limit:
        click.echo(f"not listed: {plural(len(folders) - limit, 'older run')} (--limit)", err=True)


def _fields(folder: Path, status: RunStatus) -> dict[str, JSON]:
    return {
        "id": folder.name,
        "path": str(folder),
        "state": status.state,
        "kind": status.kind,
        "groups": status.groups_ended,
        "rollouts": status.rollouts,
        "scored": status.scored,
        "planned": status.planned,
        "mean_reward": status.mean_reward,
        **({} if status.official is None else {"official": status.official}),
        "env": status.env,
        "model": status.model,
    }
