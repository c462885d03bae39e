"""The command `palaestra tasks build swe`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from palaestra.envs.config.build import make_pool
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.images.build_once import CACHE_DIR
from palaestra_suites.out_option import out_option
from palaestra_suites.swe.authoring.build_tasks import BuildOptions, SweBuild, build
from palaestra_suites.swe.authoring.manifest import dump_manifest


@click.command("swe", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--package", "packages", multiple=True, metavar="NAME==VERSION", help="Only this package; repeatable.")
@click.option("--manifest", type=click.Path(path_type=Path), help="Packages and their bugs. [default: built in]")
@click.option("--save-manifest", type=click.Path(path_type=Path), help="Write the bugs that were found to this file.")
@click.option("--select", multiple=True, metavar="NAME", help="Only this package or bug; repeatable.")
@out_option
@click.option("--tasks", "--limit", "limit", type=click.IntRange(min=1), help="Maximum number of tasks.")
@click.option(
    "--concurrency",
    "--parallel",
    "parallel",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of concurrent test runs.",
)
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE_DIR, show_default=True, help="Cache folder.")
@click.option("--index-url", metavar="URL", help="The package index. Default: pip's.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    packages: tuple[str, ...],
    manifest: Path | None,
    save_manifest: Path | None,
    select: tuple[str, ...],
    out: Path,
    limit: int | None,
    parallel: int,
    cache: Path,
    index_url: str | None,
    as_json: bool,
) -> None:
    """Make bug-fixing tasks: inject bugs into real packages.

    \b
      palaestra tasks build swe --out tasks.jsonl                       # the tasks of the manifest
      palaestra tasks build swe --out ten.jsonl --tasks 10
      palaestra tasks build swe --package NAME==VERSION --out own.jsonl # search another package for bugs

    A bug becomes a task if the package's tests detect it. Source distributions come from the package index, and their
    tests run in local slots without a network. The rows have the SWE-smith schema.
    """
    options = BuildOptions(
        out=out,
        cache=local_path(cache),
        limit=limit or 0,
        select=select,
        index_url=index_url,
        parallel=parallel,
    )

    async def main() -> SweBuild:
        async with make_pool(HermesAgentEnvConfig()) as pool:
            return await build(packages, manifest, pool, options, progress=lambda line: click.echo(line, err=True))

    report = asyncio.run(main())
    if save_manifest is not None:
        save_manifest.write_text(dump_manifest(report.manifest), encoding="utf-8")
    click.echo(f"{len(report.rows)} tasks in {out}, {len(report.problems)} problems", err=True)
    if not report.rows:
        raise ConfigError("no task was built; the reasons are above")
    facts = {"path": str(out), "tasks": len(report.rows), "problems": len(report.problems)}
    click.echo(json.dumps(facts) if as_json else out)
