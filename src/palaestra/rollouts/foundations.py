"""Foundations: preparation that several tasks share, such as a repository with its dependencies installed.

An environment names a foundation by a key. The first group that needs it lays it in a slot of its own; the others
wait for that, and all prepare their workspace on top of the same snapshot. One that could not be laid fails every
task that stands on it, with the same error, and is not tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from palaestra.rollouts.admission import AdmittedSlots
from palaestra.sandbox.base import Snapshot


class Foundations:
    """The foundations of one run. `aclose` drops their layers."""

    def __init__(self, slots: AdmittedSlots) -> None:
        self._slots = slots
        self._laid: dict[str, asyncio.Future[Snapshot]] = {}

    async def get(self, key: str, lay: Callable[[], Awaitable[Snapshot]]) -> Snapshot:
        """The foundation of this key, laid now if nobody has. Raises what laying it raised."""
        while True:
            known = self._laid.get(key)
            if known is None:
                return await self._lay(key, lay)
            try:
                return await asyncio.shield(known)
            except asyncio.CancelledError:
                if not known.cancelled():
                    raise
                # Whoever was laying it was cancelled, not we: lay it ourselves.

    async def _lay(self, key: str, lay: Callable[[], Awaitable[Snapshot]]) -> Snapshot:
        future: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._laid[key] = future
        try:
            snapshot = await lay()
        except asyncio.CancelledError:
            del self._laid[key]
            future.cancel()
            raise
        except BaseException as error:
            future.set_exception(error)
            future.exception()  # marks it as seen: perhaps nobody else waits
            raise
        future.set_result(snapshot)
        return snapshot

    async def aclose(self) -> None:
        """Forget every foundation. The groups that stood on them have ended."""
        for future in self._laid.values():
            if future.done() and not future.cancelled() and future.exception() is None:
                await self._slots.forget(future.result())
        self._laid.clear()
