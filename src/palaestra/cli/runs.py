"""`palaestra runs`: the runs of this folder."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(
    "runs",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""List the runs of this folder, the latest first.

    \b
      palaestra runs
      palaestra runs --limit 100 --json | jq -r '.[] | select(.state == "done") | .path'

    Each line has the run's id, its state, finished groups, mean reward, the rollouts that have a reward of those that
    were planned, environment and model. Other commands take the id, or its beginning, as RUN; `last` is the first run
    of this list, `last:2` the second.
    """,
)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many, at most.")
@click.option("--root", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Their folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(limit: int, root: Path, as_json: bool) -> None:
    from palaestra.rollouts.journal.reader import JOURNAL_NAME, list_runs
    from palaestra.rollouts.observe.status import RunReader

    folders = list_runs(root)
    rows = []
    for folder in folders[:limit]:
        status = RunReader(folder / JOURNAL_NAME).read()
        rows.append(
            {
                "id": folder.name,
                "path": str(folder),
                "state": status.state,
                "groups": status.groups_ended,
                "rollouts": status.rollouts,
                "scored": status.scored,
                "planned": status.planned,
                "mean_reward": status.mean_reward,
                "env": status.env,
                "model": status.model,
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        reward = "-" if row["mean_reward"] is None else f"{row['mean_reward']:.3f}"
        covered = f"{row['scored']} of {row['planned']} scored"
        counts = f"{row['groups']:>6} groups  reward {reward:<6} ({covered})"
        click.echo(f"{row['id']}  {row['state']:<11} {counts}  {row['env']} with {row['model']}")
    if not folders:
        click.echo(f"there are no runs in {root.resolve()}", err=True)
    elif len(folders) > limit:
        click.echo(f"{len(folders) - limit} older runs are not listed (--limit)", err=True)
