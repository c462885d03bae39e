"""Admission to the slots of a run: nobody asks the pool for a slot before there is one to be had.

Waiting here is not charged to the pool's `acquire_timeout` (invariant S4), so a long queue of rollouts never looks
like a pool that does not answer. Waiters are admitted first come, first served.
"""

from __future__ import annotations

import asyncio
import logging

from palaestra.core.errors import ConfigError, SandboxError, TaskError
from palaestra.sandbox.slot import Change, Slot, SlotSource, SlotSpec, Snapshot, View

logger = logging.getLogger(__name__)


class AdmittedSlots:
    """The slots of a run, over a pool, with at most `capacity` of them out at once."""

    def __init__(self, pool: SlotSource, capacity: int) -> None:
        self._pool = pool
        self._places = asyncio.Semaphore(capacity)

    async def admit(self) -> None:
        """Wait for a place. Whoever was admitted calls `lease`, or `give_up`, once."""
        await self._places.acquire()

    def give_up(self) -> None:
        """Want no slot after all; the place is free again."""
        self._places.release()

    async def lease(self, trajectory_id: str, *, spec: SlotSpec, snapshot: Snapshot | None) -> Slot:
        """The slot of a caller that has been admitted. Without one the place is free again.

        Raises `TaskError` where there can be no such slot (its image, its list of hosts), which the task asks for.
        """
        try:
            return await self._pool.acquire(trajectory_id, spec=spec, snapshot=snapshot)
        except BaseException as error:
            self._places.release()
            if isinstance(error, ConfigError):
                raise TaskError(f"no slot can be made for {trajectory_id}: {error}") from error
            raise

    async def release(self, slot: Slot) -> None:
        """Give the slot back; the place is free again whatever the pool says."""
        try:
            await self._pool.release(slot)
        finally:
            self._places.release()

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        """Seal the slot, which ends it and frees its place."""
        try:
            return await self._pool.seal(slot, view)
        finally:
            self._places.release()

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot:
        return await self._pool.view(snapshot, view)

    async def changes(self, snapshot: Snapshot) -> list[Change]:
        return await self._pool.changes(snapshot)

    async def holds(self, snapshot: Snapshot) -> bool:
        """Whether the snapshot is still there: a backend that died has lost it."""
        try:
            await self._pool.changes(snapshot)
        except SandboxError:
            return False
        return True

    async def forget(self, snapshot: Snapshot) -> None:
        """Drop a snapshot that nobody needs any more. A backend that died has dropped it already."""
        try:
            await self._pool.forget(snapshot)
        except SandboxError as error:
            logger.warning("dropping the snapshot %s failed: %s", snapshot.snapshot_id, error)
