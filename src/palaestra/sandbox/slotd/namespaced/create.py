"""How a slot is built and confined in namespaces: what its init does, from the server's fork to the first command.

What a new slot needs before its init is forked: its store, its trees with all that lies below, its limits.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from .. import syscalls
from ..exec.pipes import memory_file
from ..layers.store import Layer, Store, copy_attributes
from ..network import metadata_block
from ..protocol.frames import Fields
from ..rung import CannotMake
from . import cgroups, init_steps, namespaces, privileges, rootfs
from .host import World
from .init_steps import Do, Step
from .rootfs import Bind, Overlay, RootPlan, Tree

CONTROL, USERS, LIST, _FREE = 3, 4, 5, 6
"""Descriptors of an init: its control socket, the user namespace to enter, the encoded steps, the first free one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that makes one slot different from another."""

    root: rootfs.RootPlan
    hostname: str
    network: bool
    groups: tuple[str, ...]
    user_namespace: int | None
    """The namespace to enter; None makes one of its own in which only uid 0 exists."""
    open_files: int | None
    processes: int | None
    """A limit per user, where there is no control group to count."""
    data_bytes: int | None
    """A limit per process, where there is no control group to sum up."""
    stores: tuple[int, ...]
    """Descriptors, from `stores.FIRST_STORE` on, that the root's paths name."""
    init: int
    """A descriptor of the program that is pid 1."""


def fork(plan: Plan, control: socket.socket) -> int:
    """Start the init, pid 1 of a process namespace of its own, with its end of `control`; its pid."""
    listed = memory_file(init_steps.encode([*_enter(plan), *_confine(plan)]))
    fds = {CONTROL: control.fileno(), LIST: listed, **dict(zip(plan.stores, plan.stores, strict=True))}
    if plan.user_namespace is not None:
        fds[USERS] = plan.user_namespace
    moved: list[int] = []
    try:
        actions = []
        for place, fd in fds.items():
            source = fd
            if fd != place and fd < _FREE:  # where another one is about to be put
                source = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE)
                moved.append(source)
            actions.append((os.POSIX_SPAWN_DUP2, source, place))
        with namespaces.new_pid_namespace():
            return os.posix_spawn(f"/proc/self/fd/{plan.init}", ["slot-init", "--build"], {}, file_actions=actions)
    finally:
        for fd in (listed, *moved):
            os.close(fd)


def _enter(plan: Plan) -> Iterator[Step]:
    """Into the slot's groups, namespaces and root, still with the server's privileges."""
    yield from (Step(Do.JOIN, (directory,)) for directory in plan.groups)
    flags = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWCGROUP
    yield Step(Do.UNSHARE, (), flags | (0 if plan.network else syscalls.CLONE_NEWNET))
    if not plan.network:
        yield Step(Do.LOOPBACK)
        for name, value in namespaces.OPEN_PORTS:
            yield Step(Do.WRITE, (f"/proc/sys/net/ipv4/{name}", value), 1)  # only a convenience
    yield Step(Do.HOST_NAME, (plan.hostname,))
    yield Step(Do.UMASK, (), 0)
    yield from rootfs.build(plan.root, _FREE)
    yield Step(Do.UMASK, (), 0o022)


def _confine(plan: Plan) -> Iterator[Step]:
    """Give up everything that the slot must not have. Nothing of the slot has run before this."""
    yield Step(Do.SESSION)
    if plan.user_namespace is None:
        yield from _single_user_namespace()
    else:
        yield Step(Do.ENTER, (), USERS, syscalls.CLONE_NEWUSER)
        yield Step(Do.BE_ROOT)
        if plan.processes is not None:  # they are counted per user and namespace, so the slot needs its own
            # The change of user has closed the process's own /proc entries to it.
            yield Step(Do.PRCTL, (), syscalls.PR_SET_DUMPABLE, 1)
            yield from _single_user_namespace()
    yield Step(Do.LIMIT, (), resource.RLIMIT_CORE, 0)
    for limit, value in (
        (resource.RLIMIT_NOFILE, plan.open_files),
        (resource.RLIMIT_NPROC, plan.processes),
        (resource.RLIMIT_DATA, plan.data_bytes),
    ):
        if value is not None:
            yield Step(Do.LIMIT, (), limit, value)
    yield Step(Do.PRCTL, (), syscalls.PR_SET_NO_NEW_PRIVS, 1)
    yield Step(Do.KEEP_CAPABILITIES, (), privileges.KEPT)
    yield Step(Do.FILTER, program=privileges.program())
    yield Step(Do.PRCTL, (), syscalls.PR_SET_DUMPABLE, 0)


def _single_user_namespace() -> Iterator[Step]:
    """A new one, in which the process is root and nobody else exists."""
    yield Step(Do.UNSHARE, (), syscalls.CLONE_NEWUSER)
    yield Step(Do.WRITE, ("/proc/self/setgroups", "deny"), 1)  # it is denied in the namespace around this one already
    yield Step(Do.WRITE, ("/proc/self/uid_map", "0 0 1"))
    yield Step(Do.WRITE, ("/proc/self/gid_map", "0 0 1"))


_STAGE = "/stage"
_DEFAULT_DISK_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Ground:
    """What a slot stands on: its own store, the layers it started from, and its trees with all that lies below them."""

    store: Store
    layers: tuple[Layer, ...]
    trees: tuple[Tree, ...]
    image: str | None

    def stores(self) -> list[Store]:
        """Where all of its own files and those of its layers are."""
        return [self.store, *(layer.store for layer in self.layers)]

    def upper(self, tree: Tree) -> str:
        """Where the slot's own change of a tree is."""
        return f"{self.store.path}/u/{tree.name}"

    def work(self, tree: Tree) -> str:
        """Where the kernel prepares changes of a tree."""
        return f"{self.store.path}/w/{tree.name}"

    def release(self) -> None:
        """Let go of the store and of the layers below it."""
        self.store.release()
        for layer in self.layers:
            layer.release()


