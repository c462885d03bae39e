"""Manages the slots and prepared workspaces of one run: leases, and preparation that several tasks share.

The environment names shared preparation, such as a repository with its dependencies installed, by a key. The first
group that needs a shared preparation does it in its own slot. The other groups wait, and every group starts its own
preparation from the same snapshot. If a shared preparation fails, every task that needs it fails with the same error,
and the preparation is not retried. The next group that needs the preparation repeats it in only three cases: after a
sandbox failure, after a cancellation, and if the snapshot was lost with its backend.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from palaestra.agent.seat import Seat
from palaestra.rollouts.limits import RunLimits
from palaestra.rollouts.watchdog import Stages
from palaestra_slots.core.clock import uncharged
from palaestra_slots.core.errors import (
    AcquireTimeout,
    ConfigError,
    ImageError,
    SandboxError,
    SlotLost,
    TaskError,
)
from palaestra_slots.core.io.durable_files import writing
from palaestra_slots.core.types import Task
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSource, SlotSpec, Snapshot, View

if TYPE_CHECKING:
    from palaestra_slots.sandbox.snapshots.cache import Prepared

logger = logging.getLogger(__name__)

UNSCORED_BYTES = 1 << 30
"""How much work of rollouts without a score a run keeps until they have been graded."""

UNTOUCHED = "-untouched"
"""The suffix of a kept workspace's name if the agent never used the workspace."""


def _nothing() -> None:
    pass


