"""Manages the slots and prepared workspaces of one run: leases, and preparation that several tasks share.

The environment names shared preparation, such as a repository with its dependencies installed, by a key. The first
group that needs a shared preparation does it in its own slot. The other groups wait, and every group starts its own
preparation from the same snapshot. If a shared preparation fails, every task that needs it fails with the same error,
and the preparation is not retried. The next group that needs the preparation repeats it in only three cases: after a
sandbox failure, after a cancellation, and if the snapshot was lost with its backend.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

from palaestra.core.clock import uncharged
from palaestra.core.errors import ConfigError, SandboxError, TaskError
from palaestra.core.io.durable_files import writing
from palaestra.rollouts.watchdog import Stages
from palaestra.sandbox.slot import Slot, SlotSource, SlotSpec, Snapshot
from palaestra.sandbox.snapshots.cache import Prepared

UNTOUCHED = "-untouched"
"""The suffix of a kept workspace's name if the agent never used the workspace."""


def _nothing() -> None:
    pass


class Workspaces:
    """The workspaces of one run. `prepared`, if given, stores workspaces for other runs. `aclose` drops the shared
    snapshots.

    `kept` is the folder in which the work of rollouts is stored when it is sealed, so that it can be graded again. If
    it is None, no work is stored.
    """

    def __init__(self, pool: SlotSource, prepared: Prepared | None = None, kept: Path | None = None) -> None:
        self.pool = pool
        self.prepared = prepared
        self.kept = kept
        self._shared: dict[str, asyncio.Future[Snapshot]] = {}

    async def lease(
        self,
        name: str,
        spec: SlotSpec,
        snapshot: Snapshot | None,
        stages: Stages,
        check: Callable[[], None] = _nothing,
    ) -> Slot:
        """Lease a slot. Waiting until the pool has room for a slot and creating the slot are timed separately, and
        neither counts as the agent's time.

        `check` is called when there is room for the slot; if it raises, no slot is leased. Raises `TaskError` if the
        task needs a slot that cannot be created, for example because of its image or its list of hosts.
        """
        with uncharged(), stages.stage("admit") as stage:

            def admitted() -> None:
                check()
                stage.become("acquire")

            try:
                return await self.pool.acquire(
                    name, spec=spec, snapshot=snapshot, timeout_s=math.inf, admitted=admitted
                )
            except ConfigError as error:
                raise TaskError(f"no slot can be created for {name}: {error}") from error

    async def keep(self, group_id: str, index: int, snapshot: Snapshot | None, *, sealed: bool) -> Path | None:
        """Copy a rollout's sealed work into a folder below `kept`. If not `sealed`, copy the workspace that the rollout
        never touched. Returns the folder, which is empty for the bare image; None if `kept` is None."""
        if self.kept is None:
            return None
        folder = self.kept / quote(group_id, safe="") / (str(index) if sealed else f"{index}{UNTOUCHED}")
        await asyncio.to_thread(_emptied, folder)
        if snapshot is not None:
            await self.pool.save(snapshot, folder)
        return folder

    async def shared(self, key: str, prepare: Callable[[], Awaitable[Snapshot]]) -> Snapshot:
        """Return the shared snapshot of this key, after preparing it if it is missing. Raises the error of the
        preparation."""
        while True:
            known = self._shared.get(key)
            if known is None:
                return await self._prepare_shared(key, prepare)
            try:
                return await asyncio.shield(known)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not known.cancelled() or (task is not None and task.cancelling()):
                    raise
                # The group that prepared it did not finish, and this call was not cancelled, so prepare it here.

    async def _prepare_shared(self, key: str, prepare: Callable[[], Awaitable[Snapshot]]) -> Snapshot:
        future: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._shared[key] = future
        try:
            snapshot = await prepare()
        except (asyncio.CancelledError, SandboxError):
            del self._shared[key]
            future.cancel()
            raise
        except BaseException as error:
            future.set_exception(error)
            future.exception()  # marks the error as seen, since no other group may be waiting
            raise
        future.set_result(snapshot)
        return snapshot

    async def drop_lost(self, key: str) -> None:
        """Drop a shared snapshot that its backend has lost, so that the next `shared` prepares it again."""
        future = self._shared.get(key)
        snapshot = _result(future)
        if snapshot is not None and not await self.pool.holds(snapshot) and self._shared.get(key) is future:
            del self._shared[key]

    async def aclose(self) -> None:
        """Drop every shared snapshot. The groups that started from them have ended."""
        for future in self._shared.values():
            if (snapshot := _result(future)) is not None:
                await self.pool.forget(snapshot)
        self._shared.clear()


def _emptied(folder: Path) -> None:
    """Create an empty folder, in place of any that an earlier attempt left."""
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def _result(future: asyncio.Future[Snapshot] | None) -> Snapshot | None:
    """Return the snapshot if its preparation has succeeded, otherwise None."""
    if future is None or not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return future.result()
