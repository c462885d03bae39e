"""`palaestra tasks build swe`: make verifiable bug-fixing tasks out of real packages."""

from __future__ import annotations

from pathlib import Path

import click

_CONTEXT = {"help_option_names": ["-h", "--help"]}


@click.group(
    "tasks",
    context_settings=_CONTEXT,
    help="""Make verifiable tasks.

    \b
      palaestra tasks build swe --out tasks.jsonl
      palaestra tasks build swe --package iniconfig==2.1.0 --out tasks.jsonl
    """,
)
def command() -> None:
    pass


@command.group(
    "build",
    context_settings=_CONTEXT,
    help="""Build tasks of one kind. There is one kind in this version: swe.

    \b
      palaestra tasks build swe --out tasks.jsonl
    """,
)
def build_group() -> None:
    pass


@build_group.command(
    "swe",
    context_settings=_CONTEXT,
    help="""Make bug-fixing tasks: inject bugs into real packages and keep those that their tests catch.

    \b
      palaestra tasks build swe --out tasks.jsonl                       # the tasks of the manifest
      palaestra tasks build swe --out ten.jsonl --limit 10
      palaestra tasks build swe --package iniconfig==2.1.0 --out own.jsonl

    Takes source distributions from the package index (nothing else touches the network) and runs their tests in local
    slots without network. The rows have the SWE-smith schema.
    """,
)
@click.option("--package", "packages", multiple=True, metavar="NAME==VERSION", help="Search this package for bugs.")
@click.option("--manifest", type=click.Path(path_type=Path), help="Rebuild the tasks pinned here, without a search.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSONL file to write.")
@click.option("--limit", type=click.IntRange(min=1), help="Tasks, at most.")
@click.pass_context
def build_swe(
    context: click.Context, packages: tuple[str, ...], manifest: Path | None, out: Path, limit: int | None
) -> None:
    from palaestra.envs.swe.build.command import build

    context.exit(build(list(packages), manifest, out, limit=limit))
