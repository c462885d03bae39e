"""Runs slots in containers or on other machines. This module calls each container or machine a *place*. A place runs
one slot server with many slots.

Most backends start a place by a local command whose standard input and output are the stream to its server (`docker run
-i`, `ssh`). Such a place ends when that stream ends, so nothing is left of it when this process is killed. The slots of
a place are isolated from each other at the level that the server reaches in that place (`backends/local.py` describes
the levels); the platform isolates the place itself.

Slots that start from a snapshot start in the place that made it. If a place dies, its slots and snapshots are lost, and
the next request for a slot starts a new place. A host whose places do not start is left out for a while if there is
another host.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from palaestra_slots.core.errors import ConfigError, SandboxError, SlotLost
from palaestra_slots.core.io.host_process import run_process
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON, Network
from palaestra_slots.sandbox.creation_gate import CreationGate
from palaestra_slots.sandbox.remote.remote_client import GONE_S, SILENCE_S, RemoteClient
from palaestra_slots.sandbox.server_backend import ServerBackend, StartedBackend, allowed_hosts, environment
from palaestra_slots.sandbox.slot import Change, Mount, Rung, Slot, SlotSpec, Snapshot, View

_LEFT_OUT_S = 30.0
"""Seconds for which a host is skipped after a failure."""

_ASK_S = 1.0
"""Seconds between checks of a host that does not answer."""

_EPOCHS = 1 << 32
"""The number of epochs reserved for the leases of one place."""

_numbers = itertools.count()
"""Numbers the places of all backends of this process, so that no two slots have the same epoch."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlaceSpec:
    """The settings with which a place is started. `image` and `host` are names that the platform knows; an empty `host`
    means the platform's default.

    `root` is a directory in the place whose copy-on-write view is the root of its slots. If it is None, slots see the
    place's own system directories.
    """

    host: str = ""
    image: str | None = None
    network: bool = False
    mounts: tuple[Mount, ...] = ()
    root: str | None = None


class Place(ServerBackend):
    """One place, and the slot server in it."""

    def __init__(
        self, backend: RemoteBackend, spec: PlaceSpec, number: int, *, rung: Rung | None, require: Rung | None
    ) -> None:
        super().__init__(rung=rung, require=require)
        self.name, self.spec, self.where = backend.name, spec, f"with the backend {backend.name}"
        self.in_image = f" in the image {spec.image}" if spec.image else ""
        self.slots: set[int] = set()
        """The epochs of the place's leased slots."""
        self.snapshots: set[str] = set()
        self.starting = 0
        """The number of slots that are being made."""
        self._backend = backend
        self._last_epoch = number * _EPOCHS
        self._opening = asyncio.Lock()
        self.begun_at: float | None = None
        """The monotonic time at which the place began to start; None before that."""
        self._starting = asyncio.Lock()

    @property
    def level_fix(self) -> str:
        return self._backend.level_fix

    @property
    def image_has_accounts(self) -> bool:
        root = self.spec.root
        return root is not None and os.path.lexists(os.path.join(root, "etc/shadow"))

    @property
    def idle(self) -> bool:
        """Whether no slot and no snapshot needs the place."""
        return not self.slots and not self.snapshots and not self.starting

    @property
    def load(self) -> int:
        """The number of slots that the place has or will have."""
        return len(self.slots) + self.starting

    @property
    def takes_slots(self) -> bool:
        """Whether a new slot may still start in the place."""
        return True

    @property
    def is_up(self) -> bool:
        """Whether the place's server is running."""
        return self._server is not None and not self._server.ended

    @property
    def age_s(self) -> float:
        """The seconds since the place began to start."""
        return 0.0 if self.begun_at is None else time.monotonic() - self.begun_at

    def kept(self, snapshot: Snapshot) -> Snapshot:
        """Note that the place holds a snapshot, and return it."""
        self.snapshots.add(snapshot.snapshot_id)
        return snapshot

    async def open(self, gate: CreationGate) -> None:
        """Start the place's server unless it is running, when the gate lets it start."""
        async with self._opening:
            if not self.is_up:
                async with gate.entered():
                    if self.begun_at is None:
                        self.begun_at = time.monotonic()
                    await self.start()

    async def start(self) -> None:
        async with self._starting:
            await super().start()

    def server_settings(self) -> dict[str, JSON]:
        """Return the settings of the place's server."""
        return {"prefix": "", "machine": not self._backend.image_kinds, "first_epoch": self._last_epoch + 1}

    async def _start_server(self, rung: Rung) -> None:
        self._server = await RemoteClient.start_by(
            lambda call: self._backend.command(self.spec, call),
            rung.label,
            self.server_settings(),
            self._on_lost,
            silence_s=self._backend.silence_s,
            gone_s=self._backend.gone_s,
        )

    async def _place(self, spec: SlotSpec) -> dict[str, JSON]:
        mounts = [replace(mount, source=mount.target).fields for mount in spec.mounts]
        return {"image": self.spec.root, "allow": allowed_hosts(spec), "mounts": mounts, "env": environment(spec)}


