"""Manages the folder of prepared workspaces, which all runs of one user on one machine share.

An entry is written under a temporary name, synced, and renamed once it is complete, so a crash leaves no incomplete
entry. An unfinished entry is locked while its maker lives, and removed afterwards. The slot server that uses an entry
locks it against eviction (`LocalBackend.load`). `is_whole` notices changes to an entry's files (by an editor, or by a
program that cleans caches), but not a disk that returns wrong bytes.

    STORE/KEY/layers/N/TREE   one folder per layer, topmost first     STORE/KEY/about.json   its recipe and last use
    STORE/new-*               an unfinished entry, or a removed one   STORE/turn-*           locks of preparations
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from palaestra_slots.core.clock import Clock
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.file_lock import file_lock
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.admission import DEFAULT_STORE_BYTES
from palaestra_slots.sandbox.images import image_folders
from palaestra_slots.sandbox.snapshots import fingerprints

SCHEMA = "palaestra.snapshot/2"

_TURN_S = 0.05
_KEY = re.compile(r"[0-9a-f]{40}")


def default_folder() -> Path:
    """Return the folder of this user's prepared workspaces."""
    return Path(image_folders.default_folder("snapshots"))


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """One kept snapshot. `size_bytes` is its size on disk, `used_at` its last use in seconds since the epoch, and
    `name` the name of the recipe for which it was made."""

    key: str
    size_bytes: int
    used_at: float
    name: str = ""


