"""Where the files of slots live: one tmpfs per slot, and the immutable layers that sealed slots leave behind.

A store is a tmpfs of its own, so that its size is the slot's disk limit and dropping it costs one umount whatever is in
it. A layer is one upper directory per tree of a root. Layers count who uses them: a slot keeps the layers it started
from, and a layer keeps the layers below it, until the last user is gone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import syscalls


def copy_attributes(status: os.stat_result, directory: str) -> None:
    """Give a directory of ours the owner and mode of another one.

    An owner that does not exist in this user namespace cannot be given; the directory stays the slot's root's then.
    """
    with contextlib.suppress(OSError):
        os.chown(directory, status.st_uid, status.st_gid)
    os.chmod(directory, stat.S_IMODE(status.st_mode))


class Store:
    """One tmpfs, mounted in the server's namespace until its last user lets it go."""

    def __init__(self, path: str, size_bytes: int, owner: int) -> None:
        self.path = path
        self._users = 1
        os.mkdir(path)
        inodes = max(16384, size_bytes >> 12)
        options = f"size={size_bytes},nr_inodes={inodes},mode=755,uid={owner},gid={owner}"
        syscalls.mount("tmpfs", path, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)

    def unlimit(self) -> None:
        """Lift the limits of a store that no slot writes to any more: a view of it needs inodes of its own."""
        flags = syscalls.MS_REMOUNT | syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount("tmpfs", self.path, "tmpfs", flags, "size=0,nr_inodes=0")

    def keep(self) -> Store:
        """One user more."""
        self._users += 1
        return self

    def release(self) -> None:
        """One user less."""
        self._users -= 1
        if self._users == 0:
            syscalls.umount(self.path)
            os.rmdir(self.path)


@dataclass
class Layer:
    """What one sealed slot changed: `trees` maps the name of each tree to the directory that holds its change."""

    name: str
    store: Store
    trees: Mapping[str, str]
    below: tuple[Layer, ...]
    """The layers it lies on, topmost first."""
    image: str | None
    _users: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        for layer in self.below:
            layer.keep()

    def keep(self) -> None:
        """One user more."""
        self._users += 1

    def release(self) -> None:
        """One user less; with the last one the files go."""
        self._users -= 1
        if self._users == 0:
            self.store.release()
            for layer in self.below:
                layer.release()
