"""`palaestra slots`: list the slots on this machine, and remove what dead runs left behind."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from palaestra.envs.config.host_path import HostPath
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.printable import printable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.snapshots.folder import SnapshotStore, default_folder

_directory = click.option(
    "--directory",
    type=HostPath(),
    help="The folder of the slot services. Default: your user's folder under /run.",
)
_store = click.option(
    "--workspace-store",
    "--store",
    "store",
    type=HostPath(),
    help="The store of prepared workspaces. Default: your user's store.",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(
    "slots",
    help="""Show slots, services and prepared workspaces on this machine, and remove those that no run needs.

    \b
      palaestra slots list
      palaestra slots clean
    """,
)
def command() -> None:
    pass


@command.command(
    "list",
    help="""List running slot servers, services with their leases, and prepared workspaces.

    \b
      palaestra slots list
      palaestra slots list --json | jq '.services[].leases'
    """,
)
@_directory
@_store
@_as_json
def list_slots(directory: Path | None, store: Path | None, as_json: bool) -> None:
    found = asyncio.run(_inventory(directory, store))
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for server in found["servers"]:
        client = f"of process {server['client_pid']}"
        click.echo(f"server {server['pid']:<8} {server['slots']:>4} slots  {_age(server['age_s'])}  {client}")
    for service in found["services"]:
        state = "attached" if service["attached"] else "waiting"
        click.echo(f"service {service['name']}  {service['rung']}, {state}, process {service['pid']}")
        for lease in service["leases"]:
            click.echo(f"  {lease['slot']:<12} epoch {lease['epoch']:<5} {lease['about'].get('trajectory_id', '')}")
    for entry in found["workspaces"]:
        size, idle = f"{entry['size_bytes'] >> 20:>6} MiB", f"used {_age(entry['idle_s'])} ago"
        click.echo(printable(f"workspace {entry['key'][:12]}  {size}  {idle:<16}  {entry['name']}"))
    if not any(found.values()):
        click.echo("no slots, no services, no prepared workspaces", err=True)


@command.command(
    "clean",
    help="""Remove unused leftovers of dead runs: control groups, sockets and half-made workspaces.

    \b
      palaestra slots clean                  only what has no owner
      palaestra slots clean --services       also end services that no process is attached to
      palaestra slots clean --workspaces     also remove prepared workspaces that are not in use
      palaestra slots clean --all --dry-run  list what both flags would remove

    The command lists what it would remove and asks for confirmation; --yes skips the question, for scripts.
    """,
)
@click.option("--services", is_flag=True, help="End services that no process is attached to, with their slots.")
@click.option("--workspaces", is_flag=True, help="Remove prepared workspaces that are not in use.")
@click.option("--all", "everything", is_flag=True, help="Remove both.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@_directory
@_store
@_as_json
def clean(
    services: bool,
    workspaces: bool,
    everything: bool,
    yes: bool,
    dry_run: bool,
    directory: Path | None,
    store: Path | None,
    as_json: bool,
) -> None:
    def swept(*, only_list: bool) -> dict[str, list[str]]:
        return asyncio.run(_clean(services or everything, workspaces or everything, directory, store, only_list))

    if not (yes or dry_run):
        if not sys.stdin.isatty():
            raise ConfigError(
                "cannot ask for confirmation without a terminal: add --yes, or --dry-run to only list what "
                "would be removed"
            )
        # The person confirms a list of names, not a kind.
        listed = swept(only_list=True)
        _show_swept(listed, err=True)
        if not any(listed.values()) or not click.confirm("Remove them?", err=True):
            return
    gone = swept(only_list=dry_run)
    if as_json:
        click.echo(json.dumps(gone, indent=2))
    else:
        _show_swept(gone)


def _show_swept(found: dict[str, list[str]], *, err: bool = False) -> None:
    for what, names in found.items():
        click.echo(printable(f"{what}: {', '.join(names) if names else 'nothing to remove'}"), err=err)


async def _inventory(directory: Path | None, store: Path | None) -> dict[str, list[JSON]]:
    from palaestra_slots.sandbox.local import running_servers
    from palaestra_slots.sandbox.service import service_client

    running = [await service_client.service_state(path) for path in _sockets(directory)]
    workspaces = _open_store(store)
    entries = [] if workspaces is None else workspaces.entries()
    now = time.time()
    return {
        "servers": [asdict(server) for server in running_servers.running_servers()],
        "services": [asdict(each) for each in running if each is not None],
        "workspaces": [
            {
                "key": entry.key,
                "name": entry.name,
                "size_bytes": entry.size_bytes,
                "idle_s": round(now - entry.used_at, 1),
            }
            for entry in entries
        ],
    }


async def _clean(
    services: bool, workspaces: bool, directory: Path | None, store: Path | None, only_list: bool
) -> dict[str, list[str]]:
    """Remove leftover control groups, services and half-made workspaces. `services` and `workspaces` also remove
    services to which no process is attached, and workspaces that are not in use. With `only_list`, nothing is removed.
    Returns the names by kind."""
    from palaestra_slots.sandbox.host_tools import find_control_groups, sweep_control_groups
    from palaestra_slots.sandbox.service import service_client

    swept = sweep_control_groups(find_control_groups(), only_list)
    gone: dict[str, list[str]] = {"control groups": swept, "services": [], "workspaces": []}
    for path in _sockets(directory) if services else ():
        # A service is ended only if it answers and nobody is attached, because its slots may belong to a running
        # program.
        seen = await service_client.service_state(path)
        if seen is not None and not seen.attached:
            if not only_list:
                await service_client.end(path)
            gone["services"].append(seen.name)
    folder = directory or service_client.default_directory()
    # After the services have ended, so that their sockets are among those that are removed.
    gone["services"] += await service_client.sweep(folder, only_list=only_list)
    kept = _open_store(store)
    if kept is not None:
        halves = kept.sweep(only_list=only_list)
        gone["workspaces"] = [f"{halves} half-made"] if halves else []
        entries = kept.entries() if workspaces else []
        gone["workspaces"] += [entry.key[:12] for entry in entries if kept.remove(entry.key, only_list=only_list)]
    return gone


def _sockets(directory: Path | None) -> list[Path]:
    from palaestra_slots.sandbox.service import service_client

    folder = directory or service_client.default_directory()
    return sorted(folder.glob("*.sock")) if folder.is_dir() else []


def _open_store(store: Path | None) -> SnapshotStore | None:
    """Return the store of workspaces, or None if it does not exist, because a listing must not create it."""
    folder = store or default_folder()
    return SnapshotStore(folder).open() if folder.is_dir() else None


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
