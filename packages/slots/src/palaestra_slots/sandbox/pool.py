"""Leases the slots of one run in the order of requests, up to a limit.

Each lease gets a new slot, which ends with the lease: no workspace is reused or cleaned. A pool has a fixed number of
places, and each leased slot takes one of them. The lease of a group of slots gets places for all of them at the same
time, so that no two groups wait for each other. A timeout limits the time of waiting for a free place, not the time of
making the slot. While memory is short, a caller gets a place only if few slots are in use (`admission.py`). A slot that
cannot be ended is quarantined: its place becomes free, and later releases try again to end the slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import AcquireTimeout, ConfigError, InfraError, SandboxError, SlotLost
from palaestra_slots.core.io import plugins
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox import admission
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import (
    Backend,
    Change,
    ExecutionResult,
    GroupAddress,
    Rung,
    Shell,
    Slot,
    SlotSpec,
    SlotState,
    Snapshot,
    View,
)

_log = logging.getLogger(__name__)

_REMEMBERED_WAITS = 1000
USUAL_TIMEOUT_S = 60.0
"""The time limit, in seconds, of an `execute` call that sets no timeout."""


_LOOK_AGAIN_S = 0.5
"""Seconds between memory checks while callers wait for memory and no slot ends."""


class SlotPoolConfig(BaseModel):
    """The maximum number of slots of a pool, and the time to wait for a slot. Fields that also exist in Atropos and
    Hermes have the same names and defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_slots: int | None = Field(default=None, ge=1)
    """The maximum number of leased slots. Default: as many as memory and open files allow, up to 512."""
    acquire_timeout: float = Field(default=30.0, gt=0)
    """Seconds that `acquire` waits for a free place before it raises `AcquireTimeout`."""
    slots_per_container: int = Field(default=10, ge=1)
    """A setting of Atropos and Hermes. If it or `max_containers` is set, `max_slots` defaults to their product."""
    max_containers: int = Field(default=10, ge=1)
    """See `slots_per_container`."""
    nomad_address: str = "http://localhost:4646"
    """This field and all following fields are the settings of Atropos and Hermes for the Nomad backend. A pool that
    sets one of them, and is given no backend, runs its slots on Nomad."""
    job_id: str = "atropos-sandbox"
    datacenter: str = "dc1"
    image: str = "atropos-sandbox:local"
    privileged: bool = False
    cpu: int = 500
    memory: int = 512
    min_containers: int = 1
    health_check_interval: float = 30.0
    scale_cooldown: float = 60.0
    purge_job_on_start: bool = False
    driver: str = "docker"
    """Nomad's task driver: `docker` or `raw_exec`."""

    @model_validator(mode="before")
    @classmethod
    def _count_containers(cls, given: JSON) -> JSON:
        if not isinstance(given, Mapping) or "max_slots" in given:
            return given
        sizes = [given.get(name) for name in ("slots_per_container", "max_containers")]
        if all(size is None for size in sizes):
            return given
        slots, containers = (10 if size is None else int(size) for size in sizes)
        return {**given, "max_slots": slots * containers}

    def backend(self) -> Backend:
        """Return the Nomad backend if a field for Nomad is set, otherwise the backend for this machine."""
        if not self._of_nomad():
            return LocalBackend()
        make = plugins.load_named("palaestra.pool_backends", "nomad", "the backend nomad")
        return cast("Callable[[SlotPoolConfig], Backend]", make)(self)

    def check(self, backend: Backend) -> None:
        """Raise `ConfigError` if a field for Nomad is set and the pool's backend is another one."""
        names = self._of_nomad()
        if names and backend.name != "nomad":
            raise ConfigError(
                f"SlotPoolConfig sets {', '.join(names)}, which only the nomad backend reads, but the pool's backend "
                f"is {backend.name}: leave them out, or give the pool no backend"
            )

    def _of_nomad(self) -> list[str]:
        return [name for name in NOMAD_FIELDS if name in self.model_fields_set]