@dataclass(frozen=True, slots=True)
class Made:
    """Everything for one slot but its processes."""

    ground: Ground
    groups: tuple[str, ...]
    plan: Plan
    exposed: str
    """Why a slot with network reaches metadata addresses; empty where it does not."""


class SlotMaker:
    """Makes slots in one world. `group` is the server's control groups, where it has any."""

    def __init__(self, world: World, group: cgroups.ServerGroup | None) -> None:
        self._world, self._group = world, group
        self._guard: metadata_block.Guard | None = None
        self._stores = itertools.count(1)

    def make(self, name: str, fields: Fields, layers: tuple[Layer, ...]) -> Made:
        """Lay out a slot as a CREATE request describes it. Raises `CannotMake` or OSError and leaves nothing then."""
        image, disk = fields["image"], fields["limits"]["disk_bytes"] or _DEFAULT_DISK_BYTES
        if layers and layers[0].image != image:
            raise CannotMake("a snapshot starts only slots of the image it was made from")
        try:
            trees = self._world.trees(image, fields["network"])
            binds = self._world.binds(fields["mounts"], image)
        except OSError as error:
            raise CannotMake(_advice(error)) from None
        store = Store(f"/slots/{next(self._stores)}", disk, self._world.owner)
        try:
            for kind in "uw":
                os.mkdir(f"{store.path}/{kind}")
            stacked = tuple(self._lay_out(store, tree, layers, _places(tree, trees, binds)) for tree in trees)
            groups = self._join_groups(name, fields["limits"], fields["network"])
            exposed = self._guard_network(name) if fields["network"] else ""
        except BaseException:
            store.release()
            raise
        for layer in layers:
            layer.keep()
        ground = Ground(store, layers, stacked, image)
        return Made(ground, groups, self._plan(ground, groups, binds, disk, fields), exposed)

    def _lay_out(self, store: Store, tree: Tree, layers: tuple[Layer, ...], places: list[str]) -> Tree:
        """Make the directories of one tree; the tree with everything that lies below it."""
        lowers = tuple(layer.trees[tree.name] for layer in layers if tree.name in layer.trees) + tree.lowers
        missing = [place for place in places if not _is_in(place, tree.lowers)]
        if missing:
            lowers += (self._make_places(f"{store.path}/m/{tree.name}", missing),)
        for kind in "uw":
            os.mkdir(f"{store.path}/{kind}/{tree.name}")
        copy_attributes(os.stat(lowers[0]), f"{store.path}/u/{tree.name}")
        return Tree(tree.name, tree.target, lowers)

    def _make_places(self, directory: str, places: list[str]) -> str:
        """A lowest layer with nothing but the mount points that are missing, so that no change shows them."""
        os.makedirs(directory)
        for place in places:
            path = directory
            for name in place.split("/"):
                path = f"{path}/{name}"
                if not os.path.isdir(path):
                    os.mkdir(path)
                    os.chown(path, self._world.owner, self._world.owner)
        return directory

    def _join_groups(self, name: str, limits: Fields, network: bool) -> tuple[str, ...]:
        if self._group is None:
            return ()
        wanted = cgroups.Limits(limits["memory_bytes"], limits["cpus"], limits["pids"])
        return tuple(self._group.add(name, wanted, rootfs.HOST, network))

    def _guard_network(self, name: str) -> str:
        """Close the way to metadata addresses; why that cannot be done here, if it cannot."""
        if self._group is None:
            return "only root can refuse them (the rung full)"
        directory = self._group.guarded(name, rootfs.HOST)
        if directory is None:
            return "no control groups of version 2 are mounted writable here"
        try:
            self._guard = self._guard or metadata_block.Guard()
            self._guard.attach(directory)
        except OSError as error:
            return f"this kernel takes no programs for sockets: {error.strerror}"
        return ""

    def _plan(
        self, ground: Ground, groups: tuple[str, ...], binds: tuple[Bind, ...], disk: int, fields: Fields
    ) -> Plan:
        world, limits = self._world, fields["limits"]
        overlays = [Overlay(tree.target, tree.lowers, ground.upper(tree), ground.work(tree)) for tree in ground.trees]
        return Plan(
            root=RootPlan(tuple(overlays), binds, _STAGE, disk, world.owner, world.user_xattrs),
            hostname="slot",
            network=fields["network"],
            groups=groups,
            user_namespace=world.user_namespace,
            open_files=limits["open_files"],
            processes=None if groups else limits["pids"],
            data_bytes=None if groups else limits["memory_bytes"],
            stores=tuple(store.fd for store in ground.stores() if store.fd is not None),
            init=world.init,
        )


def _places(tree: Tree, trees: tuple[Tree, ...], binds: tuple[Bind, ...]) -> list[str]:
    """Where in a tree something is to be mounted, relative to it."""
    return [bind.target[len(tree.target) :].strip("/") for bind in binds if _tree_of(bind.target, trees) == tree]


def _tree_of(path: str, trees: tuple[Tree, ...]) -> Tree:
    inside = [tree for tree in trees if tree.target == "/" or path == tree.target or path.startswith(f"{tree.target}/")]
    return max(inside, key=lambda tree: len(tree.target))


def _is_in(path: str, lowers: tuple[str, ...]) -> bool:
    return any(os.path.lexists(f"{lower}/{path}") for lower in lowers)


def _advice(error: OSError) -> str:
    if error.errno in (errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP):
        return f"{error}: owners cannot be mapped there; use a directory on a local file system, or the rung userns"
    return str(error)
