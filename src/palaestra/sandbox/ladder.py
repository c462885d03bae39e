"""What this machine can isolate, found out by making a throw-away slot on every rung and looking at what it shows."""

from __future__ import annotations

from palaestra.sandbox.backends.local import BUILT, LocalBackend
from palaestra.sandbox.base import Rung, Step

_COVERS = {
    Rung.FULL: (
        "own processes, mounts, IPC, host name, network",
        "root in the slot is nobody outside",
        "limits on memory, processes, processor, disk",
        "system call filter, no new privileges",
    ),
    Rung.USERNS: (
        "own processes, mounts, IPC, host name, network",
        "root in the slot is the user who started the run",
        "limits on processes and disk; memory per process only",
        "system call filter, no new privileges",
    ),
}
_NOT_BUILT = {
    Rung.CONFINED: "not built yet (a uid per slot, Landlock, filter and limits, for ordinary containers)",
    Rung.NONE: "not built: commands would run on the host, unprotected",
}


async def probe() -> list[Step]:
    """Every rung, best first, with the reason where it cannot be had. Takes a fraction of a second."""
    steps = [await _try(rung) for rung in BUILT]
    return [*steps, *(Step(rung, False, reason) for rung, reason in _NOT_BUILT.items())]


async def _try(rung: Rung) -> Step:
    backend = LocalBackend()
    reason = await backend.attempt(rung)
    await backend.aclose()
    if reason is not None:
        return Step(rung, False, reason)
    return Step(rung, True, "a throw-away slot held every check", _COVERS[rung])
