"""Spreads the slots of one pool over several backends.

`docker=host1,host2 modal=overflow` names two backends: the first with two hosts, the second for slots that do not fit
into the first. The backend with the largest free share makes the next slot. A backend that fails is left out for a
while, and the other backends make the slots. A slot that starts from a snapshot is always made by the backend that has
the snapshot. The slots of a group are all made by one backend.

An overflow backend is started when it is first needed. At the start of the run, it is checked but not started; the
backend `local` is not checked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from palaestra_slots.core.errors import ConfigError, SandboxError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.remote import RemoteBackend
from palaestra_slots.sandbox.server_backend import ServerBackend, StartedBackend
from palaestra_slots.sandbox.slot import Backend, Change, Rung, Slot, SlotSpec, Snapshot, View

OVERFLOW = "overflow"
_LEFT_OUT_S = 30.0
_EPOCHS = 1 << 48
"""The number of epochs reserved for the leases of one backend; epochs are unique in a pool."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendName:
    """One word of a setting that names backends: `NAME`, `NAME=HOST,HOST` or `NAME=overflow`."""

    name: str
    hosts: tuple[str, ...] = ()
    overflow: bool = False


def parse_names(text: str) -> list[BackendName]:
    """Return the backends that a setting names. Raises `ConfigError` if all of them are for overflow."""
    found = []
    for word in text.split():
        name, _, rest = word.partition("=")
        words = [each for each in rest.split(",") if each]
        found.append(BackendName(name, tuple(each for each in words if each != OVERFLOW), OVERFLOW in words))
    if not any(not each.overflow for each in found):
        raise ConfigError(f"the backends {text!r} are all for overflow: name at least one without =overflow")
    return found


@dataclass
class Part:
    """One backend, with the slots and snapshots that it holds."""

    backend: Backend
    overflow: bool
    started: bool = False
    failed_at: float = -math.inf
    slots: set[int] = field(default_factory=set)
    snapshots: set[str] = field(default_factory=set)
    making: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def share(self) -> float:
        """The share of the backend's capacity that is in use; close to 0 if the backend has no limit."""
        capacity = self.backend.capacity
        used = len(self.slots) + self.making
        return used / capacity if capacity else used / 1e6

    @property
    def is_left_out(self) -> bool:
        return time.monotonic() - self.failed_at < _LEFT_OUT_S

    async def start(self) -> None:
        async with self.starting:
            if not self.started:
                await self.backend.start()
                self.started = True


