"""Keeps prepared workspaces on disk, so that later runs can reuse them.

A `Recipe` describes the preparation (image, files, commands); its cache key names the result. `Prepared` returns the
snapshot of a recipe from disk, or makes a new snapshot and keeps it. A snapshot that is lost (evicted, damaged, or gone
with its server) is made again. If two runs prepare the same recipe concurrently, the second waits for the first.

Processes, `/tmp` and `/dev/shm` are not part of a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import partial

from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import ConfigError, PrepareError, SandboxError, SlotLost
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON, Network
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec, Snapshot
from palaestra_slots.sandbox.snapshots import fingerprints
from palaestra_slots.sandbox.snapshots.folder import SCHEMA, SnapshotStore, to_the_end


@dataclass(frozen=True, slots=True)
class Put:
    """A step that writes a file. A relative `path` starts at the workspace."""

    path: str
    data: bytes
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step that runs a command, which must succeed."""

    command: str
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Describes how a workspace is prepared. Change `version` after a change outside the recipe that affects the steps.
    `name` is for people, and is not part of the cache key."""

    spec: SlotSpec = SlotSpec()
    steps: tuple[Put | RunStep, ...] = ()
    version: str = ""
    name: str = ""

    def key(self, rung: Rung, of_image: Callable[[str | None], JSON] = fingerprints.of_image) -> str:
        """Return the cache key for one isolation level: a hash of the recipe, of this package's code, and of the
        fingerprints of the image, the mounted directories and the machine.

        The timeouts of steps are not part of the key. Blocks while it reads the image's metadata.
        """
        spec = self.spec
        network = spec.network if isinstance(spec.network, Network) else spec.network.hosts
        parts: list[JSON] = [SCHEMA, fingerprints.of_project(), fingerprints.of_machine(), rung.label]
        parts += [of_image(spec.image), network, spec.env, asdict(spec.limits), self.version]
        mounts = (*spec.mounts, *spec.copies)
        parts += [[mount.source, mount.target, fingerprints.of_directory(mount.source)] for mount in mounts]
        for step in self.steps:
            if isinstance(step, Put):
                parts.append(["put", step.path, hashlib.sha256(step.data).hexdigest(), step.mode])
            else:
                parts.append(["run", step.command])
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


@dataclass(frozen=True, slots=True)
class Taken:
    """The snapshot of a recipe; `found` is true if the snapshot was found on disk."""

    snapshot: Snapshot
    found: bool


def _raise(trouble: ConfigError) -> None:
    raise trouble


@dataclass
class Prepared:
    """Prepares workspaces for one backend. `store` opens the store on first use, for example
    `SnapshotStore(folder).open`.

    Without a store, or at levels below `userns`, snapshots last only as long as the server. `trouble` is called with a
    `ConfigError` if the store cannot be used or a snapshot cannot be kept; by default, it raises that error.
    """

    backend: LocalBackend
    store: Callable[[], SnapshotStore] | None = None
    clock: Clock = field(default_factory=SystemClock)
    trouble: Callable[[ConfigError], None] = _raise
    _known: dict[str, tuple[int, Snapshot]] = field(default_factory=dict, init=False)
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict, init=False)
    _images: dict[str | None, JSON] = field(default_factory=dict, init=False)
    _proved: bool = field(default=False, init=False)
    _looking: threading.Lock = field(default_factory=threading.Lock, init=False)

    async def get(self, recipe: Recipe) -> Snapshot:
        """Return the snapshot of a recipe, making it first if necessary. Raises `PrepareError` for a step that fails.

        The snapshot belongs to this object: do not `forget` it.
        """
        key = await self._key(recipe)
        async with self._turns.setdefault(key, asyncio.Lock()):
            server, snapshot = self._known.get(key, (0, None))
            # A snapshot ends with the server that holds it.
            if snapshot is None or server != self.backend.server_pid:
                snapshot = (await self.take(recipe, partial(self.make, recipe))).snapshot
                self._known[key] = (self.backend.server_pid, snapshot)
            return snapshot

    async def take(self, recipe: Recipe, make: Callable[[], Awaitable[Snapshot]]) -> Taken:
        """Return the snapshot of a recipe from the store, or a new one from `make`, which is then kept in the store.

        The caller owns the snapshot and must `forget` it. Waits while another run makes the same snapshot. Raises the
        errors of `make`.
        """
        if self.store is None or self.backend.rung < Rung.USERNS:  # without layers, no snapshot can be used in place
            return Taken(await make(), False)
        try:
            store = self.store()
        except ConfigError as trouble:
            self.trouble(trouble)
            return Taken(await make(), False)
        key = await self._key(recipe)
        found = await self._load(recipe, key, store)
        if found is not None:
            return Taken(found, True)
        async with contextlib.AsyncExitStack() as turn:
            try:
                await turn.enter_async_context(store.turn(key, self.clock))
            except OSError as error:
                self.trouble(_cannot(store, f"be locked: {error}; use another folder"))
            # The run that held the lock may have made it.
            found = await self._load(recipe, key, store)
            if found is not None:
                return Taken(found, True)
            snapshot = await make()
            try:
                await self._store_snapshot(snapshot, recipe, key, store)
            except BaseException:
                await asyncio.shield(self._forget(snapshot))
                raise
            return Taken(snapshot, False)

    async def _key(self, recipe: Recipe) -> str:
        return await asyncio.to_thread(recipe.key, self.backend.rung, self._of_image)

    def _of_image(self, image: str | None) -> JSON:
        """Return the fingerprint of an image. It is computed once, because an image must not change during a run."""
        with self._looking:
            if image not in self._images:
                self._images[image] = fingerprints.of_image(image)
            return self._images[image]

    async def _load(self, recipe: Recipe, key: str, store: SnapshotStore) -> Snapshot | None:
        """Return the entry's snapshot, which the server keeps locked from now on; None if the entry cannot be used.
        Removes a damaged entry."""
        if self.store is None or not store.has(key):
            return None
        snapshot = None
        # Loaded before it is checked, because the server's lock keeps it from being evicted between the two.
        with contextlib.suppress(OSError):  # the entry was just evicted, or is damaged
            snapshot = await self.backend.load(str(store.files(key)), recipe.spec)
        try:
            whole = await asyncio.to_thread(store.is_whole, key)
        except BaseException:
            if snapshot is not None:
                await asyncio.shield(self._forget(snapshot))
            raise
        if snapshot is not None and whole and await self._starts_a_slot(snapshot, recipe, store):
            store.touch(key)
            return snapshot
        if snapshot is not None:
            await self._forget(snapshot)
        if not whole:
            await asyncio.to_thread(store.remove, key)
        return None

    async def _starts_a_slot(self, snapshot: Snapshot, recipe: Recipe, store: SnapshotStore) -> bool:
        """Return whether slots can start from snapshots on the store's disk. Overlays do not support every file system,
        so a slot is made once to find out. If that fails, the store is not used again."""
        if not self._proved:
            try:
                await self.backend.destroy(await self.backend.create(recipe.spec, "proof", snapshot))
            except SlotLost:
                raise
            except SandboxError as error:
                self.store = None
                self.trouble(_cannot(store, f"be used from that disk ({error}); use a folder on another disk"))
                return False
            self._proved = True
        return True

    async def _forget(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(SandboxError):  # if the server has died, the snapshot is gone with it
            await self.backend.forget(snapshot)

    async def _store_snapshot(self, snapshot: Snapshot, recipe: Recipe, key: str, store: SnapshotStore) -> None:
        if self.store is None:  # the store's disk turned out to be unusable
            return
        try:
            await asyncio.to_thread(store.sweep)
            async with store.new() as folder:
                await self.backend.save(snapshot, str(folder / "layers"))
                await to_the_end(partial(store.keep, folder, key, _describe(recipe)))
        except OSError as error:
            self.trouble(_cannot(store, f"keep {recipe.name or key[:12]}: {error}; make room, or use another folder"))

    async def make(self, recipe: Recipe) -> Snapshot:
        """Run the steps of a recipe in a new slot, and return the slot's snapshot. Raises `PrepareError` for a step
        that fails."""
        slot = await self.backend.create(recipe.spec, "prepare")
        try:
            for number, step in enumerate(recipe.steps, 1):
                await _run_step(slot, step, f"step {number} of {len(recipe.steps)}")
            return await self.backend.seal(slot)
        except BaseException:
            await self.backend.destroy(slot)
            raise


async def _run_step(slot: Slot, step: Put | RunStep, name: str) -> None:
    if isinstance(step, Put):
        await slot.write_bytes(step.path, step.data, mode=step.mode)
        return
    result = await slot.execute(step.command, timeout_s=step.timeout_s)
    if not result.success:
        said = without_middle(result.output, 2000)
        raise PrepareError(f"{name} ({step.command[:80]!r}) failed: {result.error}\n{said}")


def _cannot(store: SnapshotStore, what: str) -> ConfigError:
    return ConfigError(f"the snapshot store {str(store.folder)!r} cannot {what}")


def _describe(recipe: Recipe) -> JSON:
    """Return a description of the recipe for people who look into the store."""
    steps = [step.path if isinstance(step, Put) else step.command for step in recipe.steps]
    about = {"name": recipe.name, "image": recipe.spec.image, "steps": steps, "version": recipe.version}
    return about | {"limits": asdict(recipe.spec.limits)}
