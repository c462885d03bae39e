"""`palaestra env`: the environments that can be run by name, and whether their scores can be trusted."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from palaestra.envs.cheats.proof import Proof
    from palaestra.suites.terminal_bench.import_tasks import ImportReport

_CONTEXT = {"help_option_names": ["-h", "--help"]}


@click.group(
    "env",
    context_settings=_CONTEXT,
    help="""Write, list and port environments, and prove that their scores mean what they say.

    \b
      palaestra env new my_words
      palaestra env list
      palaestra env show NAME
      palaestra env check NAME
      palaestra env import DIR
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
    from palaestra.envs.discovery import known_environments

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
    "new",
    context_settings=_CONTEXT,
    help="""Write a new environment: NAME_env.py, one file that runs as it is. It lies in the folder `environments`
    where there is one here, else here.

    \b
      palaestra env new my_words
      palaestra env new my_words --class
    """,
)
@click.option("--class", "as_class", is_flag=True, help="The class form, rather than a function.")
@click.argument("name")
def new(as_class: bool, name: str) -> None:
    from palaestra.envs.discovery import FOLDER
    from palaestra.envs.scaffold import write_environment

    path = write_environment(name, Path(FOLDER) if Path(FOLDER).is_dir() else Path(), as_class=as_class)
    click.echo(path)
    click.echo(f"next: palaestra run {path} --policy oracle; palaestra env check {path}", err=True)


@command.command(
    "show",
    context_settings=_CONTEXT,
    help="""Show what an environment is and the settings that are its own.

    \b
      palaestra env show swe_smith_oracle
      palaestra env show my_env.py --json
    """,
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.argument("environment", metavar="ENV")
def show(as_json: bool, environment: str) -> None:
    from palaestra.envs.describe import show_environment

    shown = show_environment(environment, Path.cwd())
    click.echo(json.dumps(shown.to_json(), indent=2) if as_json else shown.to_text())


@command.command(
    "port",
    context_settings=_CONTEXT,
    help="""Rewrite the imports of an environment script that was written for another runtime.

    \b
      palaestra env port their_env.py > my_env.py
      palaestra env port their_env.py --write

    Without --write the new text goes to standard output. What could not be rewritten is listed, and the exit code is 1.
    """,
)
@click.option("--write", is_flag=True, help="Change the file itself.")
@click.option("--json", "as_json", is_flag=True, help="What was done, machine-readable, rather than the text.")
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_context
def port(context: click.Context, write: bool, as_json: bool, file: Path) -> None:
    from palaestra.core.errors import ConfigError
    from palaestra.envs.port_script import port as ported_from

    try:
        source = file.read_text(encoding="utf-8")
        ported = ported_from(source, str(file))
        if write:
            file.write_text(ported.text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be ported: {error}") from None
    if as_json:
        click.echo(json.dumps({"names": ported.names, "left": [asdict(left) for left in ported.left]}, indent=2))
    elif not write:
        click.echo(ported.text, nl=False)
    click.echo(f"{file}: {len(ported.names)} names now come from palaestra: {', '.join(ported.names)}", err=True)
    for left in ported.left:
        click.echo(f"{file}:{left.line}: {left.what}: {left.advice}", err=True)
    context.exit(1 if ported.left else 0)


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
    from palaestra.envs.cheats.proof import check_environment

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
        shown.add_row(line.policy, line.what, rewards or "-", line.wanted, "ok" if line.ok else "FAILED")
    Console(width=None if sys.stdout.isatty() else 130).print(shown)
    paid = [line.policy for line in proof.lines if not line.ok]
    click.echo(f"{len(proof.lines)} policies, {len(paid)} not as they must be{': ' + ', '.join(paid) if paid else ''}")
    if not proof.proven:
        click.echo("unproven: the tasks have no solution for the oracle to play")


@command.command(
    "import",
    context_settings={**_CONTEXT, "ignore_unknown_options": True, "allow_interspersed_args": False},
    help="""Try every task of a folder: doing nothing must fail, and the reference solution must pass.

    \b
      palaestra env import tasks/
      palaestra env import tasks/ --env.image_dir roots/
      palaestra env import --json tasks.parquet --env.base_image debian-root/ --env.allow_network true

    DIR holds task directories of Harbor or Terminal-Bench 1; a JSONL or Parquet file of packed ones serves, too. After
    it come settings of the environment terminalbench_2. Exit code 1 when a task is not good; each is named with what is
    wrong.
    """,
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.argument("source", metavar="DIR")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def import_folder(context: click.Context, as_json: bool, source: str, settings: tuple[str, ...]) -> None:
    from palaestra.suites.terminal_bench.import_tasks import import_tasks

    report = import_tasks(
        source, settings, progress=lambda line: click.echo(f"{line.name}: {line.finding.value}", err=True)
    )
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _show_report(report)
    context.exit(1 if report.bad else 0)


def _show_report(report: ImportReport) -> None:
    for line in report.lines:
        rewards = [" - " if reward is None else f"{reward:3g}" for reward in (line.noop, line.solution)]
        click.echo(f"{line.name:<32} no-op {rewards[0]}   solution {rewards[1]}   {line.finding.value}")
    for line in report.bad:
        reason = " ".join(line.reason.split())
        click.echo(f"{line.name}: {line.finding.value}{': ' + reason[:400] if reason else ''}")
    click.echo(f"{len(report.lines) - len(report.bad)} of {len(report.lines)} tasks are good")
    if report.bad:
        click.echo(f"without the others: --env.skip_tasks {','.join(line.name for line in report.bad)}")