class SpreadBackend(StartedBackend):
    """Slots of several backends. A backend in `overflow` makes a slot only when none of `backends` can. Raises
    `ConfigError` for a backend that is neither a `RemoteBackend` nor a `ServerBackend`."""

    name = "spread"

    def __init__(self, backends: Sequence[Backend], overflow: Sequence[Backend] = ()) -> None:
        self._parts = [Part(each, overflow=False) for each in backends]
        self._parts += [Part(each, overflow=True) for each in overflow]
        self._groups: dict[int, str] = {}  # the groups of slots, by the slots' epochs
        for number, part in enumerate(self._parts, 1):
            backend = part.backend
            if not isinstance(backend, RemoteBackend | ServerBackend):
                raise ConfigError(f"the backend {backend.name} cannot share a pool with other backends: use it alone")
            if isinstance(backend, RemoteBackend):
                backend.away_s = 0.0  # the other backends make slots in the meantime
            backend.begin_at(number * _EPOCHS)

    async def start(self) -> None:
        """Start every backend that is not for overflow, and check the overflow backends except `local`. Idempotent.

        A backend that does not start is left out; if none starts, the first error is raised. Raises `ConfigError` if an
        overflow backend fails its check.
        """
        own = [part for part in self._parts if not part.overflow]
        try:
            # All are awaited, even if one fails, because a backend that still starts could not be closed.
            found = await asyncio.gather(*(part.start() for part in own), return_exceptions=True)
            errors = [each for each in found if isinstance(each, BaseException)]
            for part, error in zip(own, found, strict=True):
                if isinstance(error, ConfigError | SandboxError):
                    self._leave_out(part, error)
                elif isinstance(error, BaseException):
                    raise error
            if len(errors) == len(own):
                raise errors[0]
            for part in self._parts:
                if part.overflow and isinstance(part.backend, RemoteBackend):
                    await part.backend.check_hosts()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End every backend. Idempotent."""
        await asyncio.gather(*(part.backend.aclose() for part in self._parts))
        for part in self._parts:
            part.started = False
            part.slots.clear()
            part.snapshots.clear()
        self._groups.clear()

    @property
    def rung(self) -> Rung:
        """The lowest isolation level of the backends that have started, or of all backends if none has started."""
        started = [part.backend.rung for part in self._parts if part.started]
        return min(started or [part.backend.rung for part in self._parts])

    @property
    def places_workspace(self) -> bool:
        """Whether slots of every backend can have their workspace at a second path (`SlotSpec.workspace`)."""
        return all(getattr(part.backend, "places_workspace", False) for part in self._parts)

    @property
    def capacity(self) -> int | None:
        """The maximum number of slots; None if one of the backends has no limit."""
        known = [part.backend.capacity for part in self._parts]
        return None if None in known else sum(each for each in known if each is not None)

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot:
        """Return a new slot on the backend that has the snapshot or, if no snapshot is given, on the backend with the
        largest free share. If that backend fails and no snapshot is given, the other backends are tried.

        Raises `ConfigError` if the backend that has the snapshot is not the one that makes the group's slots."""
        joined = self._maker_of_group(spec)
        if snapshot is not None or joined is not None:
            part = joined if snapshot is None else self._keeper(snapshot)
            assert part is not None
            if joined not in (None, part):
                raise ConfigError(
                    f"{trajectory_id} must start on the backend {part.backend.name}, which has its files, but the "
                    f"other slots of its group are on {joined.backend.name}: use one backend for tasks with services"
                )
            return await self._make_slot(part, spec, trajectory_id, snapshot)
        tried: list[Part] = []
        errors: list[Exception] = []
        while True:
            part = self._next_part(tried)
            if part is None:
                # The first error is that of the backend which had most room, so it says why the usual place failed.
                raise errors[0] if errors else SandboxError("no backend has room for a slot")
            try:
                return await self._make_slot(part, spec, trajectory_id, None)
            except (SandboxError, ConfigError) as error:
                tried.append(part)
                errors.append(error)
                if not isinstance(error, ConfigError):  # a ConfigError is a fault of the spec, not of the backend
                    self._leave_out(part, error)

    def _next_part(self, tried: Sequence[Part]) -> Part | None:
        """Return the next backend to try; None if no untried backend has room. A backend that is left out is tried only
        if there is no other."""
        left = [part for part in self._parts if part not in tried and part.share < 1]
        for overflow in (False, True):
            usable = [part for part in left if part.overflow is overflow and not part.is_left_out]
            if usable:
                return min(usable, key=lambda part: part.share)
        return min(left, key=lambda part: part.failed_at, default=None)

    async def _make_slot(self, part: Part, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None) -> Slot:
        part.making += 1
        try:
            await part.start()
            slot = await part.backend.create(spec, trajectory_id, snapshot)
            part.slots.add(slot.epoch)
            if spec.group is not None:
                self._groups[slot.epoch] = spec.group.group
            return slot
        finally:
            part.making -= 1

    async def destroy(self, slot: Slot) -> None:
        """End the slot and drop its files. Does nothing if the slot is already gone."""
        part = self._holder(slot)
        await part.backend.destroy(slot)
        self._forget_slot(part, slot)

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        """End the slot and return a snapshot whose topmost layer is the slot's changes, limited to `view`."""
        part = self._holder(slot)
        try:
            return _kept(part, await part.backend.seal(slot, view))
        finally:
            self._forget_slot(part, slot)

    async def checkpoint(self, slot: Slot) -> Snapshot:
        """Return a snapshot of the slot's current files. Raises `SandboxError` at levels below `userns`."""
        part = self._holder(slot)
        return _kept(part, await part.backend.checkpoint(slot))

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot:
        """Return a second snapshot of the same files, limited to `view`."""
        part = self._keeper(snapshot)
        return _kept(part, await part.backend.view(snapshot, view))

    async def changes(self, snapshot: Snapshot) -> list[Change]:
        """Return the changes in the topmost layer, sorted by path."""
        return await self._keeper(snapshot).backend.changes(snapshot)

    async def forget(self, snapshot: Snapshot) -> None:
        """Drop the snapshot's topmost layer once no slot uses that layer. Does nothing if the snapshot is already
        gone."""
        for part in self._parts:
            if snapshot.snapshot_id in part.snapshots:
                part.snapshots.discard(snapshot.snapshot_id)
                await part.backend.forget(snapshot)

    def stats(self) -> Mapping[str, JSON]:
        """Return the current counts, in total and for each backend."""
        parts = [dict(part.backend.stats()) for part in self._parts]
        sums = {name: sum(int(each.get(name, 0)) for each in parts) for name in ("slots", "lost", "containers")}
        return {"backend": self.name, "rung": self.rung.label, **sums, "backends": parts}

    def _holder(self, slot: Slot) -> Part:
        return self._part(slot.epoch)

    def _part(self, epoch: int) -> Part:
        return self._parts[epoch // _EPOCHS - 1]

    def _forget_slot(self, part: Part, slot: Slot) -> None:
        part.slots.discard(slot.epoch)
        self._groups.pop(slot.epoch, None)

    def _maker_of_group(self, spec: SlotSpec) -> Part | None:
        """Return the backend with the other slots of the spec's group; None if there are none."""
        if spec.group is None:
            return None
        made = (epoch for epoch, group in self._groups.items() if group == spec.group.group)
        return next(map(self._part, made), None)

    def _keeper(self, snapshot: Snapshot) -> Part:
        for part in self._parts:
            if snapshot.snapshot_id in part.snapshots:
                return part
        raise SandboxError(f"the snapshot {snapshot.snapshot_id} was lost with the backend that held it")

    def _leave_out(self, part: Part, error: Exception) -> None:
        _log.warning("the backend %s is left out for %g s: %s", part.backend.name, _LEFT_OUT_S, error)
        part.failed_at = time.monotonic()


def _kept(part: Part, snapshot: Snapshot) -> Snapshot:
    part.snapshots.add(snapshot.snapshot_id)
    return snapshot
