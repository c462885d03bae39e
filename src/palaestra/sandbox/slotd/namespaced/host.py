"""The server's own root and what all of its slots share: prepared lowers, the skeleton, the slots' user namespace.

The server mounts a tmpfs, makes it its root and keeps the host's root below it as /host. It does so in a mount
namespace of its own and over an existing directory, so nothing is created on the host and all of it is gone with the
server.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from .. import syscalls
from ..layers.overlay import Marks
from ..protocol.frames import Fields
from . import base_system, namespaces, native_init
from .rootfs import HOST, Bind, Lowers, Tree, host_trees, prepare_shared, system_directories, system_links

_OPTIONS = "mode=755,size=64m"
_SKELETON, _NETWORK = "/skeleton/base", "/skeleton/network"
_PLACES = "/skeleton/places"
"""Lies below every image: the directories that must be there, whether the image has them or not."""


@dataclass
class World:
    """Everything a slot is made from besides its own store. `owner` is the slots' root as the server sees it."""

    full: bool
    owner: int
    user_namespace: int | None
    user_xattrs: bool
    lowers: Lowers
    init: int
    """A descriptor of the program that is pid 1 of each slot."""
    prefix: Bind | None = None

    @property
    def marks(self) -> Marks:
        """The overlay marks of this server's layers."""
        return Marks(self.user_xattrs)

    def trees(self, image: str | None, network: bool) -> tuple[Tree, ...]:
        """The trees of a root. Raises OSError where the image cannot be used."""
        if image is not None:
            return (Tree("root", "/", (self.lowers.get(image), _PLACES)),)
        return host_trees(self.lowers, (_NETWORK, _SKELETON) if network else (_SKELETON,))

    def binds(self, mounts: list[list[str]], image: str | None) -> tuple[Bind, ...]:
        """What is mounted read-only into a root."""
        wanted = tuple(Bind(self.lowers.get(source), target) for source, target in mounts)
        return wanted if image is not None or self.prefix is None else (self.prefix, *wanted)


def enter_own_root() -> None:
    """Give this process a mount namespace and a root of its own."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
    place = next(path for path in ("/tmp", "/mnt", "/var", "/usr") if os.path.isdir(path))  # noqa: S108
    syscalls.mount("tmpfs", place, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, _OPTIONS)
    os.mkdir(f"{place}{HOST}")
    try:
        syscalls.pivot_root(place, f"{place}{HOST}")
    except PermissionError:
        _move_root(place)
    os.chdir("/")
    os.mkdir("/proc")
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    for name in ("slots", "lower", "skeleton", "stage"):
        os.mkdir(f"/{name}")


def _move_root(place: str) -> None:
    """The same where a container forbids pivot_root: a copy of the old tree of mounts below, and the new root above."""
    syscalls.umount(place)
    tree = syscalls.open_tree("/", recursive=True)  # before there is anything of ours in it
    try:
        syscalls.mount("tmpfs", place, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, _OPTIONS)
        os.mkdir(f"{place}{HOST}")
        syscalls.move_mount(tree, f"{place}{HOST}")
    finally:
        os.close(tree)
    os.chdir(place)
    syscalls.mount(".", "/", flags=syscalls.MS_MOVE)
    os.chroot(".")


def prepare(full: bool, settings: Fields) -> World:
    """Make what all slots share. Raises OSError where this kernel or its configuration does not allow it."""
    init = native_init.load(HOST)
    privileged = namespaces.is_real_root()
    namespace = namespaces.make_range_namespace() if privileged else None
    owner = namespaces.RANGE_START if privileged else 0
    lowers = Lowers(namespace if full else None)
    world = World(full, owner, namespace, not privileged, lowers, init)
    syscalls.mount("tmpfs", "/skeleton", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755,size=64m")
    prefix = settings.get("prefix")
    if prefix:
        world.prefix = Bind(lowers.get(prefix), prefix)
    places = [f"/{name}" for name in system_directories()] + ([prefix] if prefix else [])
    os.mkdir(_SKELETON)
    os.mkdir(_NETWORK)
    for name in ("dev", "proc", "root", "sys", "tmp", "workspace"):
        os.makedirs(f"{_PLACES}/{name}")
    base_system.build(_SKELETON, HOST, "workspace", system_links(), places)
    base_system.build_network(_NETWORK, HOST)
    if owner:
        base_system.give("/skeleton", owner)
    prepare_shared()  # not before: what is given away must not be the host's devices
    return world
