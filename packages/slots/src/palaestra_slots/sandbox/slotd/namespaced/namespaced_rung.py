"""The isolation levels `full` and `userns`: slots made of namespaces, over stacks of layers.

The server lays out a slot (its store, its trees with all layers below, its limits); then the slot's init builds and
confines the slot by a list of steps (`native_init.py`).

A checkpoint copies the slot's own changes to a store of checkpoints while the slot is stopped. Files that have not
changed since the slot's last checkpoint are linked to the copies in that checkpoint. A file counts as unchanged if its
size and the kernel's time of change are the same, and this time is older than the last copy by a margin (file times are
coarse). Writing to a file through memory need not change its times, so everything is copied if a process can do that.

A snapshot is saved as a folder `N/TREE` for each tree of each layer, topmost layer first, with whiteouts, marks and
owners. It is used in place, as a read-only lower directory, under a shared lock that keeps it from being evicted. A
view of it cuts a copy in memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import os
import resource
import socket
import stat
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .. import syscalls
from ..exec.pipes import memory_file
from ..files import WORKSPACE, Writing, absolute
from ..layers.copy_tree import Earlier, Index, TreeCopy
from ..layers.cut_view import OverlayCut, Selection, duplicate_tree
from ..layers.layer_store import LayerStore, OverlayFiles, OverlayLayer, Tree, copy_attributes
from ..layers.overlay import Stack, StackedRoot, StackEntry, differences
from ..network import metadata_block
from ..protocol.frames import Fields
from ..rung import HOST, CannotMake, NetworkScope, NewSlot, SlotPath
from . import cgroups, namespaces, native_init, privileges, rootfs
from .host import COPY, HostSetup, prepare
from .native_init import BuildStep, Do
from .rootfs import Bind, Overlay, RootPlan

# Descriptors of an init: its control socket, the user namespace to enter (or /proc/sys, if the init makes a namespace),
# the encoded steps, and the first free number.
CONTROL, USERS, LIST, _FREE = 3, 4, 5, 6
_SETTINGS = USERS
_GROUPS, _OWN_GROUPS = 8, 16  # the first descriptors of the control groups of commands and of the init
_NETWORK = 24  # the network namespace to enter, if the init does not make one
_SPARE = 25

_CONNECTED = ("network", "allow", "group")  # the settings of slots whose network the server changes

_GRAIN_NS = 20_000_000
_STAGE = "/stage"
_DEFAULT_DISK_BYTES = 8 << 30


class NamespaceDriver:
    """Implements `RungDriver`. `group` holds the server's control groups, for `full`. Names of layers contain a token,
    because a client's snapshot may outlive its server, and must not name another server's files."""

    def __init__(self, full: bool, group: cgroups.ServerCgroup | None, settings: Fields) -> None:
        self._host, self._group = prepare(full, settings), group
        self.checkpoints = OverlayCheckpoints(self._host, group is not None)
        self._guard: metadata_block.Guard | None = None
        self._stores, self._layers, self._token = itertools.count(1), itertools.count(1), os.urandom(4).hex()

    def make(self, name: str, fields: Fields, layers: tuple[OverlayLayer, ...]) -> NewSlot:
        image, disk = fields["image"], _file_bytes(fields["limits"], self._group is not None)
        if layers and layers[0].image != image:
            raise CannotMake("a snapshot can only start slots with the image from which it was made")
        try:
            trees = self._host.trees(image, fields["network"])
            binds = self._host.binds(fields["mounts"], image)
            copies = self._host.copies(fields.get("copies", ()))
            targets = [*(bind.target for bind in binds), *(copy.target for copy in copies)]
            if fields.get("workspace"):
                targets += [WORKSPACE, fields["workspace"]]
        except OSError as error:
            raise CannotMake(_advice(error)) from None
        store = LayerStore(f"/slots/{next(self._stores)}", disk, self._host.owner)
        try:
            for kind in "uw":
                os.mkdir(f"{store.path}/{kind}")
            uncover = not fields.get("continued")  # such a slot's changes are copied to the place of new ones
            stacked = tuple(
                self._lay_out(store, tree, layers, _mount_points_in(tree, trees, targets), uncover=uncover)
                for tree in trees
            )
            stacked += tuple(self._lay_out(store, tree, layers, [], uncover=uncover) for tree in copies)
            shared = fields["network"] and not self._host.tunnel
            groups = self._join_groups(name, fields["limits"], shared)
            exposed = self._guard_network(name) if shared else ""
        except BaseException:
            store.release()
            raise
        # Only now, because a failure before this leaves nothing behind.
        for layer in layers:
            layer.keep()
        files = OverlayFiles(store, layers, stacked, image)
        return NewSlot(files, groups, self._init(files, groups, binds, disk, shared, fields), exposed)

    def _lay_out(
        self, store: LayerStore, tree: Tree, layers: tuple[OverlayLayer, ...], places: list[str], *, uncover: bool
    ) -> Tree:
        """Make the directories of one tree; returns the tree with all directories below it."""
        changes = tuple(layer.trees[tree.name] for layer in layers if tree.name in layer.trees)
        base = tree.lowers
        missing = [place for place in places if not any(os.path.lexists(f"{lower}/{place}") for lower in base)]
        if missing:
            base += (self._make_places(f"{store.path}/m/{tree.name}", missing),)
        for kind in "uw":
            os.mkdir(f"{store.path}/{kind}/{tree.name}")
        upper, lowers = f"{store.path}/u/{tree.name}", changes + base
        # An overlay shows the owner and mode of its topmost directory, which is this new one.
        copy_attributes(os.stat(lowers[0]), upper)
        if uncover and changes and places:
            self._uncover(upper, places, Stack(lowers, self._host.marks), Stack(base, self._host.marks))
        return Tree(tree.name, tree.target, lowers)

    @staticmethod
    def _uncover(upper: str, places: list[str], shown: Stack, base: Stack) -> None:
        """Make the mount points again that a layer replaced or removed. An agent may have done that to keep the slot of
        its score from being made. `base` is the stack without the layers."""
        for place in places:
            wanted, found = base.find(place), shown.find(place)
            if wanted is None or (found is not None and _file_type(found) == _file_type(wanted)):
                continue
            names = place.split("/")
            for count in range(1, len(names) + 1):
                path = "/".join(names[:count])
                entry, model = shown.find(path), base.find(path)
                if os.path.lexists(f"{upper}/{path}") or model is None:
                    continue
                if entry is None or _file_type(entry) != _file_type(model):
                    entry = model
                if stat.S_ISDIR(entry.status.st_mode):
                    os.mkdir(f"{upper}/{path}")
                    copy_attributes(entry.status, f"{upper}/{path}")
                else:
                    # An empty file is enough, because something is mounted over it.
                    os.close(os.open(f"{upper}/{path}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))

    def _make_places(self, directory: str, places: list[str]) -> str:
        """Return a lowest layer that contains only the missing mount points, so that no list of changes shows them."""
        os.makedirs(directory)
        for place in places:
            path = directory
            for name in place.split("/"):
                path = f"{path}/{name}"
                if not os.path.isdir(path):
                    os.mkdir(path)
                    os.chown(path, self._host.owner, self._host.owner)
        return directory

    def _join_groups(self, name: str, limits: Fields, network: bool) -> tuple[str, ...]:
        if self._group is None:
            return ()
        return tuple(self._group.add(name, limits, HOST, network))

    def _guard_network(self, name: str) -> str:
        """Block metadata addresses if that is possible here. Returns why the slot has no network of its own."""
        directory = self._group.guarded(name, HOST) if self._group is not None else None
        if directory is not None:
            with contextlib.suppress(OSError):  # this kernel does not accept programs for sockets
                self._guard = self._guard or metadata_block.Guard()
                self._guard.attach(directory)
        return "/dev/net/tun is missing, or may not be opened"

    def _init(
        self,
        files: OverlayFiles,
        groups: tuple[str, ...],
        binds: tuple[Bind, ...],
        disk: int,
        shared_network: bool,
        fields: Fields,
    ) -> NamespaceInit:
        host, limits = self._host, fields["limits"]
        overlays: dict[bool, list[Overlay]] = {True: [], False: []}  # by whether they are over copies
        for tree in files.trees:
            overlay = Overlay(tree.target, tree.lowers, files.upper(tree), files.work(tree))
            overlays[tree.name.startswith(COPY)].append(overlay)
        return NamespaceInit(
            program=host.init,
            root=RootPlan(
                tuple(overlays[False]),
                binds,
                _STAGE,
                disk,
                host.owner,
                host.user_xattrs,
                host.own_devices,
                fields.get("workspace", ""),
                tuple(overlays[True]),
            ),
            shared_network=shared_network,
            groups=tuple((group, cgroups.init_group(group)) for group in groups),
            user_namespaces=host.user_namespaces,
            # The server opens sockets or devices in the network of such a slot, which no later slot could then get.
            networks=None if any(fields.get(name) for name in _CONNECTED) else host.networks,
            limits=ProcessLimits(
                open_files=limits["open_files"],
                processes=None if groups else limits["pids"],
                data_bytes=None if groups else limits["memory_bytes"],
            ),
            stores=tuple(store.fd for store in files.stores() if store.fd is not None),
        )

    def show(self, fields: Fields, layers: tuple[OverlayLayer, ...]) -> SlotPath:
        image = fields["image"]
        if not layers or layers[0].image != image:
            raise OSError(errno.EINVAL, "there are no layers to show")
        trees, binds = self._host.trees(image, fields["network"]), self._host.binds(fields["mounts"], image)
        targets = [*(tree.target for tree in trees if tree.target != "/"), *(bind.target for bind in binds)]
        targets += [fields["workspace"]] if fields.get("workspace") else []
        # The view has no mounts, so a path below one would show the empty directory under it.
        if any(f"{target}/".startswith(f"{place}/") for target in targets for place in fields["on_demand"]):
            raise OSError(errno.EOPNOTSUPP, "something else is mounted there")
        (tree,) = (tree for tree in trees if tree.target == "/")
        lowers = [layer.trees[tree.name] for layer in layers if tree.name in layer.trees]
        options = rootfs.overlay_options((*lowers, *tree.lowers), self._host.user_xattrs)
        return SlotPath(syscalls.detached_overlay(",".join(options)), "/", self._host.owner)

    def seal(self, files: OverlayFiles) -> OverlayLayer:
        """Return a dead slot's changes as a layer, which takes over the slot's store."""
        trees = {tree.name: files.upper(tree) for tree in files.trees}
        layer = OverlayLayer(self._layer_name(), files.store, trees, files.layers, files.image)
        for lower in files.layers:
            lower.release()
        return layer

    def duplicate(self, layer: OverlayLayer) -> Generator[None, None, OverlayLayer]:
        if isinstance(layer.store, DiskStore):
            return (yield from self.checkpoints.to_memory(layer))
        layer.store.unlimit()
        name = self._layer_name()
        directory = f"{layer.store.path}/{name}"
        os.mkdir(directory)
        for tree, path in layer.trees.items():
            duplicate_tree(path, f"{directory}/{tree}")
        trees = {tree: f"{directory}/{tree}" for tree in layer.trees}
        return OverlayLayer(name, layer.store.keep(), trees, layer.below, layer.image)

    def cut(self, layer: OverlayLayer, view: Fields) -> None:
        marks = self._host.marks
        layer.store.unlimit()
        stacks = {tree: Stack(tree.lowers, marks) for tree in self._trees_below(layer)}
        below = StackedRoot([(tree.target, stack) for tree, stack in stacks.items()])
        chosen = Selection.resolved(view["only"], view["without"], below)
        for tree, stack in stacks.items():
            trash = f"{layer.store.path}/trash-{layer.name}-{tree.name}"
            os.mkdir(trash)
            part = chosen.within(tree.target.strip("/"))
            cut = OverlayCut(layer.trees[tree.name], stack, marks, trash)
            cut.keep_only(part.only)
            for path in part.without:
                cut.leave_out(path)

    def slot_changes(self, files: OverlayFiles) -> Iterator[Fields | None]:
        return self._changes((tree, files.upper(tree)) for tree in files.trees)

    def layer_changes(self, layer: OverlayLayer) -> Iterator[Fields | None]:
        return self._changes((tree, layer.trees[tree.name]) for tree in self._trees_below(layer))

    def _changes(self, uppers: Iterable[tuple[Tree, str]]) -> Iterator[Fields | None]:
        marks = self._host.marks
        for tree, upper in uppers:
            for change in differences(upper, Stack(tree.lowers, marks), marks):
                yield change and {**change, "path": f"{tree.target.rstrip('/')}/{change['path']}"}

    def _trees_below(self, layer: OverlayLayer) -> list[Tree]:
        """Return the trees that a layer changes, with all directories below the layer."""
        trees = []
        for tree in self._host.trees(layer.image, network=False):
            lowers = tuple(below.trees[tree.name] for below in layer.below if tree.name in below.trees) + tree.lowers
            trees.append(Tree(tree.name, tree.target, lowers))
        return trees

    def _layer_name(self) -> str:
        return f"layer-{self._token}-{next(self._layers)}"

    def locate(self, files: OverlayFiles, root: int, path: str, writing: bool = False) -> SlotPath:
        """Return a place with the path unchanged, because everything is below the slot's own root."""
        return SlotPath(root, path, self._host.owner)


