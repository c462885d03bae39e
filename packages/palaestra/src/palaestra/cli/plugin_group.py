"""Groups of commands that installed packages extend. Those that have no command of their own are here too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import plugins

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "palaestra.commands"
"""The group of entry points for commands."""


def command_of(name: str) -> click.Command:
    """Import the command of an entry point. Raises `ConfigError`."""
    command = plugins.load_named(GROUP, name, f"the command {name}")
    if not isinstance(command, click.Command):
        raise ConfigError(f"{name} of {plugins.origin(plugins.installed(GROUP)[name])} is not a click command")
    return command


class PluginGroup(click.Group):
    """A group that installed packages extend: the entry point `env.import` is the command `palaestra env import`.

        [project.entry-points."palaestra.commands"]
        "tasks.build.words" = "my_package.build_words:command"

    The entry point names a click command, whose docstring is its help. The command's module is imported when the
    command is used; `--help` of the group only parses the module. The group consists of the entry points whose names
    begin with `prefix`.
    """

    prefix: str

    def _plugins(self) -> dict[str, EntryPoint]:
        found = {name.removeprefix(f"{self.prefix}."): point for name, point in plugins.installed(GROUP).items()}
        return {
            name: point
            for name, point in found.items()
            # An installed package adds commands, and never replaces one of ours.
            if point.name == f"{self.prefix}.{name}" and "." not in name and name not in self.commands
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self._plugins()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        point = self._plugins().get(cmd_name)
        return own if own is not None or point is None else command_of(point.name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands as click does, but without importing entry points."""
        with formatter.section("Commands"):
            own = [(name, command.get_short_help_str(90)) for name, command in self.commands.items()]
            formatter.write_dl(own + [(name, _summary(point)) for name, point in self._plugins().items()])


def _summary(point: EntryPoint) -> str:
    try:
        return plugins.entry_point_summary(point)
    except ConfigError as error:
        return f"({error})"


class _BuildGroup(PluginGroup):
    prefix = "tasks.build"


@click.group("tasks")
def tasks_command() -> None:
    """Make verifiable tasks.

    \b
      palaestra tasks build swe --out tasks.jsonl
      palaestra tasks build swe --package iniconfig==2.1.0 --out tasks.jsonl
      palaestra tasks build terminal --tasks 1000 --seed 7 --out tasks.jsonl
    """


@tasks_command.group("build", cls=_BuildGroup)
def build_group() -> None:
    """Make tasks of one kind.

    \b
      palaestra tasks build swe --out tasks.jsonl
      palaestra tasks build terminal --tasks 1000 --seed 7 --out tasks.jsonl
    """


class _ImagesGroup(PluginGroup):
    prefix = "images"


@click.group("images", cls=_ImagesGroup)
def images_command() -> None:
    """Make, pull, list and remove root file systems for slots.

    \b
      palaestra images make debian:12
      palaestra images pull python:3.13
      palaestra images list
      palaestra images remove python:3.13
    """
