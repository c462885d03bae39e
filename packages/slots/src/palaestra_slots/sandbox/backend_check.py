"""Checks for `palaestra doctor` whether a backend works, what it isolates, and how fast its slots are."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from palaestra_slots.core.errors import PalaestraError, SandboxError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.registry import make_backend
from palaestra_slots.sandbox.backends.remote import RemoteBackend
from palaestra_slots.sandbox.server_backend import StartedBackend
from palaestra_slots.sandbox.slot import Backend, SlotSpec

T = TypeVar("T")

MEASURED = ("start", "round_trip", "create", "exec", "fork", "reset")

_START_S = 120.0
_ROUNDS = 5


@dataclass(slots=True)
class BackendFindings:
    """The findings about one backend. A field is None if its value could not be determined.

    `problem` is empty if the backend works; otherwise it describes the failure and the fix. `reachable` is true if the
    platform answers and accepts the credentials. `images` lists the kinds of images that the backend supports.
    `checkpoints` is true if a running slot can be forked. `seconds` has the time of `start`, and the median times of
    `round_trip` (a request to the slot server), `create`, `exec` (the command `true`), `fork` (from a snapshot) and
    `reset` (end a slot and make a new one).
    """

    name: str
    problem: str = ""
    reachable: bool | None = None
    credentials: str | None = None
    isolation: str | None = None
    capacity: int | None = None
    images: tuple[str, ...] | None = None
    checkpoints: bool | None = None
    seconds: dict[str, float] = field(default_factory=dict)


async def check_backend(name: str, config: JSON) -> BackendFindings:
    """Start a backend as a run with these settings would, use a few of its slots, and close the backend. A failure of
    the backend is reported in the result and never raised."""
    found = BackendFindings(name)
    try:
        backend = make_backend(name, config)
        try:
            async with asyncio.timeout(_START_S):
                await _reach(backend, found)
                await _measure(backend, found)
        finally:
            await backend.aclose()
    except TimeoutError:
        found.problem = f"the check took more than {_START_S:g} s; the platform's own logs may show why"
    except (PalaestraError, OSError) as error:
        found.problem = str(error)
    return found


async def _reach(backend: Backend, found: BackendFindings) -> None:
    if isinstance(backend, StartedBackend):
        found.credentials, found.images = backend.credentials, backend.image_kinds
    if isinstance(backend, RemoteBackend):
        found.reachable = False
        await backend.check_hosts()
    found.reachable = True


async def _measure(backend: Backend, found: BackendFindings) -> None:
    seconds: dict[str, list[float]] = {}

    async def timed(what: str, work: Awaitable[T]) -> T:
        begun = time.monotonic()
        result = await work
        seconds.setdefault(what, []).append(time.monotonic() - begun)
        found.seconds[what] = round(statistics.median(seconds[what]), 6)
        return result

    await timed("start", backend.start())
    found.isolation, found.capacity = backend.rung.label, backend.capacity
    for _ in range(_ROUNDS):
        slot = await timed("create", backend.create(SlotSpec(), "doctor"))
        await timed("round_trip", slot.stat("."))
        await timed("exec", slot.execute("true"))
        await backend.destroy(slot)
    slot = await backend.create(SlotSpec(), "doctor")
    try:
        await backend.forget(await backend.checkpoint(slot))
        found.checkpoints = True
    except SandboxError:
        found.checkpoints = False
    snapshot = await backend.seal(slot)
    fork = await timed("fork", backend.create(snapshot.spec, "doctor", snapshot))

    async def reset() -> None:
        nonlocal fork
        await backend.destroy(fork)
        fork = await timed("fork", backend.create(snapshot.spec, "doctor", snapshot))

    for _ in range(_ROUNDS):
        await timed("reset", reset())
    await backend.destroy(fork)
    await backend.forget(snapshot)
