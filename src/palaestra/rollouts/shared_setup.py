"""Foundations: preparation that several tasks share, such as a repository with its dependencies installed.

An environment names a foundation by a key. The first group that needs it lays it in a slot of its own; the others
wait for that, and all prepare their workspace on top of the same snapshot. One that cannot be laid fails every task
that stands on it, with the same error, and is not tried again. Where the sandbox failed under whoever was laying it,
that says nothing of it: the next one lays it, as one that was lost later is laid anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from palaestra.core.errors import SandboxError
from palaestra.rollouts.admission import AdmittedSlots
from palaestra.sandbox.slot import Snapshot


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
                task = asyncio.current_task()
                if not known.cancelled() or (task is not None and task.cancelling()):
                    raise
                # Whoever was laying it did not come to an end, and nobody cancels us: lay it ourselves.

    async def _lay(self, key: str, lay: Callable[[], Awaitable[Snapshot]]) -> Snapshot:
        future: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._laid[key] = future
        try:
            snapshot = await lay()
        except (asyncio.CancelledError, SandboxError):
            del self._laid[key]
            future.cancel()
            raise
        except BaseException as error:
            future.set_exception(error)
            future.exception()  # marks it as seen: perhaps nobody else waits
            raise
        future.set_result(snapshot)
        return snapshot

    async def drop_lost(self, key: str) -> None:
        """Let go of a foundation that its backend has lost: whoever asks for the key next lays it anew."""
        future = self._laid.get(key)
        snapshot = _result(future)
        if snapshot is not None and not await self._slots.holds(snapshot) and self._laid.get(key) is future:
            del self._laid[key]

    async def aclose(self) -> None:
        """Forget every foundation. The groups that stood on them have ended."""
        for future in self._laid.values():
            if (snapshot := _result(future)) is not None:
                await self._slots.forget(snapshot)
        self._laid.clear()


def _result(future: asyncio.Future[Snapshot] | None) -> Snapshot | None:
    """What was laid; None where it is not there, or not yet."""
    if future is None or not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return future.result()