class ProcessLimits(NamedTuple):
    """The limits that every process of a slot has by itself."""

    open_files: int | None
    processes: int | None  # a limit per user, if no control group counts them
    data_bytes: int | None  # a limit per process, if no control group limits memory


@dataclass(slots=True)
class NamespaceInit:
    """Implements `SlotInit`: the init is pid 1 of a process namespace, and the kernel ends everything with it."""

    program: int  # a descriptor of the program that is pid 1
    root: RootPlan
    shared_network: bool  # whether the slot has the host's network; otherwise it gets an empty network
    groups: tuple[tuple[str, str | None], ...]  # each with the control group of inits next to it, if there is one
    user_namespaces: namespaces.RangeNamespaces | None  # the source of the slot's namespace; None if the init makes it
    networks: namespaces.UnusedNetworks | None  # of which the slot's may be one; None if it always gets a new one
    limits: ProcessLimits
    stores: tuple[int, ...]  # descriptors, from `layer_store.FIRST_STORE` on, that the root's paths name
    _taken: int | None = None
    _network: int | None = None

    @property
    def network(self) -> NetworkScope:
        """The network of the slot: the host's if the network is on and the slot cannot have its own device, otherwise
        the slot's own."""
        return NetworkScope.SHARED if self.shared_network else NetworkScope.OWN

    @property
    def takes_lines(self) -> bool:
        return True

    @property
    def exposed(self) -> bool:
        """False, because the kernel drops the signals of pid 1's own namespace."""
        return False

    @property
    def shares_memory(self) -> bool:
        return bool(self.groups) and all(own is None for _, own in self.groups)

    def gone(self) -> bool:
        """Return True, because the kernel reports the init's death only when all other processes of its namespace are
        dead."""
        self._give_back()
        return True

    def _give_back(self) -> None:
        if self.user_namespaces is not None and self._taken is not None:
            self.user_namespaces.give_back(self._taken)
            self._taken = None
        if self.networks is not None and self._network is not None:
            self.networks.keep(self._network)
            self._network = None

    def end_soon(self, pid: int) -> None:
        if self.networks is not None:
            self._network = self.networks.of_slot(pid)

    def fork(self, control: socket.socket) -> int:
        if self.user_namespaces is not None:
            self._taken = self.user_namespaces.take()
        network = self.networks.take() if self.networks is not None else None
        try:
            return self._start_init(control, network)
        except BaseException:
            self._give_back()
            raise
        finally:
            if network is not None:
                os.close(network)

    def _start_init(self, control: socket.socket, network: int | None) -> int:
        steps = (*self._enter(network is None), _confinement(self.user_namespaces is None, self.limits))
        listed = memory_file(native_init.encode_steps(steps))
        fds = {CONTROL: control.fileno(), LIST: listed, **dict(zip(self.stores, self.stores, strict=True))}
        if self._taken is not None:
            fds[USERS] = self._taken
        if network is not None:  # the last one, since its number may be that of another's source
            fds[_NETWORK] = network
        moved: list[int] = []
        try:
            actions = []
            for place, fd in fds.items():
                source = fd
                if fd != place and fd < _FREE:  # another descriptor is about to be put at this number
                    source = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE)
                    moved.append(source)
                actions.append((os.POSIX_SPAWN_DUP2, source, place))
            program = f"/proc/self/fd/{self.program}"
            with namespaces.new_pid_namespace():
                return os.posix_spawn(program, ["slot-init", "--build"], {}, file_actions=actions)
        finally:
            for fd in (listed, *moved):
                os.close(fd)

    def _enter(self, makes_network: bool) -> Iterator[BuildStep | bytes]:
        """Yield the steps that enter the slot's groups, namespaces and root, with the server's privileges.

        The init joins the slot's groups, which are then all that the slot's new namespace shows of the hierarchy. Where
        there is a group for inits, the init goes on to that group, because the memory that commands use up must not be
        the init's: if the slot's group has no memory left, the kernel ends processes in it.
        """
        for number, (directory, own) in enumerate(self.groups):
            yield BuildStep(Do.OPEN_GROUP, (directory,), _GROUPS + number)
            yield BuildStep(Do.JOIN, (), _GROUPS + number)
            if own is not None:
                yield BuildStep(Do.COMMANDS_JOIN, (), _GROUPS + number)
                yield BuildStep(Do.OPEN_GROUP, (own,), _OWN_GROUPS + number)
        if self.user_namespaces is None:  # opened here, because the slot's own /proc/sys is read-only
            yield BuildStep(Do.OPEN, ("/proc/sys",), _SETTINGS)
        # After the groups have been joined: a new cgroup namespace has its root where the process is at that moment.
        # Source: cgroup_namespaces(7).
        flags = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWCGROUP
        if makes_network and not self.shared_network:
            flags |= syscalls.CLONE_NEWNET
        yield BuildStep(Do.UNSHARE, (), flags)
        for number, (_, own) in enumerate(self.groups):
            if own is not None:
                yield BuildStep(Do.JOIN, (), _OWN_GROUPS + number)
        if not makes_network:
            yield BuildStep(Do.ENTER, (), _NETWORK, syscalls.CLONE_NEWNET)
        elif not self.shared_network:
            # In a new network namespace, the loopback interface is down. Source: network_namespaces(7).
            yield BuildStep(Do.LOOPBACK)
            for name, value in namespaces.OPEN_PORTS:
                yield BuildStep(Do.WRITE, (f"/proc/sys/net/ipv4/{name}", value), 1)  # may fail: only a convenience
        yield BuildStep(Do.HOST_NAME, ("slot",))
        # So that the modes of the root's files and directories are exactly those that `rootfs` gives.
        yield BuildStep(Do.UMASK, (), 0)
        yield from rootfs.build(self.root, _FREE, _SPARE)
        yield BuildStep(Do.UMASK, (), 0o022)


