"""Prepared workspaces that outlive a run: a recipe with a key, and what was made from it, kept on this machine's disk.

A `Recipe` says how a workspace is prepared (image, files, commands); its key names the result. `Prepared` gives the
snapshot of a recipe: the one on disk, or a new one, which is then kept. So what is lost (a server that died, an entry
that was evicted or damaged) is made again, and is nobody's concern.

Which of two runs that prepare the same recipe at once comes second waits for the first, then uses what that one made.

Not in a snapshot: processes, `/tmp` and `/dev/shm`.
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
from typing import Protocol

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.errors import ConfigError, PrepareError, SandboxError, SlotLost
from palaestra.core.types import JSON, Network
from palaestra.sandbox.slot import Rung, Slot, SlotSpec, Snapshot
from palaestra.sandbox.snapshots import fingerprints
from palaestra.sandbox.snapshots.folder import SCHEMA, SnapshotStore, to_the_end


@dataclass(frozen=True, slots=True)
class Put:
    """A file of the workspace. Relative paths lie in it."""

    path: str
    data: bytes
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A command that must succeed."""

    command: str
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a workspace is prepared. `version` is anything the steps depend on that they do not show; `name`, which is
    not in the key, what it is prepared for."""

    spec: SlotSpec = SlotSpec()
    steps: tuple[Put | Run, ...] = ()
    version: str = ""
    name: str = ""

    def key(self, rung: Rung, of_image: Callable[[str | None], JSON] = fingerprints.of_image) -> str:
        """The name of the result on one rung of this machine: all that goes in, hashed, this project's code included.

        Not in it is what only decides whether there is a result: a step's timeout. Blocks while it looks at an image.
        """
        spec = self.spec
        network = spec.network if isinstance(spec.network, Network) else spec.network.hosts
        parts: list[JSON] = [
            SCHEMA,
            fingerprints.of_project(),
            fingerprints.of_machine(),
            rung.label,
            of_image(spec.image),
        ]
        parts += [network, spec.env, asdict(spec.limits), self.version]
        parts += [[mount.source, mount.target, fingerprints.of_directory(mount.source)] for mount in spec.mounts]
        for step in self.steps:
            if isinstance(step, Put):
                parts.append(["put", step.path, hashlib.sha256(step.data).hexdigest(), step.mode])
            else:
                parts.append(["run", step.command])
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


@dataclass(frozen=True, slots=True)
class Taken:
    """The snapshot of a recipe, and whether it was found on disk."""

    snapshot: Snapshot
    found: bool


class KeepsSnapshots(Protocol):
    """The part of a backend that this needs; `LocalBackend` has it."""

    @property
    def rung(self) -> Rung: ...

    @property
    def server_pid(self) -> int: ...

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot: ...

    async def seal(self, slot: Slot) -> Snapshot: ...

    async def destroy(self, slot: Slot) -> None: ...

    async def save(self, snapshot: Snapshot, folder: str) -> int: ...

    async def load(self, folder: str, spec: SlotSpec) -> Snapshot: ...

    async def forget(self, snapshot: Snapshot) -> None: ...


def _raise(trouble: ConfigError) -> None:
    raise trouble


@dataclass
class Prepared:
    """Snapshots by recipe, for one backend. `store` None keeps them for this server's life only; so does `confined`.

    `trouble` hears why something could not be kept. By default that is an error, else the snapshot is given all the
    same.
    """

    backend: KeepsSnapshots
    store: SnapshotStore | None = None
    clock: Clock = field(default_factory=SystemClock)
    trouble: Callable[[ConfigError], None] = _raise
    _known: dict[str, tuple[int, Snapshot]] = field(default_factory=dict, init=False)
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict, init=False)
    _images: dict[str | None, JSON] = field(default_factory=dict, init=False)
    _proved: bool = field(default=False, init=False)
    _looking: threading.Lock = field(default_factory=threading.Lock, init=False)

    async def get(self, recipe: Recipe) -> Snapshot:
        """The snapshot of a recipe, its steps done if it is not there. Raises `PrepareError` for a step that fails.

        It belongs to this object: do not `forget` it.
        """
        key = await self._key(recipe)
        async with self._turns.setdefault(key, asyncio.Lock()):
            server, snapshot = self._known.get(key, (0, None))
            if snapshot is None or server != self.backend.server_pid:
                snapshot = (await self.take(recipe, partial(self.make, recipe))).snapshot
                self._known[key] = (self.backend.server_pid, snapshot)
            return snapshot

    async def take(self, recipe: Recipe, make: Callable[[], Awaitable[Snapshot]]) -> Taken:
        """The snapshot of a recipe from the store, else what `make` makes, which is then kept. Raises what that raises.

        It is the caller's, to `forget`. While another run makes it, this waits.
        """
        store = self.store
        if store is None or self.backend.rung < Rung.USERNS:  # without layers there is nothing to use in place
            return Taken(await make(), False)
        try:
            store.open()
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
                self.trouble(_cannot(store, f"be locked: {error}; name another folder"))
            found = await self._load(recipe, key, store)
            if found is not None:
                return Taken(found, True)
            snapshot = await make()
            try:
                await self._keep(snapshot, recipe, key, store)
            except BaseException:
                await asyncio.shield(self._forget(snapshot))
                raise
            return Taken(snapshot, False)

    async def _key(self, recipe: Recipe) -> str:
        return await asyncio.to_thread(recipe.key, self.backend.rung, self._of_image)

    def _of_image(self, image: str | None) -> JSON:
        """Looked at once: an image that changes under a run is somebody's mistake."""
        with self._looking:
            if image not in self._images:
                self._images[image] = fingerprints.of_image(image)
            return self._images[image]

    async def _load(self, recipe: Recipe, key: str, store: SnapshotStore) -> Snapshot | None:
        """The entry, locked by the server from now on; None where there is none. A damaged one is removed."""
        if self.store is None or not store.has(key):
            return None
        snapshot = None
        with contextlib.suppress(OSError):  # evicted just now, or damaged
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
        """Whether slots can be made from what lies on that disk: tried once. Overlays do not take every file system."""
        if not self._proved:
            try:
                await self.backend.destroy(await self.backend.create(recipe.spec, "proof", snapshot))
            except SlotLost:
                raise
            except SandboxError as error:
                self.store = None
                self.trouble(_cannot(store, f"be used from that disk ({error}); name a folder on another"))
                return False
            self._proved = True
        return True

    async def _forget(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(SandboxError):  # a server that died has dropped it
            await self.backend.forget(snapshot)

    async def _keep(self, snapshot: Snapshot, recipe: Recipe, key: str, store: SnapshotStore) -> None:
        if self.store is None:  # it was found to be of no use
            return
        try:
            await asyncio.to_thread(store.sweep)
            async with store.new() as folder:
                await self.backend.save(snapshot, str(folder / "layers"))
                await to_the_end(partial(store.keep, folder, key, _describe(recipe)))
        except OSError as error:
            self.trouble(_cannot(store, f"keep {recipe.name or key[:12]}: {error}; make room, or name another folder"))

    async def make(self, recipe: Recipe) -> Snapshot:
        """Do the steps of a recipe in a slot. Raises `PrepareError` for one that fails."""
        slot = await self.backend.create(recipe.spec, "prepare")
        try:
            for number, step in enumerate(recipe.steps, 1):
                await _do(slot, step, f"step {number} of {len(recipe.steps)}")
            return await self.backend.seal(slot)
        except BaseException:
            await self.backend.destroy(slot)
            raise


async def _do(slot: Slot, step: Put | Run, name: str) -> None:
    if isinstance(step, Put):
        await slot.write_bytes(step.path, step.data, mode=step.mode)
        return
    result = await slot.execute(step.command, timeout_s=step.timeout_s)
    if not result.success:
        raise PrepareError(f"{name} ({step.command[:80]!r}) failed: {result.error}\n{result.output[-2000:]}")


def _cannot(store: SnapshotStore, what: str) -> ConfigError:
    return ConfigError(f"the snapshot store {str(store.folder)!r} cannot {what}")


def _describe(recipe: Recipe) -> JSON:
    """The recipe as a person may want to read it in the store."""
    steps = [step.path if isinstance(step, Put) else step.command for step in recipe.steps]
    about = {"name": recipe.name, "image": recipe.spec.image, "steps": steps, "version": recipe.version}
    return about | {"limits": asdict(recipe.spec.limits)}
