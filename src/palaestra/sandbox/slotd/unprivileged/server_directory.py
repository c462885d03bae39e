"""Where the slots of one server lie: a directory that no other server has, and that the next start removes if need be.

    /var/tmp/palaestra-slots-UID/    who runs servers; nobody else may write there
        1610614784/                  one server: named after its range of users (or at random, where it has none)
            slot-1/{workspace,home,tmp}   layers/   empty/

The server's directory is locked as long as the server, or the process that watches it, lives. Whoever can take the lock
of another one's directory knows that its owner is dead: it kills the processes of those users and removes the files.

`/workspace`, where nothing of that name is there, becomes a link to descriptor `WORKSPACE_FD` of whoever follows it:
every command of a slot has its own workspace open at that number.
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

from . import users

WORKSPACE_FD = 199
LINK = "/workspace"

_LINK_TARGET = f"/proc/self/fd/{WORKSPACE_FD}"
_PARENTS = ("/var/tmp", "/tmp")  # noqa: S108 - one that belongs to somebody else is refused
_KILL_PATIENCE_S = 5.0
_CLAIMS = 50
_RANDOM_DIGITS = 12


class Base:
    """One server's directory. `first_user` is 0 where slots have no users of their own."""

    def __init__(self, path: str, first_user: int, lock: int) -> None:
        self.path, self.first_user, self._lock = path, first_user, lock

    @staticmethod
    def claim() -> Base:
        """Make a directory that is ours alone. Raises OSError where none can be made."""
        for _ in range(_CLAIMS):
            with contextlib.suppress(FileNotFoundError):  # the last server before this one has just removed the parent
                return Base._claim(_parent())
        raise OSError(2, "the directory of slots is removed again and again")

    @staticmethod
    def _claim(parent: str) -> Base:
        _sweep(parent)
        for start in users.starts() or [0]:
            path = f"{parent}/{start or secrets.token_hex(_RANDOM_DIGITS // 2)}"
            if start and users.living(start, users.RANGE):
                continue
            with contextlib.suppress(FileExistsError), _held(parent):
                os.mkdir(path, 0o711)
                os.chmod(path, 0o711)  # noqa: S103 - users of slots pass through to their own
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if start:
                    _link()
                return Base(path, start, lock)
        raise OSError(11, "no free range of users was found")

    def clear(self) -> None:
        """End what still lives in it and remove it."""
        parent = os.path.dirname(self.path)
        with _held(parent):
            _clear(self.path, self.first_user)
            _unlink_last(parent)
        with contextlib.suppress(OSError):
            os.rmdir(parent)


def workspace_link() -> bool:
    """Whether `/workspace` leads to the workspace of whoever follows it."""
    try:
        return os.readlink(LINK) == _LINK_TARGET
    except OSError:
        return False


def _parent() -> str:
    failures = []
    for folder in _PARENTS:
        path = f"{folder}/palaestra-slots-{os.geteuid()}"
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o711)
                os.chmod(path, 0o711)  # noqa: S103 - users of slots pass through to their own
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
                return path
            failures.append(f"{path} is somebody else's")
        except OSError as error:
            failures.append(str(error))
    raise OSError(13, f"no place for slots: {'; '.join(failures)}")


def _sweep(parent: str) -> None:
    """Finish what servers that were killed, together with their watchers, have left."""
    with _held(parent):
        for name in os.listdir(parent):
            path = f"{parent}/{name}"
            if os.path.isdir(path) and _abandoned(path):
                _clear(path, int(name) if len(name) != _RANDOM_DIGITS else 0)


def _clear(path: str, first_user: int) -> None:
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while first_user and users.living(first_user, users.RANGE) and time.monotonic() < deadline:
        for uid in range(first_user, first_user + users.RANGE):
            if users.living(uid):
                users.kill(uid)
    remove(path)
    if first_user:
        _clear_shared_memory(first_user)


def remove(path: str) -> None:
    """Remove a directory, however deep, whatever in it is closed to its owner; what cannot be removed stays."""
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
    """Remove the files of a directory and move its directories to `places`, so that nothing has to go deep; which."""
    moved: list[str] = []
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return moved
    try:
        with os.scandir(fd) as entries:
            found = list(entries)
        for entry in found:
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=fd)
                    continue
                if os.geteuid():  # root needs no permission, and must not follow a link
                    os.chmod(entry.name, 0o700, dir_fd=fd)
                place = next(places)
                os.rename(entry.name, place, src_dir_fd=fd)
                moved.append(place)
    finally:
        os.close(fd)
    return moved


def _clear_shared_memory(first_user: int, count: int = users.RANGE) -> None:
    """Remove what these users have left in /dev/shm, the one directory that slots share."""
    with contextlib.suppress(OSError), os.scandir("/dev/shm") as entries:  # noqa: S108
        for entry in entries:
            with contextlib.suppress(OSError):
                if first_user <= entry.stat(follow_symlinks=False).st_uid < first_user + count:
                    os.unlink(entry.path)


def clear_shared_memory_of(uid: int) -> None:
    """Remove what one user has left in /dev/shm."""
    _clear_shared_memory(uid, 1)


def _link() -> None:
    with contextlib.suppress(OSError):  # something of that name is there, or the root cannot be written
        os.symlink(_LINK_TARGET, LINK)


def _unlink_last(parent: str) -> None:
    with contextlib.suppress(OSError):
        if workspace_link() and not os.listdir(parent):
            os.unlink(LINK)


def _abandoned(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


@contextlib.contextmanager
def _held(parent: str) -> Iterator[None]:
    """Starts and ends of servers one after the other."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