@functools.lru_cache(maxsize=64)
def _confinement(makes_user_namespace: bool, limits: ProcessLimits) -> bytes:
    """Return the steps, encoded, that drop everything the slot must not have. No program of the slot runs before they
    are done."""
    return native_init.encode_steps(_confine(makes_user_namespace, limits))


def _confine(makes_user_namespace: bool, limits: ProcessLimits) -> Iterator[BuildStep]:
    yield BuildStep(Do.SESSION)
    if makes_user_namespace:
        yield from _single_user_namespace()
        for name, most in namespaces.SHARED_COUNTERS:
            yield BuildStep(Do.WRITE, (f"/proc/self/fd/{_SETTINGS}/{name}", most), 1)  # some kernels lack a setting
    else:
        yield BuildStep(Do.ENTER, (), USERS, syscalls.CLONE_NEWUSER)
        yield BuildStep(Do.BE_ROOT)
        if limits.processes is not None:  # processes are counted per user and namespace, so the slot needs its own
            # Since the change of user, the process may not write to its own /proc entries.
            yield BuildStep(Do.PRCTL, (), syscalls.PR_SET_DUMPABLE, 1)
            yield from _single_user_namespace()
    # A limit of 0 would not keep the kernel from starting the host's program for core dumps; 1 does (core(5)).
    yield BuildStep(Do.LIMIT, (), resource.RLIMIT_CORE, 1)
    for limit, value in (
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_DATA, limits.data_bytes),
    ):
        if value is not None:
            yield BuildStep(Do.LIMIT, (), limit, value)
    # Without a capability, a process may install a filter only if it can gain no privileges (seccomp(2)).
    yield BuildStep(Do.PRCTL, (), syscalls.PR_SET_NO_NEW_PRIVS, 1)
    yield BuildStep(Do.KEEP_CAPABILITIES, (), privileges.KEPT)
    # The filter forbids mounts and namespaces, so it comes after all steps that make them.
    yield BuildStep(Do.FILTER, program=privileges.program())
    # No process of the slot may trace the init or open its descriptors through /proc.
    yield BuildStep(Do.PRCTL, (), syscalls.PR_SET_DUMPABLE, 0)