class Workspaces:
    """The workspaces of one run. `prepared`, if given, makes or returns what stores workspaces for other runs.
    `aclose` drops the shared snapshots.

    `kept` is the folder in which the work of rollouts is stored when it is sealed, so that it can be graded again. If
    it is None, no work is stored, except that of rollouts whose check failed: it is in the folder `unscored`, up to
    `UNSCORED_BYTES`. `unshared` says why the recipes of tasks have no effect in this run.
    """

    def __init__(
        self,
        pool: SlotSource,
        prepared: Callable[[], Prepared] | None = None,
        kept: Path | None = None,
        unscored: Path | None = None,
        unshared: str = "",
    ) -> None:
        self.pool = pool
        self.prepared = prepared
        self.kept = kept
        self._unscored = unscored
        self._unshared = unshared
        self._unscored_bytes = 0
        self._shared: dict[str, asyncio.Future[Snapshot]] = {}
        self._finishing: set[asyncio.Future[None]] = set()

    def keeping_nothing(self) -> Workspaces:
        """Return the same workspaces for rollouts whose work is not stored."""
        other = copy(self)
        other.kept = other._unscored = None
        return other

    def unshared(self) -> str:
        """Return, only once, why this run cannot share prepared workspaces with other runs; otherwise nothing."""
        why, self._unshared = self._unshared, ""
        return why

    @property
    def keeps_unscored(self) -> bool:
        """Whether there is a place, and room, for the work of a rollout whose check failed."""
        return self._unscored is not None and self._unscored_bytes < UNSCORED_BYTES

    async def keep_unscored(self, group_id: str, index: int, snapshot: Snapshot | None, *, sealed: bool) -> Path | None:
        """Do what `keep` does for a rollout whose check failed. Returns None if there is no room for its work."""
        alone = copy(self)
        alone.kept = self._unscored
        folder = await alone.keep(group_id, index, snapshot, sealed=sealed)
        if folder is None:
            return None
        size = await asyncio.to_thread(_bytes_in, folder)
        if self._unscored_bytes + size > UNSCORED_BYTES:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            return None
        self._unscored_bytes += size
        return folder

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

    async def lease_within(
        self, lender: Slot, name: str, spec: SlotSpec, snapshot: Snapshot | None, stages: Stages
    ) -> Slot | None:
        """Lease a slot that takes one of the places which the group of `lender` has; None if none of them is left."""
        with uncharged(), stages.stage("acquire"), suppress(AcquireTimeout):
            return await self.pool.add(lender, None, spec, name, snapshot)
        return None

    async def keep(self, group_id: str, index: int, snapshot: Snapshot | None, *, sealed: bool) -> Path | None:
        """Copy a rollout's sealed work into a folder below `kept`. If not `sealed`, copy the workspace that the rollout
        never touched. Returns the folder, which is empty for the bare image; None if `kept` is None."""
        if self.kept is None:
            return None
        folder = self.kept / quote(group_id, safe="") / (str(index) if sealed else f"{index}{UNTOUCHED}")
        await asyncio.to_thread(_emptied, folder)
        if snapshot is not None:
            await self.pool.snapshots.save(snapshot, folder)
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
            # Groups that wait prepare it themselves, because another attempt may succeed.
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
        snapshot = _finished_snapshot(future)
        # Another group may have prepared it again while this one waited for the answer.
        if snapshot is not None and not await self.pool.snapshots.holds(snapshot) and self._shared.get(key) is future:
            del self._shared[key]

    def finish_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Let work that nobody waits for, such as the end of a group's slots, go on in the background. A slot keeps its
        place in the pool until it has ended, which limits how much of this work there can be."""
        task = asyncio.ensure_future(work)
        self._finishing.add(task)
        task.add_done_callback(self._drop_finished)

    def _drop_finished(self, task: asyncio.Future[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._finishing.discard(task)

    async def finish(self) -> None:
        """Wait for the work in the background. Raises the first error in it."""
        while work := list(self._finishing):
            try:
                await asyncio.shield(asyncio.gather(*work))
            finally:
                self._finishing.difference_update(each for each in work if each.done())

    async def aclose(self) -> None:
        """Finish the work in the background, and drop every shared snapshot. The groups that started from them have
        ended."""
        await self.finish()
        for future in self._shared.values():
            if (snapshot := _finished_snapshot(future)) is not None:
                await self.pool.snapshots.forget(snapshot)
        self._shared.clear()


@contextmanager
def image_of(task: Task) -> Iterator[None]:
    """Turn an `ImageError` into a `TaskError` if the task names an image, so that one bad row does not end the run. An
    image of the settings concerns all tasks."""
    try:
        yield
    except ImageError as error:
        if task.image is None:
            raise
        raise TaskError(f"task {task.id}: {error}") from error


@dataclass(slots=True, eq=False)
class RolloutWorkspace:
    """The workspace of one rollout: where its seat gets a slot, and what becomes of the work.

    The agent's slot is described by `spec` and starts from `snapshot`, the group's prepared workspace (None for the
    bare image), or once from `forked`, the copy at the point at which the rollout continues another one. A run that
    ends, for which `limits` has the reason, leases no slot for a rollout that has not `begun`.
    """

    run: Workspaces
    task: Task
    group_id: str
    index: int
    spec: SlotSpec
    stages: Stages
    limits: RunLimits
    snapshot: Snapshot | None = None
    forked: Snapshot | None = None
    begun: bool = field(default=False, init=False)
    rung: Rung | None = field(default=None, init=False)
    """The isolation level of the agent's slot, once there was one."""
    kept: Path | None = field(default=None, init=False)
    """The folder in which the work is kept, if the run keeps workspaces."""
    closers: list[Callable[[], Awaitable[None]]] = field(default_factory=list, init=False)
    """Called when the rollout ends, the last one first, to release what its grading holds."""
    lender: Slot | None = field(default=None, init=False)
    """The agent's slot if its group has places for the slots that grading needs while the group runs."""
    _restored: Snapshot | None = field(default=None, init=False)
    _lost: str = field(default="", init=False)

    def begin(self) -> None:
        """Let the rollout finish although the run ends: it has a turn of its own."""
        self.begun = True

    def check_start(self) -> None:
        """Raise `CutShort` if the rollout has not begun and the run no longer starts rollouts."""
        if not self.begun:
            self.limits.check(begun=False)

    async def lease(self) -> Slot:
        """Lease the agent's slot."""
        forked, self.forked = self.forked, None
        slot = await self.lease_slot(f"{self.group_id}/{self.index}", self.spec, forked or self.snapshot)
        self.rung = slot.rung
        return slot

    async def lease_slot(self, name: str, spec: SlotSpec, snapshot: Snapshot | None) -> Slot:
        """Lease a slot for this rollout or its grading. Raises `CutShort` if the rollout may not start, and
        `SandboxError` if the work that is graded was lost."""
        if self._lost:
            raise SandboxError(self._lost)
        with image_of(self.task):
            if self.lender is not None:
                slot = await self.run.lease_within(self.lender, name, spec, snapshot, self.stages)
                if slot is not None:
                    return slot
            return await self.run.lease(name, spec, snapshot, self.stages, self.check_start)

    async def release(self, slot: Slot) -> None:
        """Take the agent's slot back."""
        await self.run.pool.release(slot)

    def use_image(self, image: str, seat: Seat) -> None:
        """Make the agent's slot from this image. Raises `TaskError` if the seat has its slot already."""
        if seat.slot is not None and image != self.spec.image:
            raise TaskError(f"{seat.name} has its slot already: register its image before the first command")
        self.spec = replace(self.spec, image=image)

    def restore(self, sealed: Snapshot | None, lost: str = "") -> None:
        """Let the next `seal` return this recorded work. If the work was not kept, `lost` says why, and a check that
        asks for a slot gets a `SandboxError`: an untouched workspace would look like work that was not done."""
        self._restored, self._lost = sealed, lost

    def continue_from(self, snapshot: Snapshot, seat: Seat) -> None:
        """Make the next slot a fork of this snapshot, with new tools."""
        seat.move()
        self.snapshot = snapshot

    async def seal(self, seat: Seat, view: View | None = None) -> Snapshot | None:
        """End the agent's slot and return a snapshot of its changes, limited to `view`; None if there is no slot. When
        recorded work is graded again, return the recorded snapshot instead."""
        await seat.end_tools()
        if self.forked is not None:  # the work of the continued rollout counts, even if this one added nothing
            await seat.sandbox()
        slot = await seat.leave()
        if self._restored is not None:
            restored, self._restored = self._restored, None
            return restored if view is None else await self.run.pool.snapshots.view(restored, view)
        if slot is None:
            self.kept = await self.run.keep(self.group_id, self.index, self.snapshot, sealed=False)
            return None
        with self.stages.stage("seal"):
            sealed = await self.run.pool.seal(slot, view)
            self.kept = await self.run.keep(self.group_id, self.index, sealed, sealed=True)
            return sealed

    async def keep_unscored(self, sealed: Snapshot | None) -> Path | None:
        """Keep the work of a rollout whose check failed. Returns the folder, or None if there is no room for it."""
        snapshot = self.snapshot if sealed is None else sealed
        self.kept = await self.run.keep_unscored(self.group_id, self.index, snapshot, sealed=sealed is not None)
        return self.kept

    async def checkpoint(self, seat: Seat) -> Snapshot | None:
        """Return a snapshot of the agent's changes, as `seal` does, but leave the agent's slot and its processes
        running; None if there is no slot or a running slot cannot be copied."""
        if self.forked is not None:  # as in `seal`
            await seat.sandbox()
        if seat.slot is None or self._restored is not None:
            return None
        with self.stages.stage("seal"):
            try:
                snapshot = await self.run.pool.checkpoint(seat.slot)
            # Also a SandboxError, but one that ends the rollout. The others mean that this backend or level copies no
            # running slot.
            except SlotLost:
                raise
            except SandboxError as error:
                logger.warning("%s: its running sandbox cannot be copied: %s", seat.name, error)
                return None
            self.kept = await self.run.keep(self.group_id, self.index, snapshot, sealed=True)
            return snapshot

    async def keep_files(self, seat: Seat) -> None:
        """Before work is graded in its own slot, keep a copy of its files if the run keeps workspaces."""
        if self.run.kept is None:
            return
        sealed = seat.slot is not None
        snapshot = self.snapshot if seat.slot is None else await self.run.pool.checkpoint(seat.slot)
        try:
            self.kept = await self.run.keep(self.group_id, self.index, snapshot, sealed=sealed)
        finally:
            if sealed and snapshot is not None:
                await self.run.pool.snapshots.forget(snapshot)


def _bytes_in(folder: Path) -> int:
    """Return the size of the files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


def _emptied(folder: Path) -> None:
    """Create an empty folder, in place of any that an earlier attempt left."""
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def _finished_snapshot(future: asyncio.Future[Snapshot] | None) -> Snapshot | None:
    """Return the snapshot if its preparation has succeeded, otherwise None."""
    if future is None or not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return future.result()
