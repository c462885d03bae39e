"""`palaestra tasks build swe|terminal`: make verifiable tasks, out of real packages or out of a seed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import click

from palaestra.core.config import local_path
from palaestra.core.errors import ConfigError

if TYPE_CHECKING:
    from palaestra.suites.endless_terminals.build_terminal import TerminalBuild
    from palaestra.suites.endless_terminals.compose_tasks import TaskSelection
    from palaestra.suites.swe.authoring.build_tasks import BuildOptions, SweBuild

CACHE = "~/.cache/palaestra"
"""Where downloads and installed test requirements are kept: the same place that the SWE environment uses."""

_CONTEXT = {"help_option_names": ["-h", "--help"]}


@click.group(
    "tasks",
    context_settings=_CONTEXT,
    help="""Make verifiable tasks.

    \b
      palaestra tasks build swe --out tasks.jsonl
      palaestra tasks build swe --package iniconfig==2.1.0 --out tasks.jsonl
      palaestra tasks build terminal --n 1000 --seed 7 --out tasks.jsonl
    """,
)
def command() -> None:
    pass


@command.group(
    "build",
    context_settings=_CONTEXT,
    help="""Build tasks of one kind: swe or terminal.

    \b
      palaestra tasks build swe --out tasks.jsonl
      palaestra tasks build terminal --n 1000 --seed 7 --out tasks.jsonl
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
      palaestra tasks build swe --package NAME==VERSION --out own.jsonl # a package of your own is searched

    Takes source distributions from the package index (nothing else touches the network) and runs their tests in local
    slots without network. The rows have the SWE-smith schema.
    """,
)
@click.option("--package", "packages", multiple=True, metavar="NAME==VERSION", help="Only this package; repeatable.")
@click.option("--manifest", type=click.Path(path_type=Path), help="Pinned packages and bugs, if not our own.")
@click.option("--save-manifest", type=click.Path(path_type=Path), help="Write what was found, pinned, to this file.")
@click.option("--select", multiple=True, metavar="NAME", help="Only this package or bug; repeatable.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSONL file to write.")
@click.option("--limit", type=click.IntRange(min=1), help="Tasks, at most.")
@click.option("--parallel", type=click.IntRange(min=1), default=2, show_default=True, help="Test runs at once.")
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True, help="Downloads.")
@click.option("--index-url", metavar="URL", help="The package index, if not pip's.")
def build_swe(
    packages: tuple[str, ...],
    manifest: Path | None,
    save_manifest: Path | None,
    select: tuple[str, ...],
    out: Path,
    limit: int | None,
    parallel: int,
    cache: Path,
    index_url: str | None,
) -> None:
    from palaestra.suites.swe.authoring.build_tasks import BuildOptions
    from palaestra.suites.swe.authoring.manifest import dump_manifest

    _check_out(out)
    options = BuildOptions(
        out=out,
        cache=local_path(cache),
        limit=limit or 0,
        select=select,
        index_url=index_url,
        parallel=parallel,
    )
    report = asyncio.run(_build(packages, manifest, options))
    if save_manifest is not None:
        save_manifest.write_text(dump_manifest(report.manifest), encoding="utf-8")
    click.echo(f"{len(report.rows)} tasks in {out}, {len(report.problems)} problems", err=True)
    if not report.rows:
        raise ConfigError("no task was built; the lines above say why")


async def _build(packages: Sequence[str], manifest: Path | None, options: BuildOptions) -> SweBuild:
    from palaestra.envs.config.build import make_pool
    from palaestra.envs.config.fields import HermesAgentEnvConfig
    from palaestra.suites.swe.authoring.build_tasks import build

    async with make_pool(HermesAgentEnvConfig()) as pool:
        return await build(packages, manifest, pool, options, progress=lambda line: click.echo(line, err=True))


@build_group.command(
    "terminal",
    context_settings=_CONTEXT,
    help="""Generate terminal tasks from a seed: files, text, logs, tables, formats, archives, permissions, processes,
    git, databases and scripts. Level k is k kinds of work in one task.

    \b
      palaestra tasks build terminal --n 1000 --seed 7 --out tasks.jsonl
      palaestra tasks build terminal --n 50 --level 3 --area git --area text --out git.jsonl

    Equal seeds give equal bytes. Each task is checked in slots before it is written: its first state is right, doing
    nothing and files that are merely there are not paid, and its reference solution is. Nothing touches the network.
    """,
)
@click.option("--n", "count", type=click.IntRange(min=1), default=100, show_default=True, help="Tasks to generate.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal tasks.")
@click.option(
    "--level", "levels", type=int, multiple=True, help="Only this level, 1 to 5; repeatable. [default: mixed]"
)
@click.option("--area", "areas", multiple=True, metavar="NAME", help="Only this area of work; repeatable.")
@click.option("--family", "families", multiple=True, metavar="NAME", help="Only this kind of work; repeatable.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSONL file to write.")
@click.option("--image", metavar="ROOT", help="A root file system for the slots, if not this machine's.")
@click.option("--parallel", type=click.IntRange(min=1), help="Tasks under check at once. [default: two per processor]")
@click.option("--check/--no-check", default=True, show_default=True, help="Whether each task is checked in slots.")
def build_terminal(
    count: int,
    seed: int,
    levels: tuple[int, ...],
    areas: tuple[str, ...],
    families: tuple[str, ...],
    out: Path,
    image: str | None,
    parallel: int | None,
    check: bool,
) -> None:
    from palaestra.suites.endless_terminals.build_terminal import TerminalBuild, write_tasks
    from palaestra.suites.endless_terminals.compose_tasks import TaskSelection, generate

    _check_out(out)
    choice = TaskSelection(seed, levels, families, areas)
    if check:
        report = asyncio.run(_build_terminal(choice, count, image, parallel))
    else:
        report = TerminalBuild(tuple(generate(choice, count)), ())
    if not report.tasks:
        raise ConfigError("no task was built; the lines above say why")
    write_tasks(out, report.tasks)
    state = "checked" if check else "unchecked"
    click.echo(
        f"{len(report.tasks)} {state} tasks in {out}: {report.counts()}; {len(report.problems)} left out", err=True
    )


async def _build_terminal(choice: TaskSelection, count: int, image: str | None, parallel: int | None) -> TerminalBuild:
    from palaestra.envs.config.build import make_pool
    from palaestra.envs.config.fields import HermesAgentEnvConfig
    from palaestra.suites.endless_terminals.build_terminal import build

    async with make_pool(HermesAgentEnvConfig()) as pool:
        at_once = parallel or max(1, pool.total_slots // 2)  # a task under check has one slot, and soon the next
        return await build(
            choice, count, pool, parallel=at_once, image=image, progress=lambda line: click.echo(line, err=True)
        )


def _check_out(out: Path) -> None:
    """What would keep the tasks from being written is said before they are made."""
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder: name a file in it")
    try:
        TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise ConfigError(f"--out {out}: {out.parent} cannot be written to: {error.strerror}") from None
