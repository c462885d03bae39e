"""`palaestra env`: the environments that can be run by name, and whether their scores can be trusted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from palaestra.envs.cheats.check import Proof

_CONTEXT = {"help_option_names": ["-h", "--help"]}


@click.group(
    "env",
    context_settings=_CONTEXT,
    help="""List environments, and prove that their scores mean what they say.

    \b
      palaestra env list
      palaestra env check NAME
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


@command.command(
    "check",
    context_settings={**_CONTEXT, "ignore_unknown_options": True, "allow_interspersed_args": False},
    help="""Prove an environment: the oracle scores full, doing nothing and every known cheat score nothing.

    \b
      palaestra env check environments/count_lines_env.py
      palaestra env check --tasks 3 swe_smith_oracle
      palaestra env check --only conftest-skip --only git-parent my_env.py --env.n 20

    Every policy plays the same tasks through the real loop, slots and grading. After ENV come settings of the
    environment. Exit code 1 when a cheat was paid, or the oracle was not.
    """,
)
@click.option("--tasks", type=click.IntRange(min=1), default=1, show_default=True, help="Tasks to play.")
@click.option("--only", multiple=True, metavar="CHEAT", help="Only this cheat; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.argument("environment", metavar="ENV")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def check(
    context: click.Context,
    tasks: int,
    only: tuple[str, ...],
    as_json: bool,
    environment: str,
    settings: tuple[str, ...],
) -> None:
    from palaestra.envs.cheats.command import check_environment

    proof = check_environment(environment, settings, tasks=tasks, only=only, quiet=as_json)
    if as_json:
        click.echo(json.dumps(proof.to_json(), indent=2))
    else:
        _show_proof(proof)
    context.exit(0 if proof.holds else 1)


def _show_proof(proof: Proof) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"{proof.environment}: {', '.join(proof.tasks)}")
    for column in ("policy", "what it does", "reward", "must be", ""):
        shown.add_column(column)
    for line in proof.lines:
        rewards = " ".join("unscored" if reward is None else f"{reward:g}" for reward in line.rewards)
        shown.add_row(line.policy, line.what, rewards or "-", line.wanted, "ok" if line.ok else "PAID")
    Console(width=None if sys.stdout.isatty() else 130).print(shown)
    paid = [line.policy for line in proof.lines if not line.ok]
    click.echo(f"{len(proof.lines)} policies, {len(paid)} not as they must be{': ' + ', '.join(paid) if paid else ''}")
    if not proof.proven:
        click.echo("unproven: the tasks have no solution for the oracle to play")
