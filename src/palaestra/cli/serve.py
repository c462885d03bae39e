"""`palaestra serve api`: the server between environments and a trainer."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click

_CONTEXT = {"help_option_names": ["-h", "--help"]}


@click.group(
    "serve",
    context_settings=_CONTEXT,
    help="""Run servers. There is one kind in this version: api.

    \b
      palaestra serve api --store groups.jsonl
    """,
)
def command() -> None:
    pass


@command.command(
    "api",
    context_settings=_CONTEXT,
    help="""Take scored groups from environments and give batches of them to a trainer: the Atropos trajectory API.

    \b
      palaestra serve api --store groups.jsonl
      python my_env.py serve --env.rollout_server_url http://127.0.0.1:8000 …

    With --store, what was received survives a restart; without it, it is in memory alone. There is no
    authentication: listen on the loopback or on a network of your own.
    """,
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one.")
@click.option("--store", type=click.Path(path_type=Path, dir_okay=False), help="The file that keeps what was received.")
@click.option("--max-groups", type=click.IntRange(min=1), default=10_000, show_default=True, help="That may wait.")
@click.option("--max-mib", type=click.IntRange(min=1), default=2048, show_default=True, help="Of groups that may wait.")
def api(host: str, port: int, store: Path | None, max_groups: int, max_mib: int) -> None:
    asyncio.run(_serve(host, port, store, max_groups, max_mib))


async def _serve(host: str, port: int, store: Path | None, most_groups: int, most_mib: int) -> None:
    from palaestra.trainers.atropos.server import serving

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with serving(host, port, store=store, most_groups=most_groups, most_bytes=most_mib << 20) as url:
        click.echo(url)
        click.echo(f"kept in {store}" if store else "kept in memory only; --store FILE survives a restart", err=True)
        await stop.wait()
