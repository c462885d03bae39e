"""A folder of this machine in which the artifacts of one rollout pass from its slots to its verifier.

A process that is killed leaves its folder, and the next one that makes such a folder removes it: whoever made a folder
holds a lock on it (flock) for as long as it lives.
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

PREFIX = "palaestra-artifacts-"
_NEW = "palaestra-new-artifacts-"
_TRIES = 10


class ArtifactFolder:
    """A locked, empty folder, which ends with the block or `cleanup`."""

    def __init__(self) -> None:
        _sweep()
        self.path, self._lock = _make()

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


def _make() -> tuple[Path, int]:
    for _ in range(_TRIES):
        new = Path(tempfile.mkdtemp(prefix=_NEW))
        with contextlib.suppress(FileNotFoundError):  # another process took it for one of the dead
            lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                path = new.with_name(PREFIX + new.name.removeprefix(_NEW))
                new.rename(path)  # locked before it has the name by which others look for folders of the dead
                return path, lock
            except BaseException:
                os.close(lock)
                raise
    raise OSError(f"no folder for artifacts can be made in {tempfile.gettempdir()}")


def _sweep() -> None:
    """Remove the folders of dead processes of this user."""
    for name in os.listdir(place := tempfile.gettempdir()):
        path = f"{place}/{name}"
        with contextlib.suppress(OSError):
            if name.startswith(_NEW):
                os.rmdir(path)  # only if it is empty, and then its maker makes another
            elif name.startswith(PREFIX) and os.lstat(path).st_uid == os.geteuid():
                _remove_dead(path)


def _remove_dead(path: str) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
