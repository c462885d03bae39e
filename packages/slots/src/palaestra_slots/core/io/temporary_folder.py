"""A temporary folder that the next process of the same kind removes if its maker is killed.

Whoever made a folder holds a lock on it (flock) for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

_TRIES = 10


class TemporaryFolder:
    """A locked, empty folder `palaestra-KIND-…` with these permissions, which ends with the block or `cleanup`. First
    removes the folders of this kind that dead processes of this user have left. Raises OSError."""

    def __init__(self, kind: str, mode: int = 0o700) -> None:
        _sweep(kind)
        self.path, self._lock = _make_folder(kind, mode)

    def cleanup(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()


def _prefixes(kind: str) -> tuple[str, str]:
    """Return how the names of locked folders begin, and those of folders that are not locked yet."""
    return f"palaestra-{kind}-", f"palaestra-new-{kind}-"


def _make_folder(kind: str, mode: int) -> tuple[Path, int]:
    prefix, unlocked = _prefixes(kind)
    for _ in range(_TRIES):
        new = Path(tempfile.mkdtemp(prefix=unlocked))
        with contextlib.suppress(FileNotFoundError):  # another process took it for one of the dead
            lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                new.chmod(mode)
                fcntl.flock(lock, fcntl.LOCK_EX)
                path = new.with_name(prefix + new.name.removeprefix(unlocked))
                new.rename(path)  # locked before it has the name by which others look for folders of the dead
                return path, lock
            except BaseException:
                os.close(lock)
                raise
    raise OSError(f"no folder for {kind} can be made in {tempfile.gettempdir()}")


def _sweep(kind: str) -> None:
    prefix, unlocked = _prefixes(kind)
    for name in os.listdir(place := tempfile.gettempdir()):
        path = f"{place}/{name}"
        with contextlib.suppress(OSError):
            if name.startswith(unlocked):
                os.rmdir(path)  # only if it is empty, and then its maker makes another
            elif name.startswith(prefix) and os.lstat(path).st_uid == os.geteuid():
                _remove_dead(path)


def _remove_dead(path: str) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
