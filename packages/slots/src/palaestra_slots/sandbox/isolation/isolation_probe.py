"""Probes which isolation levels work on this machine, each with a throw-away slot."""

from __future__ import annotations

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.server_backend import BUILT
from palaestra_slots.sandbox.slot import Rung, RungStatus

_COVERS = {
    Rung.FULL: (
        "own processes, mounts, IPC, host name, network",
        "root in the slot is an unprivileged uid outside",
        "limits on memory, processes, processor, disk",
        "system call filter, no new privileges",
    ),
    Rung.USERNS: (
        "own processes, mounts, IPC, host name, network",
        "root in the slot is the user who started the run",
        "limits on processes and disk; memory per process only",
        "system call filter, no new privileges",
    ),
    Rung.CONFINED: (
        "own user (as root), own directories, the rest read-only (Landlock)",
        "no network when it is off; no list of hosts, no image",
        "limits per process on memory and files; no limit on disk",
        "system call filter, no new privileges",
        "not isolated: other processes' names, the container's /tmp and /workspace",
    ),
    Rung.NONE: ("a temporary directory, and commands that run as you",),
}


WARNINGS = {
    Rung.CONFINED: "slots share this container's namespaces; only users and Landlock keep them apart",
    Rung.NONE: "commands run as you, unprotected",
}


async def probe() -> list[RungStatus]:
    """Return the status of every isolation level, best first, with the reason if a level is not available. Takes a
    fraction of a second."""
    return [await _try(rung) for rung in BUILT]


async def _try(rung: Rung) -> RungStatus:
    backend = LocalBackend()
    reason = await backend.attempt(rung)
    await backend.aclose()
    if reason is not None:
        return RungStatus(rung, False, reason)
    held = "used only if you request it by name" if rung is Rung.NONE else "a throw-away slot passed every check"
    return RungStatus(rung, True, held, _COVERS[rung])
