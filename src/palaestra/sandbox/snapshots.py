"""Prepared workspaces that outlive a run: a recipe with a key, and what was made from it, kept on this machine's disk.

A `Recipe` says how a workspace is prepared (image, files, commands); its key names the result. `Prepared.get` gives the
snapshot of a recipe: the one this server has, or the one on disk, or a new one, prepared in a slot and then kept. So
what is lost (a server that died, an entry that was evicted) is made again, and is nobody's concern.

Which of two runs that prepare the same recipe at once comes second waits for the first, then uses what that one made.

Not in a snapshot: processes, `/tmp` and `/dev/shm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.errors import ConfigError, PrepareError
from palaestra.core.types import JSON, Network
from palaestra.sandbox.base import Rung, Slot, SlotSpec, Snapshot
from palaestra.sandbox.snapshot_store import SCHEMA, SnapshotStore


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
    """How a workspace is prepared. `version` is anything the steps depend on that they do not show."""

    spec: SlotSpec = SlotSpec()
    steps: tuple[Put | Run, ...] = ()
    version: str = ""

    def key(self, rung: Rung) -> str:
        """The name of the result on one rung: everything that goes in, hashed. Limits and mounts' contents do not."""
        spec = self.spec
        network = spec.network if isinstance(spec.network, Network) else spec.network.hosts
        parts: list[JSON] = [SCHEMA, rung.label, _identity(spec.image), network, spec.env, self.version]
        parts += [[mount.source, mount.target] for mount in spec.mounts]
        for step in self.steps:
            if isinstance(step, Put):
                parts.append(["put", step.path, hashlib.sha256(step.data).hexdigest(), step.mode])
            else:
                parts.append(["run", step.command])
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def _identity(image: str | None) -> JSON:
    """What tells one state of an image from another: a directory that was unpacked anew is another image.

    Without an image, the host's system: its release, and when a package last came or went.
    """
    paths = ("/usr/bin", "/usr/lib") if image is None else (os.path.realpath(image),)
    seen: list[JSON] = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            seen.append([path, status.st_dev, status.st_ino, status.st_mtime_ns])
    if image is None:
        with contextlib.suppress(OSError):
            seen.append(Path("/etc/os-release").read_text())
    return seen


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


@dataclass
class Prepared:
    """Snapshots by recipe, for one backend. `store` None keeps them for this server's life only; so does `confined`."""

    backend: KeepsSnapshots
    store: SnapshotStore | None = None
    clock: Clock = field(default_factory=SystemClock)
    _known: dict[str, tuple[int, Snapshot]] = field(default_factory=dict, init=False)
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict, init=False)

    async def get(self, recipe: Recipe) -> Snapshot:
        """The snapshot of a recipe, prepared if it is not there. Raises `PrepareError` for a step that fails.

        It belongs to this object: do not `forget` it.
        """
        key = recipe.key(self.backend.rung)
        async with self._turns.setdefault(key, asyncio.Lock()):
            server, snapshot = self._known.get(key, (0, None))
            if snapshot is None or server != self.backend.server_pid:
                snapshot = await self._make(recipe, key)
                self._known[key] = (self.backend.server_pid, snapshot)
            return snapshot

    async def _make(self, recipe: Recipe, key: str) -> Snapshot:
        if self.store is None or self.backend.rung < Rung.USERNS:  # without layers there is nothing to use in place
            return await self._prepare(recipe)
        kept = await self._load(recipe, key, self.store)
        if kept is not None:
            return kept
        async with self.store.turn(key, self.clock):
            kept = await self._load(recipe, key, self.store)
            if kept is not None:
                return kept
            snapshot = await self._prepare(recipe)
            await self._keep(snapshot, recipe, key, self.store)
            return snapshot

    async def _load(self, recipe: Recipe, key: str, store: SnapshotStore) -> Snapshot | None:
        if not (store.folder / key / "about.json").exists():
            return None
        try:
            snapshot = await self.backend.load(str(store.files(key)), recipe.spec)
        except OSError:
            return None  # evicted just now
        store.touch(key)
        return snapshot

    async def _keep(self, snapshot: Snapshot, recipe: Recipe, key: str, store: SnapshotStore) -> None:
        with store.new() as folder:
            try:
                size = await self.backend.save(snapshot, str(folder / "layers"))
                await asyncio.to_thread(store.evict, size)
                await asyncio.to_thread(store.keep, folder, key, size, _describe(recipe))
            except OSError as error:
                message = f"the snapshot store {str(store.folder)!r} cannot keep {key[:12]}: {error}"
                raise ConfigError(f"{message}; free some space, or give another folder") from error

    async def _prepare(self, recipe: Recipe) -> Snapshot:
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


def _describe(recipe: Recipe) -> JSON:
    """The recipe as a person may want to read it in the store."""
    steps = [step.path if isinstance(step, Put) else step.command for step in recipe.steps]
    return {"image": recipe.spec.image, "steps": steps, "version": recipe.version, "limits": asdict(recipe.spec.limits)}