class Hosts:
    """The hosts of a backend. A host that failed is skipped for a while, and a drained one gets no new slots."""

    def __init__(self, backend: str, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.drain_file: Path | None = None
        """A file that lists the hosts that get no new slots, or None. It may change at any time."""
        self._backend = backend
        self._failed_at: dict[str, float] = {}

    def replace(self, names: Sequence[str]) -> None:
        """Set the hosts, on a platform whose machines come and go."""
        self.names = tuple(names)

    def drained(self) -> frozenset[str]:
        """Return the hosts that get no new slots, which are the words in `drain_file`."""
        if self.drain_file is None:
            return frozenset()
        try:
            return frozenset(self.drain_file.read_text().split())
        except FileNotFoundError:
            return frozenset()

    def leave_out(self, host: str, error: Exception) -> None:
        """Skip a host for `_LEFT_OUT_S` seconds, because a place did not start on it."""
        if len(self.names) > 1:
            _log.warning("%s host %s is left out for %g s: %s", self._backend, host, _LEFT_OUT_S, error)
        self._failed_at[host] = time.monotonic()

    def allowed(self, without: Collection[str] = ()) -> list[str]:
        """Return the hosts that are neither drained nor in `without`."""
        drained = self.drained()
        return [host for host in self.names if host not in without and host not in drained]

    def usable(self, without: Collection[str] = ()) -> list[str]:
        """Return the allowed hosts without those that have just failed."""
        now = time.monotonic()
        return [host for host in self.allowed(without) if now - self._failed_at.get(host, -math.inf) > _LEFT_OUT_S]


class PlaceTable:
    """The places of a backend, by number, with the counts of those that have ended."""

    def __init__(self, hosts: Hosts, slots_per_place: int) -> None:
        self.by_number: dict[int, Place] = {}
        self._hosts, self._per_place = hosts, slots_per_place
        self._lost = self._ended = 0
        self._ended_s = 0.0

    def __len__(self) -> int:
        return len(self.by_number)

    def with_room(self, wanted: PlaceSpec, without: Collection[str] = ()) -> Place | None:
        """Return the place with the settings `wanted` that has room; None if there is none. If several have room, it is
        on the host with the fewest slots. Of this host's places, the fullest is chosen, so that others become idle."""
        drained = self._hosts.drained()
        fitting = [
            place
            for place in self.by_number.values()
            if replace(place.spec, host="") == wanted
            and place.spec.host not in without
            and place.load < self._per_place
            and place.takes_slots
            and place.spec.host not in drained
        ]
        loads = self.loads()
        return min(fitting, key=lambda place: (loads[place.spec.host], -place.load), default=None)

    def loads(self) -> dict[str, int]:
        """Return the number of slots that each host has or will have."""
        loads = dict.fromkeys(self._hosts.names, 0)
        for place in self.by_number.values():
            loads[place.spec.host] = loads.get(place.spec.host, 0) + place.load
        return loads

    def emptier(self, host: str, without: Collection[str]) -> bool:
        """Return whether a usable host without a place has fewer slots than `host`."""
        taken = {place.spec.host for place in self.by_number.values()}
        return self.loads()[host] > 0 and any(each not in taken for each in self._hosts.usable(without))

    def of(self, slot: Slot) -> Place:
        """Return the place of a slot. Raises `SlotLost`."""
        place = self.by_number.get(slot.epoch // _EPOCHS)
        if place is None:
            raise SlotLost(f"{slot.slot_id} has ended with its place")
        return place

    def keeper(self, snapshot: Snapshot) -> Place | None:
        """Return the place that holds a snapshot; None if it is gone."""
        return next((place for place in self.by_number.values() if snapshot.snapshot_id in place.snapshots), None)

    def holding(self, snapshot: Snapshot) -> Place:
        """Return the place that holds a snapshot. Raises `SandboxError` if it is gone."""
        place = self.keeper(snapshot)
        if place is not None:
            return place
        raise SandboxError(f"the snapshot {snapshot.snapshot_id} was lost with the place that held it")

    async def end(self, number: int) -> None:
        """End one place. Idempotent, because tasks that end slots at the same time may all find it empty."""
        place = self.by_number.pop(number, None)
        if place is None:
            return
        self._count(place)
        await place.aclose()

    async def aclose(self) -> None:
        """End every place. Idempotent."""
        places, self.by_number = self.by_number, {}
        for place in places.values():
            self._count(place)
        await asyncio.gather(*(place.aclose() for place in places.values()))

    def _count(self, ended: Place) -> None:
        self._lost += int(ended.stats()["lost"])
        self._ended += ended.begun_at is not None
        self._ended_s += ended.age_s

    def place_counts(self) -> dict[str, JSON]:
        """Return the number of slots, of lost slots and of places, and the running time of all places."""
        places = list(self.by_number.values())
        return {
            "slots": sum(len(place.slots) for place in places),
            "lost": self._lost + sum(int(place.stats()["lost"]) for place in places),
            "containers": len(places),
            "containers_begun": self._ended + sum(place.begun_at is not None for place in places),
            "container_s": self._ended_s + sum(place.age_s for place in places),
        }


class RemoteBackend(StartedBackend):
    """Slots in places that are started as they are needed, on one host or several.

    `places` times `slots_per_place` is the maximum number of slots. There can be more than `places` places while slots
    need places with different settings, such as images; surplus places end when they are idle. `rung` and `require`
    mean the same as in `ServerBackend`.
    """

    name: str
    image_kinds: tuple[str, ...] = ("name",)
    silence_s = SILENCE_S
    """Seconds without an answer after which a place counts as dead."""
    gone_s = GONE_S
    """Seconds without contact to this process after which a place ends by itself."""
    away_s = 60.0
    """Seconds to wait for a host to answer, for example while its daemon restarts."""

    def __init__(
        self,
        *,
        hosts: Sequence[str] = ("",),
        image: str | None = None,
        places: int = 1,
        slots_per_place: int = 10,
        rung: Rung | None = None,
        require: Rung | None = None,
    ) -> None:
        if not hosts or places < 1 or slots_per_place < 1:
            raise ConfigError(f"{self.name}: set at least one host, one place and one slot per place")
        # Nothing separates the files and processes of slots without isolation.
        if rung is Rung.NONE and slots_per_place > 1:
            raise ConfigError(f"{self.name}: with isolation none, slots cannot share a place: set one slot per place")
        self.hosts = Hosts(self.name, hosts)
        self._image, self._most, self._per_place = image, places, slots_per_place
        self._wanted, self._required = rung, require
        self._places = PlaceTable(self.hosts, slots_per_place)
        self._numbers: Iterator[int] = _numbers
        self.gate = CreationGate(self.name)
        """Limits how many places start per second, and how many start concurrently."""
        self._rung: Rung | None = None
        self._started = False

    def begin_at(self, epoch: int) -> None:
        """Set the lowest epoch of this backend's leases. Call it before the first lease."""
        self._numbers = itertools.count(epoch // _EPOCHS)

    def command(self, place: PlaceSpec, call: Sequence[str]) -> Sequence[str]:
        """Return the local command that starts a place, runs `call` in it, and ends the place when its standard input
        ends."""
        raise NotImplementedError(f"the backend {self.name} overrides neither `command` nor `make_place`")

    def make_place(self, spec: PlaceSpec, number: int, rung: Rung | None) -> Place:
        """Return a place that has not been started. Backends that start places without a command override this
        method."""
        return Place(self, spec, number, rung=rung, require=self._required)

    @abstractmethod
    async def check(self, host: str) -> None:
        """Raise `ConfigError`, with the remedy, if no place can be started on the host."""

    def place_spec(self, spec: SlotSpec) -> PlaceSpec:
        """Return the settings of the place that a slot needs, without its host. Raises `ConfigError` for anything that
        the platform does not offer."""
        if spec.image is not None and not self.image_kinds:
            raise ConfigError(f"the backend {self.name} cannot use images, but the task needs {spec.image}")
        image = spec.image or self._image
        return PlaceSpec(image=image, network=spec.network is not Network.OFF, mounts=spec.mounts)

    async def start(self) -> None:
        """Check every host, and prove the isolation level in a first place. Idempotent.

        Raises `ConfigError`, `IsolationUnavailable` or another `SandboxError`. A host that fails is left out if another
        host works.
        """
        if self._started:
            return
        try:
            await self.check_hosts()
            await self.destroy(await self.create(SlotSpec(), "start"))
        except BaseException:
            await self.aclose()
            raise
        self._started = True

    async def check_hosts(self) -> None:
        """Check every host, and leave out the hosts that fail. Raises `ConfigError` if every host fails."""
        errors = []
        for host in self.hosts.names:
            try:
                await self.check(host)
            except ConfigError as error:
                self.hosts.leave_out(host, error)
                errors.append(error)
        if len(errors) == len(self.hosts.names):
            raise errors[0]

    async def aclose(self) -> None:
        """End every place with its slots and snapshots. Idempotent."""
        self._started = False
        await self._places.aclose()

    @property
    def rung(self) -> Rung:
        """The isolation level in force. Before `start`, this is the requested level, or `full` if none is requested."""
        known = self._rung if self._rung is not None else self._wanted
        return Rung.FULL if known is None else known

    @property
    def places_workspace(self) -> bool:
        """Whether slots can have their workspace at a second path (`SlotSpec.workspace`)."""
        return self.rung >= Rung.USERNS

    @property
    def level_fix(self) -> str:
        return "request a lower level (isolation, require_sandbox), or use a backend or image that allows this one"

    @property
    def capacity(self) -> int | None:
        """The maximum number of slots."""
        return self._most * self._per_place

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot:
        """Return a new slot. If `snapshot` is given, the slot starts in the place that holds the snapshot.

        If no snapshot is given and a host fails to start a place, the other hosts are tried. If every host fails once
        the backend has started, all hosts are tried once more, provided that one of them answers within `away_s`
        seconds.
        """
        tried: set[str] = set()
        again = False
        while True:
            place = await self._choose(spec, tried) if snapshot is None else self._places.holding(snapshot)
            place.starting += 1
            try:
                await place.open(self.gate)
                slot = await place.create(spec, trajectory_id, snapshot)
            except (SandboxError, ConfigError) as error:
                # The place answers, so the request is at fault, and another host would refuse it as well.
                if place.is_up:
                    raise
                self.hosts.leave_out(place.spec.host, error)
                tried.add(place.spec.host)
                if snapshot is not None:
                    raise
                if tried >= set(self.hosts.names):
                    if again or not self._started or not await self._wait_for_host():
                        raise
                    again = True
                    tried.clear()
            else:
                place.slots.add(slot.epoch)
                self._rung = place.rung if self._rung is None else min(self._rung, place.rung)
                return slot
            finally:
                place.starting -= 1
                await self._tidy()

    async def _wait_for_host(self) -> bool:
        """Wait up to `away_s` seconds until a host answers. Returns False if none does."""
        begun, noted = time.monotonic(), False
        while time.monotonic() - begun < self.away_s:
            await asyncio.sleep(_ASK_S)  # a daemon that is being stopped still answers for a moment
            try:
                await self.check_hosts()
            except ConfigError as error:
                # Reported once, and not in every second of the wait.
                if not noted:
                    _log.warning("waiting for %s, at most %g s: %s", self.name, self.away_s, error)
                noted = True
            else:
                return True
        return False

    async def destroy(self, slot: Slot) -> None:
        """End the slot and drop its files. Does nothing if the slot is already gone."""
        place = self._places.by_number.get(slot.epoch // _EPOCHS)
        if place is not None and slot.epoch in place.slots:
            await place.destroy(slot)
            place.slots.discard(slot.epoch)
            await self._tidy()

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        """End the slot and return a snapshot whose topmost layer is the slot's changes, limited to `view`."""
        place = self._places.of(slot)
        try:
            return place.kept(await place.seal(slot, view))
        finally:
            place.slots.discard(slot.epoch)

    async def checkpoint(self, slot: Slot) -> Snapshot:
        """Return a snapshot of the slot's current files. Raises `SandboxError` at levels below `userns`."""
        place = self._places.of(slot)
        return place.kept(await place.checkpoint(slot))

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot:
        """Return a second snapshot of the same files, limited to `view`."""
        place = self._places.holding(snapshot)
        return place.kept(await place.view(snapshot, view))

    async def changes(self, snapshot: Snapshot) -> list[Change]:
        """Return the changes in the topmost layer, sorted by path."""
        return await self._places.holding(snapshot).changes(snapshot)

    async def forget(self, snapshot: Snapshot) -> None:
        """Drop the snapshot's topmost layer once no slot uses that layer. Does nothing if the snapshot is already
        gone."""
        place = self._places.keeper(snapshot)
        if place is not None:
            place.snapshots.discard(snapshot.snapshot_id)
            await place.forget(snapshot)
            await self._tidy()

    def stats(self) -> Mapping[str, JSON]:
        """Return the current counts, as `Backend.stats` describes, and the number and running time of containers."""
        return {"backend": self.name, "rung": self.rung.label, **self._places.place_counts()}

    async def _choose(self, spec: SlotSpec, without: Collection[str] = ()) -> Place:
        """Return the place for a new slot: an existing place that has room, or a new place if there is none, or if a
        host without a place has fewer slots. Hosts in `without` are not used."""
        wanted = self.place_spec(spec)
        room = self._places.with_room(wanted, without)
        if room is None or (len(self._places) < self._most and self._places.emptier(room.spec.host, without)):
            return self._add_place(wanted, without)
        return room

    def _add_place(self, wanted: PlaceSpec, without: Collection[str] = ()) -> Place:
        """Return a new place, which has not been started, on the host with the fewest places. A host that has just
        failed is used only if there is no other host."""
        hosts = self.hosts.allowed(without)
        if not hosts:
            raise SandboxError(f"{self.name}: every host fails or is drained (drain_file: {self.hosts.drain_file})")
        usable = self.hosts.usable(without) or hosts
        loads = dict.fromkeys(usable, 0)
        for place in self._places.by_number.values():
            if place.spec.host in loads:
                loads[place.spec.host] += self._per_place
        number = next(self._numbers)
        # A root given as a directory may allow a better level than the container's own file system does.
        rung = self._wanted if self._rung is None or wanted.root is not None else self._rung
        place = self.make_place(replace(wanted, host=min(usable, key=loads.__getitem__)), number, rung)
        self._places.by_number[number] = place
        return place

    async def _tidy(self) -> None:
        """End the idle places that `_is_spare` selects."""
        for number, place in list(self._places.by_number.items()):
            if place.idle and self._is_spare(place):
                await self._places.end(number)

    def _is_spare(self, place: Place) -> bool:
        """Return whether an idle place should end, because it is surplus, its server has ended or its host is
        drained."""
        return len(self._places) > self._most or not place.is_up or place.spec.host in self.hosts.drained()


def bound(mount: Mount, separators: str) -> str:
    """Return a read-only mount as a container tool's option `SOURCE:TARGET:ro`. Raises `ConfigError` if one of the
    paths contains a character that separates the parts of the option."""
    for path in (mount.source, mount.target):
        if any(each in path for each in separators):
            raise ConfigError(
                f"the folder {path} cannot be mounted in a container, because its path contains one of "
                f"`{separators}`: rename the folder"
            )
    return f"{mount.source}:{mount.target}:ro"


class MachineBackend(RemoteBackend):
    """Slots on whole machines, whose system directories the slots see: a machine has no images, and no directories of
    this machine. `with_images` names the backend that an error suggests for tasks with an image."""

    image_kinds = ()
    with_images: str

    def place_spec(self, spec: SlotSpec) -> PlaceSpec:
        if spec.image is not None:
            raise ConfigError(
                f"the {self.name} backend cannot use images, but the task needs {spec.image}; use {self.with_images}"
            )
        if spec.mounts:
            raise ConfigError(f"the {self.name} backend cannot mount {spec.mounts[0].source}, which is on this machine")
        return PlaceSpec()


async def run_command(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Run a command on this machine and return its exit status (127 if there is no such program) and its output,
    without its middle if it is long."""
    try:
        done = await run_process(command, timeout_s=timeout_s)
    except FileNotFoundError:
        return 127, f"{command[0]} is not installed"
    return done.returncode, without_middle(done.text.strip(), 1000)
