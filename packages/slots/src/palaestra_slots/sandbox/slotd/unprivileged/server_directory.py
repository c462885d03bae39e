"""Manages the directory of one server's slots. If a server leaves its directory behind, the next server's start removes
it.

    /var/tmp/palaestra-slots-UID/    UID: the user who runs the servers; no other user may write there
        1610614784/                  one server: named after its range of users (at random if it has none)
            slot-1/{workspace,home,tmp}   layers/   empty/

The server's directory is locked as long as the server, or the process that watches it, lives. If another server can
take the lock, the owner is dead: the processes of the range's users are killed and the files removed.

If slots have users of their own and the name is free, `/workspace` becomes a link to descriptor `WORKSPACE_FD` of the
process that follows the link. Every command of a slot has the slot's workspace open under that number.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import stat
import time
from collections.abc import Iterator

from ..namespaced import cgroups
from . import users

WORKSPACE_FD = 199
LINK = "/workspace"

_LINK_TARGET = f"/proc/self/fd/{WORKSPACE_FD}"
_PARENTS = ("/var/tmp", "/tmp")  # noqa: S108 - a directory in them that belongs to another user is refused
_KILL_PATIENCE_S = 5.0
_CLAIMS = 50
_RANDOM_DIGITS = 12


class ServerDirectory:
    """One server's directory. `first_user` is 0 if slots have no users of their own."""

    def __init__(self, path: str, first_user: int, lock: int) -> None:
        self.path, self.first_user, self._lock = path, first_user, lock

    @staticmethod
    def claim() -> ServerDirectory:
        """Make a directory for a server. Raises OSError if that is not possible."""
        for _ in range(_CLAIMS):
            with contextlib.suppress(FileNotFoundError):  # the last server has just removed the parent
                return ServerDirectory._claim(_parent())
        raise OSError(2, "other servers keep removing the directory of slots")

    @staticmethod
    def _claim(parent: str) -> ServerDirectory:
        _sweep(parent)
        for start in users.starts() or [0]:
            path = f"{parent}/{start or secrets.token_hex(_RANDOM_DIGITS // 2)}"
            # A killed server's processes may still run, even if its directory is gone.
            if start and users.living(start, users.RANGE):
                continue
            with contextlib.suppress(FileExistsError), _held(parent):
                _make_passable(path)
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if start:
                    with contextlib.suppress(OSError):  # the name is taken, or the root directory is not writable
                        os.symlink(_LINK_TARGET, LINK)
                return ServerDirectory(path, start, lock)
        raise OSError(11, "no free range of users was found")

    def clear(self) -> None:
        """Kill the processes of the server's users that are still alive, and remove the directory. The last server also
        removes the link `/workspace`."""
        parent = os.path.dirname(self.path)
        with _held(parent):
            _clear(self.path, self.first_user)
            with contextlib.suppress(OSError):
                if workspace_link() and not os.listdir(parent):
                    os.unlink(LINK)
        with contextlib.suppress(OSError):
            os.rmdir(parent)


def workspace_link() -> bool:
    """Return whether `/workspace` leads to the workspace of the process that follows it."""
    try:
        return os.readlink(LINK) == _LINK_TARGET
    except OSError:
        return False


def _make_passable(path: str) -> None:
    """Make a directory that users of slots may pass through to reach their own directories. Raises FileExistsError."""
    os.mkdir(path, 0o711)
    os.chmod(path, 0o711)  # noqa: S103


def _parent() -> str:
    failures = []
    for folder in _PARENTS:
        path = f"{folder}/palaestra-slots-{os.geteuid()}"
        try:
            with contextlib.suppress(FileExistsError):
                _make_passable(path)
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
                return path
            failures.append(f"{path} is not a directory that belongs to this user and that only this user can write to")
        except OSError as error:
            failures.append(str(error))
    raise OSError(13, f"no place for slots: {'; '.join(failures)}")


def _sweep(parent: str) -> None:
    """Remove the leftovers of servers that were killed together with their watchers."""
    with _held(parent):
        for name in os.listdir(parent):
            path = f"{parent}/{name}"
            if os.path.isdir(path) and cgroups.abandoned(path):
                # No uid has as many digits as a random name.
                _clear(path, int(name) if len(name) != _RANDOM_DIGITS else 0)


def _clear(path: str, first_user: int) -> None:
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while first_user and users.living(first_user, users.RANGE) and time.monotonic() < deadline:
        for uid in range(first_user, first_user + users.RANGE):
            if users.living(uid):
                users.kill(uid)
    remove(path)
    if first_user:
        clear_shared_memory(first_user, users.RANGE)


def remove(path: str) -> None:
    """Remove a directory as far as possible, even if it is deeply nested or its owner has no permission to enter parts
    of it."""
    token = secrets.token_hex(6)
    places = (f"{path}/.{token}-{number}" for number in itertools.count())
    pending = _flatten(path, places)
    while pending:
        folder = pending.pop()
        pending += _flatten(folder, places)
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _flatten(folder: str, places: Iterator[str]) -> list[str]:
    """Remove the files of a directory and move its directories to `places`, so that no path gets deep."""
    moved: list[str] = []
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return moved
    try:
        with os.scandir(fd) as entries:
            # As a list, because entries that are moved while a directory is read may be skipped or read twice. Source:
            # readdir(3p).
            found = list(entries)
        for entry in found:
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=fd)
                    continue
                if os.geteuid():  # root needs no permission, and chmod could follow a link
                    os.chmod(entry.name, 0o700, dir_fd=fd)
                place = next(places)
                os.rename(entry.name, place, src_dir_fd=fd)
                moved.append(place)
    finally:
        os.close(fd)
    return moved


def clear_shared_memory(first_user: int, count: int = 1) -> None:
    """Remove the files that these users have left in /dev/shm, the only directory that slots share."""
    with contextlib.suppress(OSError), os.scandir("/dev/shm") as entries:  # noqa: S108
        for entry in entries:
            with contextlib.suppress(OSError):
                if first_user <= entry.stat(follow_symlinks=False).st_uid < first_user + count:
                    os.unlink(entry.path)


@contextlib.contextmanager
def _held(parent: str) -> Iterator[None]:
    """Lock the parent directory, so that servers start and end one at a time."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
