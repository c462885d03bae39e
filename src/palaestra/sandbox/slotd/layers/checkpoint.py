"""Layers that outlive their source: checkpoints of running slots, and layers on the host's disk.

A checkpoint copies the slot's own change to a store of checkpoints while the slot is stopped. A file that has not
changed since the slot's last checkpoint is linked to the copy in that one: the kernel's time of change and the size
must be the same, the time must be older than the last copy by a margin (times have a grain), and no process may be able
to write through memory, which sets no time; otherwise everything is copied.

A saved layer is a folder `N/TREE` per layer of a snapshot, topmost first, with whiteouts, marks and owners as they are.
It is used in place, as a read-only lower, under a shared lock that keeps it from being evicted.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Generator
from dataclasses import dataclass

from .. import syscalls
from ..namespaced.rootfs import HOST
from .copy_tree import Earlier, Index, TreeCopy, never
from .store import LayerStore, OverlayFiles, OverlayLayer

_GRAIN_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class _Last:
    """The last checkpoint of one slot."""

    store: LayerStore
    index: Index
    begun_ns: int
    mapped: bool


class DiskStore(LayerStore):
    """A saved layer: mounted read-only and locked against eviction until its last user releases it."""

    def __init__(self, folder: str, place: str) -> None:
        self.path, self._users = place, 1
        self._lock = os.open(f"{HOST}{folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            named, held = os.stat(f"{HOST}{folder}"), os.fstat(self._lock)
            if (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
                raise FileNotFoundError(2, "evicted while it was opened", folder)
            self._mount(folder)
        except BaseException:
            os.close(self._lock)
            raise

    def _mount(self, folder: str) -> None:
        tree = syscalls.open_tree(f"{HOST}{folder}")
        try:
            syscalls.set_mount_attributes(tree, syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV)
            os.mkdir(self.path)
            syscalls.move_mount(tree, self.path)
        finally:
            os.close(tree)

    def unlimit(self) -> None:
        """Raises OSError: limits are lifted to write."""
        raise OSError(30, "a snapshot on disk cannot be cut; seal a slot that starts from it, and cut that")

    def release(self) -> None:
        """Remove a user; the last one unmounts and unlocks it."""
        self._users -= 1
        if self._users == 0:
            syscalls.umount(self.path)
            os.rmdir(self.path)
            os.close(self._lock)


class OverlayCheckpoints:
    """Implements `Checkpoints` for one server, whose slots' root is `owner`."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._last: dict[str, _Last] = {}
        self._numbers = itertools.count(1)
        self._token = os.urandom(4).hex()

    def checkpoint(
        self, files: OverlayFiles, mapped: bool, begun_ns: int
    ) -> Generator[None, None, tuple[OverlayLayer, int]]:
        """Copy a stopped slot's change, as a job; see `Checkpoints.checkpoint`."""
        last = self._last.get(files.store.path)
        number = next(self._numbers)
        store = self._make_store(number) if last is None else last.store
        copy, folder = TreeCopy(self._earlier(last, mapped)), f"{store.path}/{number}"
        trees = {tree.name: f"{folder}/{tree.name}" for tree in files.trees}
        try:
            os.mkdir(folder, 0o755)
            for tree in files.trees:
                yield from copy.tree(files.upper(tree), trees[tree.name])
        except BaseException:
            if last is None:
                store.release()
            raise
        self._last[files.store.path] = _Last(store, copy.index, begun_ns, mapped)
        name = f"layer-{self._token}-c{number}"
        return OverlayLayer(name, store.keep(), trees, files.layers, files.image), copy.copied_bytes

    def _make_store(self, number: int) -> LayerStore:
        """A store without a limit: it holds at most the slot's disk limit per checkpoint."""
        store = LayerStore(f"/slots/c{number}", 0, self._owner)
        store.unlimit()
        return store

    def _earlier(self, last: _Last | None, mapped: bool) -> Earlier:
        """Finds copies of the last checkpoint that are still good."""
        if last is None or last.mapped or mapped:
            return never
        trusted_ns = last.begun_ns - _GRAIN_NS

        def find(status: os.stat_result) -> str | None:
            time_ns, size, path = last.index.get(status.st_ino, (0, 0, ""))
            same = (time_ns, size) == (status.st_ctime_ns, status.st_size)
            return path if path and same and time_ns < trusted_ns else None

        return find

    def slot_ended(self, files: OverlayFiles) -> None:
        """Drop what only the slot's next checkpoint would have needed."""
        last = self._last.pop(files.store.path, None)
        if last is not None:
            last.store.release()

    def save(self, layer: OverlayLayer, folder: str) -> Generator[None, None, int]:
        """Copy a layer and all below it to the host's empty `folder`, as a job: the bytes of the files."""
        copied = 0
        for number, each in enumerate((layer, *layer.below)):
            os.mkdir(f"{HOST}{folder}/{number}", 0o755)
            for tree, path in each.trees.items():
                copy = TreeCopy()
                yield from copy.tree(path, f"{HOST}{folder}/{number}/{tree}")
                copied += copy.copied_bytes
        return copied

    def load(self, folder: str, image: str | None) -> tuple[OverlayLayer, ...]:
        """The layers that were saved in a folder, topmost first. Raises OSError if they are gone."""
        store = DiskStore(folder, f"/lower/k{next(self._numbers)}")
        layers: tuple[OverlayLayer, ...] = ()
        try:
            for number in reversed(range(len(os.listdir(store.path)))):
                path = f"{store.path}/{number}"
                trees = {tree: f"{path}/{tree}" for tree in os.listdir(path)}
                name = f"layer-{self._token}-k{next(self._numbers)}"
                layers = (OverlayLayer(name, store.keep(), trees, layers, image), *layers)
        finally:
            store.release()
        if not layers:
            raise FileNotFoundError(2, "no snapshot was saved there", folder)
        return layers
