"""Stores the files of slots: one tmpfs per slot, and the immutable layers of sealed slots.

Each store is a tmpfs of its own: its size is the slot's disk limit, and dropping it costs one system call or two. If
the kernel supports overlays on an unmounted tmpfs, the store is held by a descriptor alone, because a mount would make
every new slot more expensive: a slot begins with a copy of the server's mount namespace.

A layer is one upper directory for each tree of a root (see `rootfs.py`). Layers and stores are kept until their last
user releases them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from .. import syscalls
from ..rung import Counted, SealedLayer

FIRST_STORE = 64  # the lowest number that a store's descriptor can have
_UNLIMITED = "size=0,nr_inodes=0"
_TRIAL = "/stage"


def most_inodes(size_bytes: int) -> int:
    """Return the maximum number of inodes for a tmpfs with this size limit."""
    # An empty file takes kernel memory but nothing of a tmpfs's size, so there may be one file for each page of it.
    return max(16384, size_bytes >> 12)


def copy_attributes(status: os.stat_result, directory: str) -> None:
    """Give a directory the owner and mode in `status`. If that owner does not exist in this user namespace, the
    directory still belongs to the slot's root user."""
    with contextlib.suppress(OSError):
        os.chown(directory, status.st_uid, status.st_gid)
    os.chmod(directory, stat.S_IMODE(status.st_mode))


class LayerStore(Counted):
    """One tmpfs, until its last user releases it. `path` leads to the tmpfs, in this process and in a fork that keeps
    `fd`."""

    fd: int | None = None

    def __init__(self, place: str, size_bytes: int, owner: int) -> None:
        """Make the store. On kernels that need a mount point, it is `place`."""
        options = f"size={size_bytes},nr_inodes={most_inodes(size_bytes)},mode=755,uid={owner},gid={owner}"
        if _can_detach():
            self.fd = _high(syscalls.detached_tmpfs(options))
            self.path = f"/proc/self/fd/{self.fd}"
        else:
            self.path = place
            os.mkdir(place)
            syscalls.mount("tmpfs", place, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)

    def unlimit(self) -> None:
        """Remove the store's limits. This is only for stores to which no slot writes: those of sealed slots, because
        views need new inodes, and those of checkpoints."""
        if self.fd is not None:
            syscalls.reconfigure(self.fd, _UNLIMITED)
            return
        flags = syscalls.MS_REMOUNT | syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount("tmpfs", self.path, "tmpfs", flags, _UNLIMITED)

    def drop_files(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
        else:
            syscalls.umount(self.path)
            os.rmdir(self.path)


def _high(fd: int) -> int:
    """Move a descriptor to a number that no fork needs for something else, and return that number."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_STORE)
    finally:
        os.close(fd)


@functools.cache
def _can_detach() -> bool:
    """Return whether overlays work on an unmounted tmpfs (Linux 6.15). The answer is found once, by trying it."""
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


@dataclass(frozen=True, slots=True)
class Tree:
    """One overlay of a root: its mount point in the slot, and its lower directories, topmost first."""

    name: str
    target: str
    lowers: tuple[str, ...]


class OverlayLayer(SealedLayer):
    """The changes of one sealed slot: `trees` maps the name of each tree to the directory with the changes in it."""

    below: tuple[OverlayLayer, ...]

    def __init__(
        self,
        name: str,
        store: LayerStore,
        trees: Mapping[str, str],
        below: tuple[OverlayLayer, ...],
        image: str | None,
    ) -> None:
        super().__init__(name, below)
        self.store, self.trees, self.image = store, trees, image

    def drop_files(self) -> None:
        self.store.release()
        super().drop_files()


@dataclass(frozen=True, slots=True)
class OverlayFiles:
    """The files of a slot: its own store, the layers from which it started, and its trees with all directories below
    them."""

    store: LayerStore
    layers: tuple[OverlayLayer, ...]
    trees: tuple[Tree, ...]
    image: str | None

    def stores(self) -> list[LayerStore]:
        """Return the stores of the slot and of its layers."""
        return [self.store, *(layer.store for layer in self.layers)]

    def upper(self, tree: Tree) -> str:
        """Return the directory with the slot's own changes to a tree."""
        return f"{self.store.path}/u/{tree.name}"

    def work(self, tree: Tree) -> str:
        """Return the directory in which the kernel prepares changes to a tree."""
        return f"{self.store.path}/w/{tree.name}"

    def release(self) -> None:
        """Release the store and the layers from which the slot started."""
        self.store.release()
        for layer in self.layers:
            layer.release()