def _single_user_namespace() -> Iterator[BuildStep]:
    """Yield the steps that enter a new user namespace, in which the process is root and no other user exists.

    The paths are relative, because the process may not pass through a closed root directory until it is root again.
    """
    yield BuildStep(Do.CHANGE_DIRECTORY, ("/proc",))
    yield BuildStep(Do.UNSHARE, (), syscalls.CLONE_NEWUSER)
    # Without privileges outside, the kernel accepts a map of groups only after this (user_namespaces(7)).
    yield BuildStep(Do.WRITE, ("self/setgroups", "deny"), 1)  # the outer namespace may deny it already
    yield BuildStep(Do.WRITE, ("self/uid_map", "0 0 1"))
    yield BuildStep(Do.WRITE, ("self/gid_map", "0 0 1"))
    yield BuildStep(Do.CHANGE_DIRECTORY, ("/",))


def _file_type(entry: StackEntry) -> int:
    return stat.S_IFMT(entry.status.st_mode)


def _mount_points_in(tree: Tree, trees: tuple[Tree, ...], targets: Sequence[str]) -> list[str]:
    """Return those of the mount points that are in a tree, relative to the tree."""
    return [target[len(tree.target) :].strip("/") for target in targets if _tree_of(target, trees) == tree]


def _tree_of(path: str, trees: tuple[Tree, ...]) -> Tree:
    inside = [tree for tree in trees if tree.target == "/" or path == tree.target or path.startswith(f"{tree.target}/")]
    return max(inside, key=lambda tree: len(tree.target))


