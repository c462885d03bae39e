"""`palaestra images`: root file systems for slots. Each subcommand is an entry point."""

from __future__ import annotations

import click

from palaestra.cli.plugin_group import PluginGroup


class _ImagesGroup(PluginGroup):
    prefix = "images"


@click.group("images", cls=_ImagesGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Make and list root file systems for slots.

    \b
      palaestra images make debian:12
      palaestra images list
    """
