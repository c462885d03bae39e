"""`palaestra env`: list, write, show and port environments, and prove that their scores can be trusted."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from palaestra.cli.completion import (
    SettingsCommand,
    complete_cheats,
    complete_environments,
    complete_settings,
)
from palaestra.cli.plugin_group import PluginGroup
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.io import plugins
from palaestra_slots.core.printable import printable
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from palaestra.envs.cheats.proof import PolicyResult, Proof

_TRAINED_WITH = ("group_size", "max_agent_turns", "max_token_length", "max_num_workers", "seed")
"""Common settings that users tune for a training run."""

_NAMED = 5
"""The maximum number of failed policies that the last line of a check names."""


class _EnvGroup(PluginGroup):
    prefix = "env"


@click.group("env", cls=_EnvGroup)
def command() -> None:
    """Write, list, show and port environments, and prove that their scores are right.

    \b
      palaestra env new my_words
      palaestra env list
      palaestra env show NAME
      palaestra env check NAME
      palaestra env import DIR
      palaestra run NAME --policy oracle
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_environments(as_json: bool) -> None:
    """List the environments that can be run by name.

    \b
      palaestra env list
      palaestra env list --json

    The list has the files NAME_env.py in the nearest folder `environments`, and the environments of installed packages.
    """
    from palaestra.envs.discovery import known_environments

    found = known_environments(Path.cwd()).values()
    if as_json:
        rows = [
            {"name": each.name, "path": each.path and str(each.path), "origin": each.origin, "summary": each.summary}
            for each in found
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    for each in found:
        click.echo(f"{each.name:<22} {each.summary}")


@command.command("new")
@click.option("--class", "as_class", is_flag=True, help="Write a class instead of a function.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("name")
def new(as_class: bool, as_json: bool, name: str) -> None:
    """Write a new environment, NAME_env.py, in a single file that you can run immediately.

    \b
      palaestra env new my_words
      palaestra env new my_words --class

    The file is written to ./environments if that folder exists, otherwise to the current folder.
    """
    from palaestra.envs.discovery import FOLDER
    from palaestra.envs.scaffold import write_environment

    path = write_environment(name, Path(FOLDER) if Path(FOLDER).is_dir() else Path(), as_class=as_class)
    click.echo(json.dumps({"path": str(path), "form": "class" if as_class else "function"}) if as_json else path)
    click.echo(f"next: palaestra run {path} --policy oracle; palaestra env check {path}", err=True)


@command.command("show")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--example-config", is_flag=True, help="Print the example configuration file, for --config.")
@click.argument("environment", metavar="ENV", shell_complete=complete_environments)
def show(as_json: bool, example_config: bool, environment: str) -> None:
    """Show an environment and its own settings.

    \b
      palaestra env show swe_smith_oracle
      palaestra env show my_env.py --json
      palaestra env show swe_smith_oracle --example-config > swe.yaml
    """
    if example_config:
        click.echo(_example_config(environment), nl=False)
        return
    about = _about(environment)
    if as_json:
        click.echo(json.dumps(about, indent=2))
        return
    settings = about["settings"]
    width = max((len(setting["name"]) for setting in settings), default=0)
    click.echo(f"{about['name']} ({about['form']})\n\n{about['about'] or '(no docstring)'}\n")
    for each in settings:
        click.echo(f"  --env.{each['name']:<{width}}  {each['value']!r}  {each['about']}".rstrip())
    if not settings:
        click.echo("  no settings of its own")


def _example_config(name: str) -> str:
    from palaestra.envs.discovery import known_environments

    known = known_environments(Path.cwd()).get(name)
    path = known.example_config if known is not None else None
    if path is None:
        raise ConfigError(f"{name} has no example configuration: there is no {name}.yaml next to its file")
    return path.read_text(encoding="utf-8")


def _more_settings() -> dict[str, Mapping[str, FieldInfo]]:
    """Return the settings that extensions add to a run's, such as those of a training run."""
    points = plugins.installed("palaestra.settings").items()
    return {name: cast("type[BaseModel]", plugins.load(point)).model_fields for name, point in points}


def _about(reference: str) -> dict[str, JSON]:
    """Return the data of `env show`: the environment's name, form and docstring. `settings` has the settings that only
    this environment has, and common settings whose defaults it changes. `training` has the settings of a training run,
    and `rollouts` the settings of runs that users tune for training."""
    from palaestra.envs.config.command_line import set_fields
    from palaestra.envs.config.dotenv import exported, read_keys
    from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
    from palaestra.envs.discovery import load_environment

    with exported(read_keys(Path.cwd())):
        form = load_environment(reference, Path.cwd())
        config, _ = form.defaults()
    common = {**BaseEnvConfig.model_fields, **HermesAgentEnvConfig.model_fields}
    changed = set_fields(config) if config is not None else {}
    fields = form.config_type().model_fields

    def row(name: str, field: FieldInfo, values: Mapping[str, JSON] = changed) -> dict[str, JSON]:
        value = values.get(name, field.get_default(call_default_factory=True))
        return {"name": name, "value": value, "about": field.description or ""}

    return {
        "name": form.name,
        "form": form.kind,
        "about": form.about,
        "settings": [row(name, field) for name, field in fields.items() if name not in common or name in changed],
        "rollouts": [row(name, fields[name]) for name in _TRAINED_WITH if name in fields],
        **{part: [row(name, field, {}) for name, field in more.items()] for part, more in _more_settings().items()},
    }


@command.command("check", cls=SettingsCommand, context_settings={"ignore_unknown_options": True})
@click.option("--tasks", type=click.IntRange(min=1), default=1, show_default=True, help="Number of tasks to play.")
@click.option(
    "--only", multiple=True, metavar="CHEAT", help="Play only this cheat. Repeatable.", shell_complete=complete_cheats
)
@click.option("--all", "everything", is_flag=True, help="List every cheat, not only those that failed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("environment", metavar="ENV", shell_complete=complete_environments)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_settings)
@click.pass_context
def check(
    context: click.Context,
    tasks: int,
    only: tuple[str, ...],
    everything: bool,
    as_json: bool,
    environment: str,
    settings: tuple[str, ...],
) -> None:
    """Prove that reference solutions get the full score, and that doing nothing and every known cheat score 0.

    \b
      palaestra env check my_env.py
      palaestra env check swe_smith_oracle --tasks 3
      palaestra env check my_env.py --only conftest-skip --only git-parent --env.n 20

    Every policy plays the same tasks with the real loop, slots and grading. If a task sets a floor, doing nothing and
    cheats may score up to it. Cheats that attack tests are played over the reference solution with wrong results. A
    cheat that could not decide anything is reported as not tested, with the reason. Cheats are played with the agent's
    tool that runs commands, also if it is the environment's own; a cheat that the tool does not accept fails the check.
    If a solution or doing nothing gets a wrong score, the cheats are played only if --only names them. The exit code is
    1 if any policy got a wrong score.
    """
    from palaestra.envs.config.command_line import first_word

    environment, others = first_word([environment, *settings], "ENV")
    from palaestra.envs.cheats.proof import check_environment

    proof = check_environment(environment, others, tasks=tasks, only=only, quiet=as_json)
    if as_json:
        click.echo(json.dumps(proof.to_json(), indent=2))
    else:
        _show_proof(proof, everything=everything)
    context.exit(0 if proof.holds else 1)


def _show_proof(proof: Proof, *, everything: bool) -> None:
    """Print a summary of the check. If a policy failed, first print the results of the reference solution, of doing
    nothing, and of the policies that failed; with `everything`, print all results."""
    failed = [line for line in proof.lines if not line.ok]
    if failed or everything:
        _print_results(proof, [each for each in proof.lines if everything or each.state is None or not each.ok])
    tasks = ", ".join(proof.tasks)
    click.echo(printable(f"{proof.environment}: {plural(len(proof.tasks), 'task')} ({tasks}); --tasks N plays more"))
    if failed:
        listed = ", ".join(line.policy for line in failed[:_NAMED]) + (", …" if len(failed) > _NAMED else "")
        click.echo(f"{len(proof.lines)} policies, {len(failed)} failed: {listed}")
    else:
        click.echo(f"{'incomplete' if proof.untried else 'ok'}: {_summary(proof)}")
    for line in failed:
        if line.error:
            click.echo(printable(f"  {line.policy}: {line.error}"))
    if proof.ways:
        ways = (f"{way} ({example})" if example else way for way, example in proof.ways.items())
        click.echo(printable(f"  way of judging: {', '.join(ways)}"))
    for kind, state in [*proof.classes.items(), *((f"score {name}", state) for name, state in proof.parts.items())]:
        if state != "closed" or everything:
            click.echo(printable(f"  {state:10} {kind}"))
    for reason, names in proof.not_tested.items() if failed else ():
        click.echo(printable(f"not tested: {plural(len(names), 'way')} of reward hacking ({reason})"))
    if proof.hollow and everything:
        click.echo(printable(f"attacks on tests were played over the solution of {proof.hollow}"))
    for warning in proof.warnings:
        click.echo(printable(f"warning: {warning}"))
    if proof.skipped:
        click.echo(f"not played: {plural(proof.skipped, 'way')} of reward hacking; fix the score first")
    if not proof.proven:
        click.echo("unproven: the tasks have no reference solution to play")


def _summary(proof: Proof) -> str:
    """Return what a check without failures proves, and what it did not test."""
    solutions = sum(line.state is None for line in proof.lines) - 1
    solved = "the reference solution scores 1; " if solutions == 1 else f"{solutions} solutions score 1; "
    count = {state: sum(line.state == state for line in proof.lines) for state in ("closed", "labelled")}
    parts = [f"doing nothing and {plural(count['closed'], 'way')} of reward hacking score 0"]
    if count["labelled"]:
        parts.append(f"{count['labelled']} pass the official verdict and are labelled")
    parts += [f"{len(names)} not tested ({reason})" for reason, names in proof.not_tested.items()]
    return (solved if proof.proven else "") + ", ".join(parts)


def _print_results(proof: Proof, lines: Sequence[PolicyResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=printable(f"{proof.environment}: {', '.join(proof.tasks)}"))
    for column in ("policy", "what it does", "reward", "must be", ""):
        shown.add_column(column)
    for line in lines:
        rewards = " ".join("unscored" if reward is None else f"{reward:g}" for reward in line.rewards)
        earned = f" ({', '.join(line.parts)})" if line.parts else ""
        plain = line.state is None or line.state == "closed"
        verdict = "FAILED" if not line.ok else "ok" if plain else str(line.state)
        texts = (line.policy, line.what, (rewards or "-") + earned, line.wanted, verdict)
        shown.add_row(*map(printable, texts))
    terminal = getattr(sys.stdout, "raw", None)
    # Without a terminal, rich assumes 80 columns, in which the table would be broken.
    Console(file=terminal, width=None if sys.stdout.isatty() else 130).print(shown)
