"""`palaestra env list`: the environments that can be run by name."""

from __future__ import annotations

import json
from pathlib import Path

import click

_CONTEXT = {"help_option_names": ["-h", "--help"]}


@click.group(
    "env",
    context_settings=_CONTEXT,
    help="""List environments.

    \b
      palaestra env list
      palaestra run NAME --policy oracle
    """,
)
def command() -> None:
    pass


@command.command(
    "list",
    context_settings=_CONTEXT,
    help="""List the environments of the nearest `environments` folder.

    \b
      palaestra env list
      palaestra env list --json
    """,
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def list_environments(as_json: bool) -> None:
    from palaestra.envs.catalog import known_environments

    found = known_environments(Path.cwd())
    if as_json:
        rows = [{"name": each.name, "path": str(each.path), "summary": each.summary} for each in found.values()]
        click.echo(json.dumps(rows, indent=2))
        return
    for each in found.values():
        click.echo(f"{each.name:<22} {each.summary}")
    if not found:
        click.echo("no `environments` folder here or above; run a file by its path: palaestra run my_env.py", err=True)
