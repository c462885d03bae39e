"""The folder that keeps prepared workspaces between runs, shared by all runs of one user on one machine.

An entry appears under its name only when it is whole (written beside it, synced, renamed), so a crash leaves no half
entry; what is half is held by a lock while its maker lives and is removed once nobody holds it. Entries in use are
locked by the slot server that uses them (`LocalBackend.load`) and never evicted.

    STORE/KEY/layers/N/TREE   one folder per layer, topmost first     STORE/KEY/about.json   what it is, and when used
    STORE/new-*               half an entry, or one on its way out    STORE/turn-*           locks of those who prepare
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from palaestra.core.clock import Clock
from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.sandbox.images import store as images
from palaestra.sandbox.turns import turn

SCHEMA = "palaestra.snapshot/1"
DEFAULT_MAX_BYTES = 20 << 30

_TURN_S = 0.05
_KEY = re.compile(r"[0-9a-f]{40}")


def default_folder() -> Path:
    """Where this user's prepared workspaces are: beside the images."""
    return Path(images.default_folder()).with_name("snapshots")


@dataclass(frozen=True, slots=True)
class Entry:
    """One kept snapshot. `size_bytes` is that of its files, `used_at` the last use in seconds since the epoch."""

    key: str
    size_bytes: int
    used_at: float


class SnapshotStore:
    """The folder. Every method may be called while other runs use it."""

    def __init__(self, folder: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Raises `ConfigError` for a folder that is somebody else's or open to others: what is in it is run."""
        self.folder, self.max_bytes = folder, max_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as error:
            raise ConfigError(f"the snapshot store {str(folder)!r} cannot be used: {error.strerror}") from None
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ConfigError(f"the snapshot store {str(folder)!r} must be yours and writable by you alone (chmod 700)")

    def files(self, key: str) -> Path:
        """Where the layers of an entry are."""
        return self.folder / key / "layers"

    def entries(self) -> list[Entry]:
        """What is there, least recently used first."""
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError, ValueError, KeyError):
                if _KEY.fullmatch(path.name):
                    about = json.loads((path / "about.json").read_text())
                    found.append(Entry(path.name, int(about["size_bytes"]), (path / "about.json").stat().st_mtime))
        return sorted(found, key=lambda entry: entry.used_at)

    def touch(self, key: str) -> None:
        """Note that an entry is used."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.folder / key / "about.json")

    @contextlib.contextmanager
    def new(self) -> Iterator[Path]:
        """A folder to fill, held by a lock; gone at the end unless `keep` has taken it."""
        path = self.folder / f"new-{os.urandom(8).hex()}"
        path.mkdir(mode=0o700)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (path / "layers").mkdir(mode=0o755)
            yield path
        finally:
            _remove(path)
            os.close(lock)

    def keep(self, path: Path, key: str, size_bytes: int, recipe: JSON) -> None:
        """Give a whole entry its name. Where another run was quicker, that one's is kept. Blocks while disks sync."""
        about = {"schema": SCHEMA, "key": key, "size_bytes": size_bytes, "recipe": recipe}
        (path / "about.json").write_text(json.dumps(about))
        os.sync()
        with contextlib.suppress(OSError):  # ENOTEMPTY: it is there already
            path.rename(self.folder / key)

    def evict(self, room: int = 0) -> list[str]:
        """Remove the least recently used entries that nobody uses until all fit with `room` bytes; their keys."""
        entries, gone = self.entries(), []
        excess = sum(entry.size_bytes for entry in entries) + room - self.max_bytes
        for entry in entries:
            if excess > 0 and self.remove(entry.key):
                gone.append(entry.key)
                excess -= entry.size_bytes
        return gone

    def remove(self, key: str) -> bool:
        """Remove one entry; False while it is in use."""
        return self._take_away(self.folder / key, self.files(key))

    def sweep(self) -> int:
        """Remove what dead runs have left half done; how many."""
        return sum(self._take_away(path, path) for path in self.halves())

    def halves(self) -> list[Path]:
        """What is being made or removed, or was when its maker died."""
        return [path for path in self.folder.iterdir() if path.name.startswith("new-")]

    def _take_away(self, path: Path, locked: Path) -> bool:
        try:
            lock = os.open(locked, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            trash = self.folder / f"new-{os.urandom(8).hex()}"
            path.rename(trash)  # under its name it is whole or not there
            _remove(trash)
        except OSError:
            return False
        finally:
            os.close(lock)
        return True

    def turn(self, key: str, clock: Clock) -> contextlib.AbstractAsyncContextManager[None]:
        """One run at a time for one key, whoever runs it; a run that dies loses its turn."""
        return turn(self.folder / f"turn-{key[:2]}", clock.sleep, _TURN_S)


def _remove(path: Path) -> None:
    """Remove a tree of somebody's files: directories may refuse their owner, and links are not followed."""
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            if stat.S_IMODE(os.lstat(folder).st_mode) & 0o700 != 0o700:
                os.chmod(folder, 0o700)
    shutil.rmtree(path, ignore_errors=True)