def _file_bytes(limits: Fields, grouped: bool) -> int:
    """Return the size limit of a slot's files. Files are in memory, so if a control group limits the memory, the slot's
    files leave an eighth of it to the slot's processes. A process that fills the workspace then sees a full disk, and
    the slot's commands still run."""
    disk, memory = limits["disk_bytes"] or _DEFAULT_DISK_BYTES, limits["memory_bytes"]
    return int(disk if memory is None or not grouped else min(disk, memory - memory // 8))


def _write_file(root: int, path: str, data: bytes, owner: int) -> None:
    """Write a file as the request `write` does in a slot with this root."""
    writing = Writing(root, absolute(path), None, owner)
    writing.put(data)
    writing.close()


def _advice(error: OSError) -> str:
    if error.errno in (errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP):
        return f"{error}: owners cannot be mapped; use a directory on a local file system, or the level userns"
    return str(error)


@dataclass(frozen=True, slots=True)
class _Last:
    """The last checkpoint of one slot. `mapped` is true if a process could write to files through memory at that
    time."""

    store: LayerStore
    index: Index
    begun_ns: int
    mapped: bool


class DiskStore(LayerStore):
    """A saved layer: mounted read-only and locked against eviction until its last user releases it."""

    def __init__(self, folder: str, place: str) -> None:
        self.path = place
        self._lock = os.open(f"{HOST}{folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # An eviction renames the folder while it holds the lock, so the lock may be on a folder that is being
            # removed.
            named, held = os.stat(f"{HOST}{folder}"), os.fstat(self._lock)
            if (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
                raise FileNotFoundError(2, "evicted while it was opened", folder)
            self._mount(folder)
        except BaseException:
            os.close(self._lock)
            raise

    def _mount(self, folder: str) -> None:
        tree = syscalls.open_tree(f"{HOST}{folder}")
        try:
            syscalls.set_mount_attributes(tree, syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV)
            os.mkdir(self.path)
            syscalls.move_mount(tree, self.path)
        finally:
            os.close(tree)

    def unlimit(self) -> None:
        """Raise OSError: limits are lifted only before a write, and this layer is never written to. A layer that is to
        be cut is copied first (`OverlayCheckpoints.to_memory`)."""
        raise OSError(errno.EROFS, "a snapshot on disk is never written to")

    def drop_files(self) -> None:
        syscalls.umount(self.path)
        os.rmdir(self.path)
        os.close(self._lock)


class OverlayCheckpoints:
    """Implements `Checkpoints` for one server. `grouped` is true if control groups limit the memory of slots."""

    def __init__(self, host: HostSetup, grouped: bool) -> None:
        self._host, self._grouped = host, grouped
        self._last: dict[str, _Last] = {}
        self._numbers = itertools.count(1)
        self._token = os.urandom(4).hex()

    def checkpoint(
        self, files: OverlayFiles, mapped: bool, begun_ns: int
    ) -> Generator[None, None, tuple[OverlayLayer, int]]:
        last = self._last.get(files.store.path)
        number = next(self._numbers)
        store = self._make_store(number) if last is None else last.store
        copy, folder = TreeCopy(self._earlier(last, mapped)), f"{store.path}/{number}"
        trees = {tree.name: f"{folder}/{tree.name}" for tree in files.trees}
        try:
            os.mkdir(folder, 0o755)
            for tree in files.trees:
                yield from copy.tree(files.upper(tree), trees[tree.name])
        except BaseException:
            if last is None:
                store.release()
            raise
        self._last[files.store.path] = _Last(store, copy.index, begun_ns, mapped)
        name = f"layer-{self._token}-c{number}"
        return OverlayLayer(name, store.keep(), trees, files.layers, files.image), copy.copied_bytes

    def _make_store(self, number: int) -> LayerStore:
        """Return a store without a limit. Each checkpoint in it takes at most the slot's disk limit."""
        store = LayerStore(f"/slots/c{number}", 0, self._host.owner)
        store.unlimit()
        return store

    def _earlier(self, last: _Last | None, mapped: bool) -> Earlier | None:
        """Return a function that finds reusable copies in the last checkpoint; None if there are none."""
        if last is None or last.mapped or mapped:
            return None
        # A file that was changed while it was copied may have the same time afterwards: the clock of a file system
        # advances in steps.
        trusted_ns = last.begun_ns - _GRAIN_NS

        def find(status: os.stat_result) -> str | None:
            # The change time, because any program can set the modification time back.
            time_ns, size, path = last.index.get(status.st_ino, (0, 0, ""))
            same = (time_ns, size) == (status.st_ctime_ns, status.st_size)
            return path if path and same and time_ns < trusted_ns else None

        return find

    def restore(self, files: OverlayFiles, layer: OverlayLayer) -> Iterator[None]:
        for tree in (tree for tree in files.trees if tree.name in layer.trees):  # a new slot may have more copies
            # The copy makes this directory, with the owner, mode and marks that it has in the layer.
            os.rmdir(files.upper(tree))
            yield from TreeCopy().tree(layer.trees[tree.name], files.upper(tree))

    def slot_ended(self, files: OverlayFiles) -> None:
        last = self._last.pop(files.store.path, None)
        if last is not None:
            last.store.release()

    def save(self, layer: OverlayLayer, folder: str) -> Generator[None, None, int]:
        copied = 0
        for number, each in enumerate((layer, *layer.below)):
            os.mkdir(f"{HOST}{folder}/{number}", 0o755)
            for tree, path in each.trees.items():
                copy = TreeCopy()
                yield from copy.tree(path, f"{HOST}{folder}/{number}/{tree}")
                copied += copy.copied_bytes
        return copied

    def compose(self, limits: Fields, files: Sequence[tuple[str, bytes]]) -> OverlayLayer:
        trees, owner, number = self._host.trees(None, network=False), self._host.owner, next(self._numbers)
        store = LayerStore(f"/slots/c{number}", _file_bytes(limits, self._grouped), owner)
        uppers = {tree.name: f"{store.path}/{tree.name}" for tree in trees}
        try:
            for tree in trees:
                os.mkdir(uppers[tree.name])
                copy_attributes(os.stat(tree.lowers[0]), uppers[tree.name])
            (base,) = (tree for tree in trees if tree.target == "/")
            upper = uppers[base.name]
            os.mkdir(f"{upper}{WORKSPACE}")
            copy_attributes(os.stat(f"{base.lowers[0]}{WORKSPACE}"), f"{upper}{WORKSPACE}")
            root = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for path, data in files:
                    _write_file(root, path, data, owner)
            finally:
                os.close(root)
        except BaseException:
            store.release()
            raise
        return OverlayLayer(f"layer-{self._token}-f{number}", store, uppers, (), None)

    def to_memory(self, layer: OverlayLayer) -> Generator[None, None, OverlayLayer]:
        """Run a job that copies a layer to a store of its own, without the layers below it. Raises `CannotMake`."""
        number = next(self._numbers)
        store, copy = self._make_store(number), TreeCopy()
        trees = {tree: f"{store.path}/{tree}" for tree in layer.trees}
        try:
            for tree, path in layer.trees.items():
                yield from copy.tree(path, trees[tree])
        except BaseException as error:
            store.release()
            if isinstance(error, OSError):  # the host's failure, which must not count as one of the work in the layer
                raise CannotMake(f"a part of a snapshot on disk cannot be shown: copying it failed: {error}") from None
            raise
        return OverlayLayer(f"layer-{self._token}-m{number}", store, trees, layer.below, layer.image)

    def load(self, folder: str, image: str | None) -> tuple[OverlayLayer, ...]:
        wanted = {"root"} if image is not None else {"root", *rootfs.system_directories()}
        store = DiskStore(folder, f"/lower/k{next(self._numbers)}")
        layers: tuple[OverlayLayer, ...] = ()
        try:
            for number in reversed(range(len(os.listdir(store.path)))):
                path = f"{store.path}/{number}"
                trees = {tree: f"{path}/{tree}" for tree in wanted}
                for each in (path, *trees.values()):  # a link would lead a mount to the host's files
                    if not stat.S_ISDIR(os.lstat(each).st_mode):
                        raise NotADirectoryError(20, "no snapshot was saved there", folder)
                name = f"layer-{self._token}-k{next(self._numbers)}"
                layers = (OverlayLayer(name, store.keep(), trees, layers, image), *layers)
        finally:
            store.release()
        if not layers:
            raise FileNotFoundError(2, "no snapshot was saved there", folder)
        return layers