class SnapshotStore:
    """The store's folder. Every method is safe while other runs use the folder, which exists once `open` has run."""

    def __init__(self, folder: Path, *, max_bytes: int = DEFAULT_STORE_BYTES) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def open(self) -> SnapshotStore:
        """Make the folder if it does not exist. Idempotent. Raises `ConfigError` if the folder cannot be made. Also
        raises it if the folder belongs to another user or other users may write to it, because its contents are
        executed."""
        folder = self.folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as error:
            raise ConfigError(
                f"the snapshot store {str(folder)!r} cannot be used: {error.strerror}; use another folder"
            ) from None
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ConfigError(f"the snapshot store {str(folder)!r} must be yours and writable only by you (chmod 700)")
        return self

    def files(self, key: str) -> Path:
        """Return the folder with the layers of an entry."""
        return self.folder / key / "layers"

    def entries(self) -> list[StoredSnapshot]:
        """Return all entries, least recently used first."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            # Another run may be removing the entry.
            with contextlib.suppress(OSError, ValueError, KeyError):
                if _KEY.fullmatch(path.name):
                    about = json.loads((path / "about.json").read_text())
                    used_at = (path / "about.json").stat().st_mtime
                    name = str((about.get("recipe") or {}).get("name", ""))
                    found.append(StoredSnapshot(path.name, int(about["size_bytes"]), used_at, name))
        return sorted(found, key=lambda entry: entry.used_at)

    def has(self, key: str) -> bool:
        """Return whether the store has an entry for a key, even a damaged one."""
        return (self.folder / key).exists()

    def is_whole(self, key: str) -> bool:
        """Return whether an entry is unchanged since it was kept. Blocks while it reads the metadata of each file."""
        try:
            about = json.loads((self.folder / key / "about.json").read_text())
            return bool(about["digest"] == fingerprints.of_tree(str(self.files(key)))[0])
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def touch(self, key: str) -> None:
        """Record a use of an entry."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.folder / key / "about.json")

    @contextlib.asynccontextmanager
    async def new(self) -> AsyncIterator[Path]:
        """Yield a locked folder to fill, and remove it at the end of the block unless `keep` has renamed it."""
        path, lock = self._held_folder()
        try:
            (path / "layers").mkdir(mode=0o755)
            yield path
        finally:
            await to_the_end(partial(_remove_tree, path))
            os.close(lock)

    def _held_folder(self) -> tuple[Path, int]:
        while True:
            path = self.folder / f"new-{os.urandom(8).hex()}"
            path.mkdir(mode=0o700)
            lock = -1
            with contextlib.suppress(OSError):  # another run removed it before it was locked
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.stat().st_ino == os.fstat(lock).st_ino:
                    return path, lock
            if lock >= 0:
                os.close(lock)

    def keep(self, path: Path, key: str, recipe: JSON) -> None:
        """Give a complete entry its name, and evict other entries to make room. If another run has already made the
        same entry, that entry stays. Blocks while the disk syncs. Raises OSError (EFBIG) for an entry that is larger
        than `max_bytes`, the limit of the whole store."""
        # The files must be on the disk before the record with their digest is.
        _sync_file_system(path)
        digest, size_bytes = fingerprints.of_tree(str(path / "layers"))
        if size_bytes > self.max_bytes:
            raise OSError(
                errno.EFBIG, f"it takes {size_bytes} bytes, but the whole store may take only {self.max_bytes}"
            )
        self.evict(size_bytes)
        about = {"schema": SCHEMA, "key": key, "size_bytes": size_bytes, "digest": digest, "recipe": recipe}
        (path / "about.json").write_text(json.dumps(about))
        _sync_file_system(path)
        try:
            path.rename(self.folder / key)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise

    def evict(self, room: int = 0) -> list[str]:
        """Remove entries that are not in use, least recently used first, until `room` bytes of `max_bytes` are free.
        Returns the keys of the removed entries."""
        entries, gone = self.entries(), []
        excess = sum(entry.size_bytes for entry in entries) + room - self.max_bytes
        for entry in entries:
            if excess > 0 and self.remove(entry.key):
                gone.append(entry.key)
                excess -= entry.size_bytes
        return gone

    def remove(self, key: str, *, only_list: bool = False) -> bool:
        """Remove one entry. Returns False, and removes nothing, if the entry is in use or does not exist. If
        `only_list` is true, only return what the removal would return."""
        return self._take_away(self.folder / key, self.files(key), only_list)

    def sweep(self, *, only_list: bool = False) -> int:
        """Remove the unfinished entries that dead runs have left. Returns the number of removed entries or, if
        `only_list` is true, the number of those that could be removed."""
        return sum(self._take_away(path, path, only_list) for path in self.halves())

    def halves(self) -> list[Path]:
        """Return the unfinished entries: those that are being made or removed, and those that a dead run has left."""
        return [path for path in self.folder.iterdir() if path.name.startswith("new-")]

    def _take_away(self, path: Path, locked: Path, only_list: bool) -> bool:
        try:
            # A damaged entry may lack the folder that servers lock.
            lock = os.open(locked if locked.is_dir() else path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if only_list:
                return True
            trash = self.folder / f"new-{os.urandom(8).hex()}"
            path.rename(trash)  # so that an entry is always complete or absent under its own name
            _remove_tree(trash)
        except OSError:
            return False
        finally:
            os.close(lock)
        return True

    def turn(self, key: str, clock: Clock) -> contextlib.AbstractAsyncContextManager[None]:
        """Return a lock that lets only one run at a time make the entry of a key. Keys that begin with the same three
        digits share a lock. If a run dies, its lock is released."""
        return file_lock(self.folder / f"turn-{key[:3]}", poll_s=_TURN_S, sleep=clock.sleep)


async def to_the_end(work: Callable[[], None]) -> None:
    """Run `work` in a thread and wait until it has ended even if the caller is cancelled, because the caller may remove
    the files afterwards."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    finally:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await asyncio.shield(working)


def _sync_file_system(path: Path) -> None:
    """Sync the whole file system, because a workspace has too many files to sync each of them."""
    libc, folder = ctypes.CDLL(None, use_errno=True), os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if libc.syncfs(folder) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(folder)


def _remove_tree(path: Path) -> None:
    """Remove a tree that another user may have made. Its directories may deny access to their owner. Links are not
    followed."""
    for folder, below, _ in os.walk(path):
        for name in below:  # before the walk enters it
            with contextlib.suppress(OSError):
                mode = os.lstat(f"{folder}/{name}").st_mode
                if stat.S_ISDIR(mode) and stat.S_IMODE(mode) & 0o700 != 0o700:
                    os.chmod(f"{folder}/{name}", 0o700)
    shutil.rmtree(path, ignore_errors=True)
