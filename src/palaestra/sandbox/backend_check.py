"""Whether a backend works with some settings, what it isolates, and how fast its slots are: for `palaestra doctor`."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from palaestra.core.errors import PalaestraError
from palaestra.core.types import JSON
from palaestra.sandbox.backends.registry import make_backend
from palaestra.sandbox.slot import Backend, SlotSpec

T = TypeVar("T")

_START_S = 120.0
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class BackendFindings:
    """What was found of one backend. `problem` is empty if it works; otherwise it says what to do. `seconds` has
    `start`, and the medians of `create`, `command`, `fork` (from a snapshot) and `reset` (end, and make again)."""

    name: str
    problem: str = ""
    isolation: str = ""
    capacity: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)


async def check_backend(name: str, config: JSON) -> BackendFindings:
    """Start a backend as a run with these settings would, use a few slots, and end it. Never raises for its failure."""
    try:
        backend = make_backend(name, config)
        try:
            async with asyncio.timeout(_START_S):
                return await _measured(name, backend)
        finally:
            await backend.aclose()
    except TimeoutError:
        return BackendFindings(name, f"it did not start within {_START_S:g} s: look at the platform's own logs")
    except (PalaestraError, OSError) as error:
        return BackendFindings(name, str(error))


async def _measured(name: str, backend: Backend) -> BackendFindings:
    seconds: dict[str, list[float]] = {}

    async def timed(what: str, work: Awaitable[T]) -> T:
        begun = time.monotonic()
        result = await work
        seconds.setdefault(what, []).append(time.monotonic() - begun)
        return result

    await timed("start", backend.start())
    for _ in range(_ROUNDS):
        slot = await timed("create", backend.create(SlotSpec(), "doctor"))
        await timed("command", slot.execute("true"))
        await backend.destroy(slot)
    snapshot = await backend.seal(await backend.create(SlotSpec(), "doctor"))
    fork = await timed("fork", backend.create(snapshot.spec, "doctor", snapshot))
    for _ in range(_ROUNDS):
        begun = time.monotonic()
        await backend.destroy(fork)
        fork = await backend.create(snapshot.spec, "doctor", snapshot)
        seconds.setdefault("reset", []).append(time.monotonic() - begun)
    await backend.destroy(fork)
    await backend.forget(snapshot)
    medians = {what: round(statistics.median(found), 6) for what, found in seconds.items()}
    return BackendFindings(name, "", backend.rung.label, backend.capacity, medians)