NOMAD_FIELDS = (
    "nomad_address", "job_id", "datacenter", "image", "privileged", "cpu", "memory", "min_containers",
    "health_check_interval", "scale_cooldown", "purge_job_on_start", "driver",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    places: int
    future: asyncio.Future[None]


@dataclass(slots=True)
class _Holding:
    slot: Slot
    since: float
    group: GroupAddress | None = None
    added: list[Slot] = field(default_factory=list)
    begun: int = 1
    """The number of places of the group that slots use, or for which they are being made."""
    lender: _Holding | None = None
    """The lease whose place it uses; None if it has its own."""

    @property
    def places(self) -> int:
        """The number of places that the lease takes."""
        return 1 if self.group is None else self.group.members


class SlotQueue:
    """The places of a pool, and the callers that wait for them: first come, first served. While memory is short, places
    are given only if few are in use. `total` is the number of places, `memory` returns the available bytes."""

    def __init__(self, total: int, memory: Callable[[], int]) -> None:
        self.total = total
        self.free = total
        """The number of free places; negative while more slots are leased than the pool has places."""
        self._memory = memory
        self._unchecked = admission.unchecked_slots()
        self._waiting: deque[_Waiter] = deque()
        self._looking: asyncio.TimerHandle | None = None

    @property
    def used(self) -> int:
        """The number of places that are taken."""
        return self.total - self.free

    @property
    def waiting(self) -> int:
        """The number of callers that wait."""
        return len(self._waiting)

    def resize(self, total: int) -> None:
        """Make all places free, of which there are now `total`."""
        self.free = self.total = total

    def close(self) -> None:
        """Let waiting callers fail with `SandboxError`."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        for waiter in self._waiting:
            if not waiter.future.done():
                waiter.future.set_exception(SandboxError("the slot pool was closed"))

    async def take(self, places: int, timeout_s: float) -> None:
        """Take places, at the latest after `timeout_s` seconds. Raises `TimeoutError`."""
        # A caller never passes those that wait, even if they wait for more places than this one needs.
        if not self._waiting and self._has(places):
            self.free -= places
            return
        waiter = _Waiter(places, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._give_out()
        try:
            async with asyncio.timeout(timeout_s if timeout_s < math.inf else None):
                await waiter.future
        except BaseException:
            done = waiter.future.done() and not waiter.future.cancelled()
            if done and waiter.future.exception() is None:
                self.give(places)  # they became free together with the timeout or the cancellation
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._give_out()  # the next waiter may need fewer places

    def take_up(self) -> None:
        """Take a place for a slot that exists already, even if none is free."""
        self.free -= 1

    def give(self, places: int) -> None:
        """Give places back, and pass free ones to the first callers in the queue."""
        # A pool that was closed meanwhile has made all its places free already.
        self.free = min(self.free + places, self.total)
        self._give_out()

    def _has(self, places: int) -> bool:
        """Return whether these places may be taken now: they are free, and either fewer than `unchecked_slots` slots
        are in use or memory is not short."""
        if self.free < places:  # `take_up` can make it negative
            return False
        return self.used < self._unchecked or self._memory() >= admission.RESERVE_BYTES

    def _give_out(self) -> None:
        """Pass free places to the first waiters in the queue; if memory is too short for that, check again later."""
        while self._waiting and self._has(self._waiting[0].places):
            waiter = self._waiting.popleft()
            if not waiter.future.done():
                self.free -= waiter.places
                waiter.future.set_result(None)
        # There are places, so memory is short, and nothing reports when it no longer is.
        if self._waiting and self.free >= self._waiting[0].places and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        self._give_out()


class Snapshots:
    """The snapshots of a backend. Only the local backend can save and load them, or continue their changes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def continued(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot such that slots which start from it count its changed files as their own changes. Only
        the local backend can do that; for others, return the snapshot unchanged."""
        return replace(snapshot, continued=True) if isinstance(self._backend, LocalBackend) else snapshot

    async def compose(self, spec: SlotSpec, files: Mapping[str, bytes]) -> Snapshot | None:
        """Return the snapshot of a new slot in which only these files were written, without making the slot. Returns
        None if that takes a slot, which is so for all backends but the local one. Raises the errors of
        `Slot.write_bytes`."""
        return await self._backend.compose(spec, files) if isinstance(self._backend, LocalBackend) else None

    @property
    def can_save(self) -> bool:
        """Whether the backend is the local one, so that `save` and `load` work."""
        return isinstance(self._backend, LocalBackend)

    async def save(self, snapshot: Snapshot, folder: Path) -> int:
        """Copy a snapshot with its layers to an empty folder on this machine. Returns the total size of the snapshot's
        files in bytes. Raises `ConfigError` if the backend is not the local one."""
        return await self._local().save(snapshot, str(folder))

    async def load(self, folder: Path, spec: SlotSpec) -> Snapshot:
        """Return the snapshot that was saved in a folder. The folder is used in place. Raises FileNotFoundError if the
        folder is gone, and `ConfigError` if the backend is not the local one."""
        return await self._local().load(str(folder), spec)

    def _local(self) -> LocalBackend:
        if not isinstance(self._backend, LocalBackend):
            raise ConfigError(f"the {self._backend.name} backend cannot keep workspaces; only the local backend can")
        return self._backend

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot:
        """Return a snapshot that shows only part of the changes in the topmost layer."""
        return await self._backend.view(snapshot, view)

    async def holds(self, snapshot: Snapshot) -> bool:
        """Return whether the snapshot still exists. It may be lost, for example because the slot server that held it
        has died."""
        try:
            await self._backend.changes(snapshot)
        except SandboxError:
            return False
        return True

    async def forget(self, snapshot: Snapshot) -> None:
        """Drop the snapshot's topmost layer, or all layers of a loaded snapshot. A failure is only logged, because the
        layer may be gone already."""
        try:
            await self._backend.forget(snapshot)
        except SandboxError as error:
            _log.warning("dropping the snapshot %s failed: %s", snapshot.snapshot_id, error)


class SlotLeases:
    """The leased slots and their places in the queue, and the ended slots that could not be ended yet, which are
    quarantined. Each slot may have a stateful shell."""

    def __init__(self, backend: Backend, queue: SlotQueue, clock: Clock) -> None:
        self.begun = 0
        """The number of leases so far."""
        self._backend, self._queue, self._clock = backend, queue, clock
        self._held: dict[int, _Holding] = {}
        self._shells: dict[int, Shell] = {}
        self._quarantine: dict[int, Slot] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def quarantined(self) -> int:
        """The number of slots in quarantine."""
        return len(self._quarantine)

    @property
    def executing(self) -> int:
        """The number of leased slots in which a command runs."""
        return sum(held.slot.state is SlotState.EXECUTING for held in self._held.values())

    def begin(self, slot: Slot, group: GroupAddress | None = None, lender: _Holding | None = None) -> None:
        """Begin the lease of a slot, whose places were taken from the queue, or is one of the `lender`."""
        self._held[slot.epoch] = _Holding(slot, self._clock.monotonic(), group, lender=lender)
        self.begun += 1

    def take_up(self, slot: Slot) -> None:
        """Count a slot taken over from a service as leased; it is released like any other."""
        self._queue.take_up()
        self.begin(slot)

    def holding(self, slot: Slot) -> _Holding | None:
        """Return the lease of a slot, or None if it has ended."""
        return self._held.get(slot.epoch)

    async def stateful_shell(self, slot: Slot) -> Shell:
        """Return the slot's stateful shell, opening it on first use."""
        shell = self._shells.get(slot.epoch)
        if shell is None:
            opened = await slot.shell()
            shell = self._shells.setdefault(slot.epoch, opened)
            if shell is not opened:  # another call has opened a shell in the meantime
                await opened.aclose()
        return shell

    async def end(self, slot: Slot) -> None:
        """End a lease and its slots, and try again to end those in quarantine. Does nothing if the lease has ended."""
        held = self._held.pop(slot.epoch, None)
        if held is None:
            return
        self.close_shell(slot)
        try:
            await asyncio.gather(self._end_added(held), self.destroy(slot))
            while self._quarantine:
                _, quarantined = self._quarantine.popitem()  # removed, so that no other release tries it too
                if not await self.destroy(quarantined):
                    return
        finally:
            self._give_back(held)

    @contextlib.asynccontextmanager
    async def ending(self, slot: Slot) -> AsyncIterator[None]:
        """End a lease whose slot the block ends; its places become free afterwards."""
        held = self._held.pop(slot.epoch, None)
        self.close_shell(slot)
        try:
            if held is not None:
                await self._end_added(held)
            yield
        finally:
            if held is not None:
                self._give_back(held)

    def _give_back(self, held: _Holding) -> None:
        """Make the places of a lease that has ended free: for all, or for the lender of the place."""
        if held.lender is None:
            self._queue.give(held.places)
            return
        held.lender.begun -= 1
        held.lender.added.remove(held.slot)

    def close_shell(self, slot: Slot) -> None:
        """Forget the shell of a slot that ends."""
        self._shells.pop(slot.epoch, None)

    async def _end_added(self, held: _Holding) -> None:
        for each in held.added:
            self._held.pop(each.epoch, None)
            self.close_shell(each)
        await asyncio.gather(*map(self.destroy, held.added))

    async def destroy(self, slot: Slot) -> bool:
        """End a slot. Return False if it cannot be ended now; the slot is then quarantined."""
        try:
            await self._backend.destroy(slot)
        except SlotLost:
            return True  # nothing of the slot is left
        except SandboxError as error:
            _log.warning("%s could not be ended and is quarantined: %s", slot.slot_id, error)
            self._quarantine[slot.epoch] = slot
            return False
        return True

    def clear(self) -> None:
        """Forget all leases, because the backend has ended."""
        self._held.clear()
        self._shells.clear()
        self._quarantine.clear()

    def holders(self) -> list[dict[str, JSON]]:
        """Return for each leased slot its id, its holder and the seconds for which it has been held."""
        now = self._clock.monotonic()
        return [
            {
                "slot_id": held.slot.slot_id,
                "trajectory_id": held.slot.trajectory_id,
                "held_s": round(now - held.since, 3),
            }
            for held in self._held.values()
        ]

    def explain(self, trajectory_id: str, timeout_s: float) -> str:
        """Return why no slot became free in time."""
        now = self._clock.monotonic()
        oldest = sorted(self._held.values(), key=lambda held: held.since)[:3]
        holders = ", ".join(f"{held.slot.trajectory_id} for {now - held.since:.0f}s" for held in oldest)
        short = f"memory is short and {self._queue.used} of {self._queue.total} slots are in use"
        why = short if self._queue.free > 0 else f"all {self._queue.total} are in use"
        return (
            f"no slot became free for {trajectory_id} in {timeout_s:g}s: {why}"
            f"{f' (longest by {holders})' if holders else ''}; "
            "raise max_slots or acquire_timeout, or lower the concurrency"
        )


class SlotPool:
    """Implements `SlotSource`. `async with` starts the backend, and ends it with every slot when the block ends.

    `backend` defaults to Nomad if `config` sets a field for Nomad, and otherwise to this machine at the best isolation
    level. `memory` returns the bytes of memory that are available on this machine. If `start_when_used` is true,
    the first `acquire` starts the pool. `leases` has the leased slots, and `snapshots` the backend's snapshots.
    Raises `ConfigError` if `config` sets a field for Nomad and `backend` is another one.
    """

    default_timeout_s: float = USUAL_TIMEOUT_S
    """The time limit of a call that sets no timeout, in seconds."""

    def __init__(
        self,
        config: SlotPoolConfig | None = None,
        backend: Backend | None = None,
        *,
        clock: Clock | None = None,
        memory: Callable[[], int] | None = None,
        start_when_used: bool = False,
    ) -> None:
        self.config = config = config or SlotPoolConfig()
        self.backend = backend or config.backend()
        config.check(self.backend)
        self.limit = admission.SlotLimit(config.max_slots or admission.DEFAULT_SLOTS, "the pool has not started")
        """The maximum number of slots and the reason for it; known once the pool has started."""
        self._memory = memory = memory or admission.MemoryGauge(admission.available_memory)
        self._clock = clock or SystemClock()
        self._queue = SlotQueue(self.limit.slots, memory)
        self.leases = SlotLeases(self.backend, self._queue, self._clock)
        self.snapshots = Snapshots(self.backend)
        self._waits: deque[float] = deque(maxlen=_REMEMBERED_WAITS)
        self._makes: deque[float] = deque(maxlen=_REMEMBERED_WAITS)
        self._timeouts = 0
        self._started = False
        self._first = asyncio.Lock() if start_when_used else None
        self.images: dict[str, str] = {}
        """The images that `register_image` has set, by trajectory."""

    @property
    def rung(self) -> Rung:
        """The isolation level in force."""
        return self.backend.rung

    async def start(self) -> None:
        """Start the backend. If it cannot start, raises its error, such as `IsolationUnavailable`. Idempotent."""
        await self.backend.start()
        if not self._started:
            files = admission.open_more_files()
            self.limit = admission.slot_limit(self.config.max_slots, memory=self._memory(), files=files)
            if (capacity := self.backend.capacity) is not None and capacity < self.limit.slots:
                self.limit = admission.SlotLimit(
                    capacity, f"the {self.backend.name} backend offers no more slots at {self.rung.label}"
                )
            self._queue.resize(self.limit.slots)
        self._started = True

    async def aclose(self) -> None:
        """End every slot and the backend. Waiting `acquire` calls raise `SandboxError`. Idempotent."""
        self._started = False
        self._queue.close()
        await self.backend.aclose()
        self.leases.clear()
        self._queue.resize(self._queue.total)

    async def stop(self, purge_job: bool = False, *, purge: bool = False) -> None:
        """End every slot and the backend, as `aclose` does. `purge_job` (or `purge`) also removes the pool's jobs from
        Nomad's list."""
        if (purge_job or purge) and hasattr(self.backend, "purge"):
            self.backend.purge = True
        await self.aclose()

    async def __aenter__(self) -> SlotPool:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def acquire(
        self,
        trajectory_id: str,
        *,
        spec: SlotSpec | None = None,
        snapshot: Snapshot | None = None,
        timeout_s: float | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> Slot:
        """Return a new slot. If a snapshot is given, the slot starts from it. `spec` defaults to the snapshot's spec
        or, without a snapshot, to `SlotSpec()`.

        Waits up to `timeout_s` seconds for a free place (default: `acquire_timeout`), then calls `admitted` and makes
        the slot. If `admitted` raises an exception, the place becomes free again. Raises `AcquireTimeout` if the caller
        gets no place in time. A spec with a place in a group waits for as many places as the group has members; raises
        `ConfigError` if the pool has fewer.
        """
        timeout_s = self.config.acquire_timeout if timeout_s is None else timeout_s
        if not timeout_s >= 0:  # also true for NaN
            raise ValueError(f"timeout_s must be a non-negative number, but is {timeout_s}")
        if self._first is not None:
            async with self._first:
                await self.start()
        if not self._started:
            raise SandboxError("the slot pool is not running; call start() first")
        wanted = spec or (snapshot.spec if snapshot is not None else SlotSpec())
        if wanted.group is not None and not wanted.group.group:
            wanted = replace(wanted, group=replace(wanted.group, group=f"group-{os.urandom(8).hex()}"))
        places = 1 if wanted.group is None else wanted.group.members
        if places > self.total_slots:
            raise ConfigError(f"{trajectory_id} needs {places} slots together, but the pool has {self.total_slots}")
        asked = self._clock.monotonic()
        try:
            await self._queue.take(places, timeout_s)
        except TimeoutError as error:
            # Errors of ours are TimeoutErrors too, and their message already says why there is no place.
            if isinstance(error, SandboxError):
                raise
            self._timeouts += 1
            raise AcquireTimeout(self.leases.explain(trajectory_id, timeout_s)) from None
        self._waits.append(self._clock.monotonic() - asked)
        try:
            if admitted is not None:
                admitted()
            begun = self._clock.monotonic()
            slot = await self.make(wanted, trajectory_id, snapshot)
            self._makes.append(self._clock.monotonic() - begun)
        # Also for a cancelled caller, who would otherwise keep the places for ever.
        except BaseException:
            self._queue.give(places)
            raise
        self.leases.begin(slot, wanted.group)
        return slot

    async def add(
        self, slot: Slot, number: int | None, spec: SlotSpec, name: str, snapshot: Snapshot | None = None
    ) -> Slot:
        """Return another slot of a group whose first slot is leased; it ends with that lease. `number` is its number in
        the group. Raises `ConfigError` if the group has its members already.

        If `number` is None, the slot uses a place of the group but is not in its network, and is released as any other,
        after which its place is the group's again. Raises `AcquireTimeout` if no place is left.
        """
        held = self.leases.holding(slot)
        if number is None and (held is None or held.begun >= held.places):
            raise AcquireTimeout(f"the group of {slot.slot_id} has no place for {name}")
        if held is None:
            raise SandboxError(f"the lease of {slot.slot_id} has ended, so no slot can be added to it")
        if held.group is None or held.begun >= held.places:
            raise ConfigError(f"the group of {slot.slot_id} has its {held.places} slots already")
        # Counted before the slot exists, so that concurrent calls together stay within the group's places.
        held.begun += 1
        group = None if number is None else replace(held.group, number=number)
        try:
            added = await self.backend.create(replace(spec, group=group), name, snapshot)
        except BaseException:
            held.begun -= 1
            raise
        # The end of the lease meanwhile could not end a slot that did not exist yet.
        if self.leases.holding(slot) is not held:
            await self.leases.destroy(added)
            raise SandboxError(f"the lease of {slot.slot_id} ended while a slot was added to it")
        held.added.append(added)
        if number is None:
            self.leases.begin(added, lender=held)
        return added

    def register_image(self, trajectory_id: str, image: str) -> None:
        """Set the image of a trajectory's slots until the next release of one, unless the spec or a snapshot names
        one."""
        self.images[trajectory_id] = image

    async def make(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None) -> Slot:
        """Have the backend make a slot for a caller that has a place. Subclasses may change the spec."""
        if spec.image is None and snapshot is None and trajectory_id in self.images:
            spec = replace(spec, image=self.images[trajectory_id])
        return await self.backend.create(spec, trajectory_id, snapshot)

    async def release(self, slot: Slot, reset_workspace: bool = False) -> None:
        """End a lease and its slot. Does nothing if the lease has already ended.

        `reset_workspace` exists only for compatibility and has no effect, because a workspace is never reused.
        """
        if self.leases.holding(slot) is not None:
            self.images.pop(slot.trajectory_id, None)
        await self.leases.end(slot)

    async def execute(
        self, slot: Slot, tool: str, args: Mapping[str, JSON], timeout: float | None = None
    ) -> ExecutionResult:
        """Run `bash`, `bash_stateful`, `read_file` or `write_file` in a leased slot. Raises `InfraError`; any other
        failure is reported in the result.

        `timeout` is in seconds and defaults to `default_timeout_s`. A timeout in `args` takes precedence over it. For
        `bash`, standard error is also returned separately from standard output.
        """
        # Imported here, because rollouts have tools of their own.
        from palaestra_slots.sandbox.slot_tools import run_slot_tool

        return await run_slot_tool(
            slot, lambda: self.leases.stateful_shell(slot), tool, args, timeout or self.default_timeout_s
        )

    async def execute_batch(
        self,
        requests: Sequence[tuple[Slot, str, Mapping[str, JSON]]],
        timeout: float | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[ExecutionResult]:
        """Run several calls concurrently and return their results in the order of `requests`. A call that fails with an
        `InfraError` gives a result with that error, so that the other results are not lost. `timeout_s` is another name
        for `timeout`."""
        from palaestra_slots.sandbox.slot_tools import tool_result

        timeout = timeout_s if timeout is None else timeout

        async def execute_request(slot: Slot, tool: str, args: Mapping[str, JSON]) -> ExecutionResult:
            try:
                return await self.execute(slot, tool, args, timeout)
            except InfraError as error:
                return tool_result(error=f"{type(error).__name__}: {error}")

        return list(await asyncio.gather(*(execute_request(*request) for request in requests)))

    async def read_artifact(
        self,
        slot: Slot,
        path: str,
        *,
        encoding: Literal["text", "base64"] = "text",
        max_bytes: int | None = None,
        include_sha256: bool = False,
    ) -> dict[str, JSON]:
        """Return a file of the workspace in the format of `ArtifactReadResponsePayload`. If the file cannot be read,
        the response has an `error`."""
        from palaestra_slots.sandbox import artifacts  # few runs need it

        request = artifacts.ArtifactReadRequestPayload(
            trajectory_id=slot.trajectory_id, path=path, encoding=encoding, max_bytes=max_bytes,
            include_sha256=include_sha256,
        )  # fmt: skip
        work = artifacts.read(slot, request)
        return (await artifacts.or_error(work, artifacts.ArtifactReadResponsePayload)).model_dump()

    async def list_artifacts(
        self, slot: Slot, path: str = ".", *, recursive: bool = False, max_entries: int | None = None
    ) -> dict[str, JSON]:
        """Return the entries of a directory of the workspace in the format of `ArtifactListResponsePayload`. If the
        directory cannot be read, the response has an `error`."""
        from palaestra_slots.sandbox import artifacts  # few runs need it

        request = artifacts.ArtifactListRequestPayload(
            trajectory_id=slot.trajectory_id, path=path, recursive=recursive, max_entries=max_entries
        )
        work = artifacts.list_entries(slot, request)
        return (await artifacts.or_error(work, artifacts.ArtifactListResponsePayload)).model_dump()

    async def archive_artifacts(
        self,
        slot: Slot,
        path: str = ".",
        *,
        archive_format: Literal["tar.gz", "tgz"] = "tar.gz",
        max_bytes: int | None = None,
        max_entries: int | None = None,
    ) -> dict[str, JSON]:
        """Return a file or directory of the workspace as a compressed tar file in base64, in the format of
        `ArtifactArchiveResponsePayload`. If the archive cannot be made, the response has an `error`."""
        from palaestra_slots.sandbox import artifacts  # few runs need it

        request = artifacts.ArtifactArchiveRequestPayload(
            trajectory_id=slot.trajectory_id, path=path, format=archive_format, max_bytes=max_bytes,
            max_entries=max_entries,
        )  # fmt: skip
        work = artifacts.archive(slot, request)
        return (await artifacts.or_error(work, artifacts.ArtifactArchiveResponsePayload)).model_dump()

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        """End a lease and return the changes of its slot as a snapshot. If `view` is given, the snapshot has only that
        part of the changes."""
        async with self.leases.ending(slot):
            return await self.backend.seal(slot, view)

    async def checkpoint(self, slot: Slot, *, continued: bool = False) -> Snapshot:
        """Return a slot's current files as a snapshot. The lease continues, so any step of a rollout can be forked.

        If `continued` is true, slots that start from the snapshot count its changed files as their own changes. Raises
        `ConfigError` if `continued` is set and the backend is not the local one.
        """
        if not continued:
            return await self.backend.checkpoint(slot)
        if not isinstance(self.backend, LocalBackend):
            raise ConfigError(
                f"the {self.backend.name} backend cannot continue a slot's changes in another slot; "
                "only the local backend can"
            )
        return replace(await self.backend.checkpoint(slot), continued=True)

    async def changes(self, snapshot: Snapshot) -> list[Change]:
        """Return the changes in the topmost layer of a snapshot."""
        return await self.backend.changes(snapshot)

    @property
    def total_slots(self) -> int:
        """The maximum number of slots."""
        return self._queue.total

    @property
    def available_slots(self) -> int:
        """The number of free places."""
        return max(0, self._queue.free)

    @property
    def acquired_slots(self) -> int:
        """The number of leased slots."""
        return len(self.leases)

    def get_stats(self) -> Mapping[str, JSON]:
        """Return counts, waiting times in seconds, and the backend's own statistics."""
        waits, makes = sorted(self._waits), sorted(self._makes)
        of_backend = dict(self.backend.stats())
        executing = self.leases.executing
        return {
            "total_slots": self.total_slots,
            "available_slots": self.available_slots,
            "acquired_slots": self.acquired_slots,
            "slots_by_state": {
                "available": self.available_slots,
                "acquired": self.acquired_slots - executing,
                "executing": executing,
            },
            "containers": of_backend.get("containers", 0),
            "waiting": self._queue.waiting,
            "leases": self.leases.begun,
            "timeouts": self._timeouts,
            "wait_p50_s": _quantile(waits, 0.5),
            "wait_p99_s": _quantile(waits, 0.99),
            "make_p50_s": _quantile(makes, 0.5),
            "make_p99_s": _quantile(makes, 0.99),
            "quarantined": self.leases.quarantined,
            "started": self._started,
            "backend": of_backend,
        }

    def get_status(self) -> Mapping[str, JSON]:
        """Return the statistics, and for each leased slot its holder and the time for which it has been held."""
        return {**self.get_stats(), "holders": self.leases.holders()}


ToolBackend = SlotPool
"""The name that Atropos and Hermes use for the type that `create_tool_backend` returns."""


def _quantile(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 6) if ordered else 0.0
