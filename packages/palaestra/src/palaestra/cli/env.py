"""`palaestra env`: list, write, show and port environments, and prove that their scores can be trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from palaestra.cli.completion import (
    complete_environments,
)
from palaestra.cli.plugin_group import PluginGroup
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import plugins
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

_TRAINED_WITH = ("group_size", "max_agent_turns", "max_token_length", "max_num_workers", "seed")
"""Common settings that users tune for a training run."""


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
      palaestra env publish FILE.py
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
@click.option(
    "--template",
    type=click.Choice(["function", "class", "conversation"]),
    default="function",
    show_default=True,
    help="What to write. A conversation has a user, a state and tools over it.",
)
@click.option("--class", "template", flag_value="class", help="The same as --template class.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("name")
def new(template: str, as_json: bool, name: str) -> None:
    """Write a new environment, NAME_env.py, in a single file that you can run immediately.

    \b
      palaestra env new my_words
      palaestra env new my_shop --template conversation

    The file is written to ./environments if that folder exists, otherwise to the current folder.
    """
    from palaestra.envs.discovery import FOLDER
    from palaestra.envs.scaffold import write_environment

    path = write_environment(name, Path(FOLDER) if Path(FOLDER).is_dir() else Path(), template)
    click.echo(json.dumps({"path": str(path), "form": template}) if as_json else path)
    click.echo(f"next: palaestra run {path} --policy oracle; palaestra env check {path}", err=True)


@command.command("publish")
@click.option("--out", default="dist", metavar="DIR", help="The folder for the wheel.  [default: dist]")
@click.option("--version", default="0.1.0", help="The version of the package.  [default: 0.1.0]")
@click.option(
    "--data", multiple=True, type=click.Path(path_type=Path), help="A file that the environment reads beside its own."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("environment", metavar="FILE.py[:NAME]")
def publish_command(out: str, version: str, data: tuple[Path, ...], as_json: bool, environment: str) -> None:
    """Make a wheel of an environment, so that others can install it and run it by name.

    \b
      palaestra env check flights_env.py
      palaestra env publish flights_env.py --data flights.json
      pip install dist/flights_env-0.1.0-py3-none-any.whl     # next to Palaestra, on another machine
      palaestra run flights --policy oracle

    The environment is one file; Path(__file__).with_name("flights.json") finds its data. Packages that it imports are
    declared with their versions here. Palaestra is not declared, because a package index may have another package of
    this name.
    """
    from palaestra.envs.publish import publish

    made = publish(environment, Path(out), version=version, data=data)
    if as_json:
        facts: dict[str, JSON] = {"path": str(made.path), "name": made.name, "requires": [*made.requires]}
        click.echo(json.dumps({**facts, "palaestra": [*made.ours]}))
        return
    click.echo(made.path)
    click.echo(
        f"next, where {' and '.join(made.ours)} {'are' if len(made.ours) > 1 else 'is'} installed: pip install "
        f"{made.path}; palaestra run {made.name}",
        err=True,
    )


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
    about = _environment_data(environment)
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
    for name, value in about["parts"].items():
        pairs = [f"{key}={each!r:.60}" for key, each in value.items()] if isinstance(value, dict) else value
        click.echo(f"{name}: {pairs if isinstance(pairs, str) else ', '.join(pairs)}")


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


def _environment_data(reference: str) -> dict[str, JSON]:
    """Return the data of `env show`: the environment's name, form, docstring and parts. `settings` has the settings
    that only this environment has, and common settings whose defaults it changes. `training` has the settings of a
    training run, and `rollouts` the settings of runs that users tune for training."""
    from palaestra.envs.api.function_form import FunctionForm
    from palaestra.envs.config.command_line import set_fields
    from palaestra.envs.config.dotenv import exported, read_keys
    from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
    from palaestra.envs.discovery import load_environment
    from palaestra_slots.core.config import find_setting

    with exported(read_keys(Path.cwd())):
        form = load_environment(reference, Path.cwd())
        config, _ = form.defaults()
    # A setting that every environment has is shown only if this one changes its default.
    common = {**BaseEnvConfig.model_fields, **HermesAgentEnvConfig.model_fields}
    changed = set_fields(config) if config is not None else {}
    fields = form.config_type().model_fields
    others = {name: find_setting(form.config_type(), name) for name in changed.keys() - fields.keys()}

    def row(name: str, field: FieldInfo, values: Mapping[str, JSON] = changed) -> dict[str, JSON]:
        value = values.get(name, field.get_default(call_default_factory=True))
        return {"name": name, "value": value, "about": field.description or ""}

    return {
        "name": form.name,
        "form": form.kind,
        "about": form.about,
        "parts": form.parts if isinstance(form, FunctionForm) else {},
        "settings": [
            row(name, field)
            for name, field in {**fields, **others}.items()
            if field is not None and (name not in common or name in changed)
        ],
        "rollouts": [row(name, fields[name]) for name in _TRAINED_WITH if name in fields],
        **{part: [row(name, field, {}) for name, field in more.items()] for part, more in _more_settings().items()},
    }
