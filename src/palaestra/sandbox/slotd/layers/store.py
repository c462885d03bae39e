"""How long layers stay: as long as anybody stands on them, slots and other layers alike.

Where the files of slots live: one tmpfs per slot, and the immutable layers that sealed slots leave behind.

A store is a tmpfs of its own, so that its size is the slot's disk limit and dropping it costs one umount whatever is in
it. Where the kernel lets overlays stand on what is mounted nowhere, a store is held by a descriptor alone: mounted in
the server's namespace, it would make every new slot dearer, since a slot begins with a copy of that.

A layer is one upper directory per tree of a root. Layers count who uses them: a slot keeps the layers it started from,
and a layer keeps the layers below it, until the last user is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .. import syscalls


@dataclass
class Counted:
    """A layer with a count of its users, which begins at one. Subclasses say what goes with the last of them."""

    _users: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        for layer in self.beneath():
            layer.keep()

    def beneath(self) -> Sequence[Counted]:
        """The layers this one lies on. It is a user of each."""
        raise NotImplementedError

    def drop_files(self) -> None:
        """Nobody uses the files of this layer any more."""
        raise NotImplementedError

    def keep(self) -> None:
        """One user more."""
        self._users += 1

    def release(self) -> None:
        """One user less; with the last one the files go."""
        self._users -= 1
        if self._users == 0:
            self.drop_files()
            for layer in self.beneath():
                layer.release()


FIRST_STORE = 64
"""Stores have descriptors from here on."""

_UNLIMITED = "size=0,nr_inodes=0"
_TRIAL = "/stage"


def copy_attributes(status: os.stat_result, directory: str) -> None:
    """Give a directory of ours the owner and mode of another one.

    An owner that does not exist in this user namespace cannot be given; the directory stays the slot's root's then.
    """
    with contextlib.suppress(OSError):
        os.chown(directory, status.st_uid, status.st_gid)
    os.chmod(directory, stat.S_IMODE(status.st_mode))


class Store:
    """One tmpfs, until its last user lets it go. `path` leads to it, in this process and in a fork that keeps `fd`."""

    fd: int | None = None

    def __init__(self, place: str, size_bytes: int, owner: int) -> None:
        """`place` is where it is mounted on kernels that know no better."""
        self._users = 1
        inodes = max(16384, size_bytes >> 12)
        options = f"size={size_bytes},nr_inodes={inodes},mode=755,uid={owner},gid={owner}"
        if _can_detach():
            self.fd = _high(syscalls.detached_tmpfs(options))
            self.path = f"/proc/self/fd/{self.fd}"
        else:
            self.path = place
            os.mkdir(place)
            syscalls.mount("tmpfs", place, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)

    def unlimit(self) -> None:
        """Lift the limits of a store that no slot writes to any more: a view of it needs inodes of its own."""
        if self.fd is not None:
            syscalls.reconfigure(self.fd, _UNLIMITED)
            return
        flags = syscalls.MS_REMOUNT | syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount("tmpfs", self.path, "tmpfs", flags, _UNLIMITED)

    def keep(self) -> Store:
        """One user more."""
        self._users += 1
        return self

    def release(self) -> None:
        """One user less."""
        self._users -= 1
        if self._users > 0:
            return
        if self.fd is not None:
            os.close(self.fd)
        else:
            syscalls.umount(self.path)
            os.rmdir(self.path)


def _high(fd: int) -> int:
    """The same descriptor with a number that no fork needs for something else."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_STORE)
    finally:
        os.close(fd)


@functools.cache
def _can_detach() -> bool:
    """Whether an overlay can stand on a tmpfs that is mounted nowhere (Linux 6.15), found out by mounting one."""
    try:
        fd = _high(syscalls.detached_tmpfs("mode=755"))
    except OSError:
        return False
    try:
        path = f"/proc/self/fd/{fd}"
        for name in ("lower", "upper", "work"):
            os.mkdir(f"{path}/{name}")
        layers = f"lowerdir={path}/lower,upperdir={path}/upper,workdir={path}/work,userxattr"
        syscalls.mount("overlay", _TRIAL, "overlay", 0, layers)
        syscalls.umount(_TRIAL)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


@dataclass
class Layer(Counted):
    """What one sealed slot changed: `trees` maps the name of each tree to the directory that holds its change."""

    name: str
    store: Store
    trees: Mapping[str, str]
    below: tuple[Layer, ...]
    """The layers it lies on, topmost first."""
    image: str | None

    def beneath(self) -> tuple[Layer, ...]:
        return self.below

    def drop_files(self) -> None:
        self.store.release()
