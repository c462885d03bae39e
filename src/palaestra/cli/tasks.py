"""`palaestra tasks build KIND`: make verifiable tasks. Each kind is an entry point."""

from __future__ import annotations

import click

from palaestra.cli.plugin_group import PluginGroup

_CONTEXT = {"help_option_names": ["-h", "--help"]}


class _BuildGroup(PluginGroup):
    prefix = "tasks.build"


@click.group("tasks", context_settings=_CONTEXT)
def command() -> None:
    """Make verifiable tasks.

    \b
      palaestra tasks build swe --out tasks.jsonl
      palaestra tasks build swe --package iniconfig==2.1.0 --out tasks.jsonl
      palaestra tasks build terminal --tasks 1000 --seed 7 --out tasks.jsonl
    """


@command.group("build", cls=_BuildGroup, context_settings=_CONTEXT)
def build_group() -> None:
    """Make tasks of one kind.

    \b
      palaestra tasks build swe --out tasks.jsonl
      palaestra tasks build terminal --tasks 1000 --seed 7 --out tasks.jsonl
    """
