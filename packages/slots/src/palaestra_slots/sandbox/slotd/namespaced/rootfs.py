"""Builds the root file system of a slot from its trees, the layers below them, and mounts.

A root consists of one overlay for each *tree*. An image is one tree, `/`. Without an image the root is an allow-list: a
generated base system for `/` (see `host.py`), the host's `/usr` as a second tree, and `/bin`, `/lib`, … as links or
directories, as they are on the host. Of the host's other files, the slot sees only read-only mounts, such as those of
its spec.

Before anything here runs, the server has moved to a root of its own:

    /host        the host's file system          /slots/N    one tmpfs per slot or sealed layer: u/TREE w/TREE
    /skeleton    the base system, and the /dev   /lower/K    host directories, with owners mapped at the level full
                 that all slots share

Everything is mounted in private mount namespaces of the server and of its slots, so it is gone with the server.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import packages, syscalls
from ..files import WORKSPACE
from ..layers.layer_store import Tree, most_inodes
from ..layers.overlay import OverlayMarks
from ..rung import HOST
from ..syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY, MS_REC, MS_REMOUNT
from . import native_init
from .native_init import BuildStep, Do

_DEV, _EMPTY = "/skeleton/dev", "/skeleton/empty"
_SHM = "dev/shm"
_OPEN_TO_ALL = 0o004

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_MOST_TERMINALS = 128
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# Settings that the root of a namespace could write. Files that only the host's root may write or read need no mount: no
# process of a slot is the host's root.
_PROC_READ_ONLY = ("sys", "sysrq-trigger")
# Kernel memory, keys and devices; and counters of the whole machine, by which slots could signal to each other.
_PROC_HIDDEN = (
    "kcore", "keys", "key-users", "timer_list", "kallsyms", "kmsg", "sched_debug", "latency_stats", "acpi", "scsi",
    "asound", "interrupts", "slabinfo", "vmallocinfo", "diskstats", "locks", "pressure", "vmstat", "buddyinfo",
    "softirqs", "schedstat", "cgroups", "fs", "sys/fs/aio-nr", "sys/fs/dentry-negative", "sys/fs/dentry-state",
    "sys/fs/file-nr", "sys/fs/inode-nr", "sys/fs/inode-state", "sys/fs/quota", "sys/kernel/pty/nr",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory or file that a slot sees read-only. `source` is its path in the server's root.

    If `layered` is true, `source` is a directory that is mounted through an overlay, below the overlay marks in the
    directory `above`. Each slot then has inodes of its
    own, and locks, leases and watches on them do not reach other slots or the host. A directory with other mounts below
    it is bound unchanged.
    """

    source: str
    target: str
    layered: bool
    above: str = ""


@dataclass(frozen=True, slots=True)
class Overlay:
    """The settings for one overlay mount."""

    target: str
    lowers: tuple[str, ...]
    upper: str
    work: str


@dataclass(frozen=True, slots=True)
class RootPlan:
    """Everything that the slot's init mounts. `owner` is the slot's root user as the server sees it."""

    overlays: tuple[Overlay, ...]
    binds: tuple[Bind, ...]
    stage: str
    tmp_bytes: int
    owner: int
    user_xattrs: bool
    own_devices: bool
    workspace: str = ""
    """A second path of the workspace, or nothing."""
    copies: tuple[Overlay, ...] = ()
    """The slot's own changes over host directories, at places of the root."""


class Lowers:
    """Prepares host directories as lower directories and mounts, each once per server. If `idmap`, a descriptor of a
    user namespace, is given, files of the host's root user appear to belong to the slot's root user, `owner`."""

    def __init__(self, idmap: int | None, marks: OverlayMarks, owner: int) -> None:
        self._idmap, self._marks, self._owner = idmap, marks, owner
        self._without_packages: dict[str, tuple[str, ...]] = {}
        self._known: dict[tuple[str, bool, tuple[int, int]], str] = {}
        self._whole: set[str] = set()

    def get(self, path: str, owned: bool = True) -> str:
        """Return the path from which the host's `path` can be mounted. If `owned` is false, the owners of its files do
        not exist in the slot. Raises OSError if `path` is missing or cannot be mapped."""
        source = f"{HOST}{path}"
        status = os.stat(source)
        # A directory that was replaced under the same path must be attached again.
        key = (path, owned, (status.st_dev, status.st_ino))
        if key not in self._known:
            self._known[key] = self._attach(source, os.path.isdir(source), self._idmap if owned else None)
        return self._known[key]

    def bind(self, path: str, target: str, whole: bool = False) -> Bind:
        """Return the read-only mount of the host's `path` at `target`, with its packages if `whole`. The slot's root
        user owns the files only if it could not read them otherwise, because the kernel reveals more about a file to
        its owner than to other users."""
        private = os.stat(f"{HOST}{path}").st_mode & _OPEN_TO_ALL != _OPEN_TO_ALL
        source = self.get(path, owned=private)
        layered = os.path.isdir(source) and source not in self._whole
        above = self.hide_packages(path) if layered and not whole and packages.is_interpreter(source) else ()
        return Bind(source, target, layered, *above)

    def hide_packages(self, path: str) -> tuple[str, ...]:
        """Return a directory of overlay marks that hides the packages of interpreters in the host's `path` (see
        `packages.py`), or nothing if there are none. Later installations on the host stay visible."""
        if path not in self._without_packages:
            source, target = f"{HOST}{path}", f"/lower/p{len(self._without_packages)}"
            hidden = packages.hidden_paths(source)
            for directory in dict.fromkeys(map(os.path.dirname, hidden)):
                for parent in ("", *itertools.accumulate(directory.split("/"), "{}/{}".format)):
                    if not os.path.isdir(f"{target}/{parent}"):
                        self._make_like(f"{source}/{parent}", f"{target}/{parent}")
            for name in hidden:
                self._marks.whiteout(f"{target}/{name}")
            self._without_packages[path] = (target,) if hidden else ()
        return self._without_packages[path]

    def _make_like(self, model: str, directory: str) -> None:
        os.mkdir(directory)
        os.chmod(directory, stat.S_IMODE(os.stat(model).st_mode))
        os.chown(directory, self._owner, self._owner)

    def _attach(self, source: str, is_directory: bool, idmap: int | None) -> str:
        target = f"/lower/{len(self._known)}"
        if is_directory:
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        try:
            tree, recursive = syscalls.open_tree(source), False
        except OSError:
            # Without root, a directory that has mounts below it can only be copied together with them.
            tree, recursive = syscalls.open_tree(source, recursive=True), True
            self._whole.add(target)
        try:
            flags = MS_RDONLY | MS_NOSUID | MS_NODEV  # the attributes of mount_setattr have the same bits
            syscalls.set_mount_attributes(tree, flags, idmap, recursive)
            syscalls.move_mount(tree, target)
        finally:
            os.close(tree)
        return target


def make_shared_directories(own_devices: bool) -> bool:
    """Make the shared /dev, and the empty directory that hides other directories, both read-only. Returns whether the
    /dev has device files of its own (requested by `own_devices`) instead of mounts of the host's device files."""
    read_only = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC
    os.mkdir(_DEV, 0o755)
    syscalls.mount("tmpfs", _DEV, "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,mode=755,nr_inodes=64")
    own_devices = own_devices and _make_devices()
    for name in () if own_devices else _present_devices():
        # In a user namespace, mknod makes no device files, but a file of the host can be mounted over this one.
        os.close(os.open(f"{_DEV}/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        syscalls.mount(f"{HOST}/dev/{name}", f"{_DEV}/{name}", flags=MS_BIND)
    for name in ("pts", "shm"):
        os.mkdir(f"{_DEV}/{name}", 0o755)
    for name, target in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"),
                         ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2")):  # fmt: skip
        os.symlink(target, f"{_DEV}/{name}")
    syscalls.mount("none", _DEV, flags=read_only)
    os.mkdir(_EMPTY, 0o555)
    syscalls.mount(_EMPTY, _EMPTY, flags=MS_BIND)
    syscalls.mount("none", _EMPTY, flags=read_only | MS_NODEV)
    return own_devices


def _present_devices() -> list[str]:
    """Return the usual devices that exist here. For example, the /dev of an Apptainer container has no `full`."""
    return [name for name in _DEVICES if os.path.exists(f"{HOST}/dev/{name}")]


def _make_devices() -> bool:
    """Make files for the devices. Returns True if this process may make these files and they work."""
    try:
        for name in _present_devices():
            os.mknod(f"{_DEV}/{name}", 0o666 | stat.S_IFCHR, os.stat(f"{HOST}/dev/{name}").st_rdev)
            # mknod(2) applies the umask to the mode.
            os.chmod(f"{_DEV}/{name}", 0o666)  # noqa: S103 - as on every system
        os.close(os.open(f"{_DEV}/null", os.O_WRONLY | os.O_CLOEXEC))
    except OSError:  # a container's root may lack the capability, or the permission of its control group
        for name in _DEVICES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{_DEV}/{name}")
        return False
    return True


def host_trees(lowers: Lowers, skeleton: tuple[str, ...], *, packages_shown: bool) -> tuple[Tree, ...]:
    """Return the trees of a slot without an image."""
    directories = [
        Tree(name, f"/{name}", (*(() if packages_shown else lowers.hide_packages(f"/{name}")), lowers.get(f"/{name}")))
        for name in system_directories()
    ]
    return (Tree("root", "/", skeleton), *directories)


@functools.cache
def system_directories() -> list[str]:
    """Return the top-level system directories that are directories on this host. They are found once, like the links
    between them."""
    paths = {name: f"{HOST}/{name}" for name in _SYSTEM}
    return [name for name, path in paths.items() if os.path.isdir(path) and not os.path.islink(path)]


def system_links() -> dict[str, str]:
    """Return the top-level system directories that are links on this host, with their targets."""
    paths = {name: f"{HOST}/{name}" for name in _SYSTEM}
    return {name: os.readlink(path) for name, path in paths.items() if os.path.islink(path)}


def build(plan: RootPlan, place: int, spare: int) -> Iterator[BuildStep | bytes]:
    """Yield the steps, some of them encoded, that mount the root at `plan.stage` and make it the process's `/`, in the
    slot's own mount namespace. The descriptors `place`, `place` + 1 and `spare` must be free."""
    root, inside = place, place + 1
    # The server mounts and unmounts parts of other slots later, and none of that may reach this slot.
    yield native_init.mount("none", "/", flags=MS_REC | syscalls.MS_PRIVATE)
    for overlay in plan.overlays:
        yield _overlay(overlay, plan, plan.stage + overlay.target.rstrip("/"))
    yield BuildStep(Do.CHANGE_DIRECTORY, (plan.stage,))
    yield BuildStep(Do.OPEN, (".",), root)
    yield _dev(plan.own_devices, plan.owner)
    yield _proc()
    # Opened inside the root, so that no link in a layer of the slot leads out of it.
    yield BuildStep(Do.OPEN_INSIDE, ("tmp",), inside, root)
    yield from _volatile(plan, f"/proc/self/fd/{inside}")
    for bind in plan.binds:
        yield from _mount_point(bind.target, inside, root)
        if bind.layered:
            lowers = f"{bind.above}:{bind.source}" if bind.above else f"{bind.source}:{_EMPTY}"
            options = f"lowerdir={lowers}" + (",userxattr" if plan.user_xattrs else "")
            flags = MS_RDONLY | MS_NOSUID | MS_NODEV
            yield native_init.mount("overlay", f"/proc/self/fd/{inside}", "overlay", flags, options)
        else:
            yield native_init.mount(bind.source, f"/proc/self/fd/{inside}", flags=MS_BIND | MS_REC)
    for copy in plan.copies:
        yield from _mount_point(copy.target, inside, root)
        yield _overlay(copy, plan, f"/proc/self/fd/{inside}")
    if plan.workspace:
        # A layer can have a link at this place, too.
        yield BuildStep(Do.OPEN_INSIDE, (WORKSPACE.lstrip("/"),), spare, root)
        yield from _mount_point(plan.workspace, inside, root)
        yield native_init.mount(f"/proc/self/fd/{spare}", f"/proc/self/fd/{inside}", flags=MS_BIND | MS_REC)
    yield BuildStep(Do.BECOME_ROOT)


def _mount_point(path: str, inside: int, root: int) -> Iterator[BuildStep]:
    """Yield the steps that open the place at `path` under the number `inside`."""
    target = path.lstrip("/")
    if target.startswith("tmp/"):  # the slot's /tmp is new and empty, so it holds no links
        names = target.split("/")
        yield from (BuildStep(Do.MKDIR, ("/".join(names[:count]),), 0o777, 1) for count in range(2, len(names) + 1))
    yield BuildStep(Do.OPEN_INSIDE, (target,), inside, root)


def overlay_options(lowers: Sequence[str], user_xattrs: bool) -> list[str]:
    """Return the options for an overlay of these directories, the topmost first."""
    # With the kernel's defaults, a layer could refer to the layers below it, and could then not be cut to a view.
    own = ["userxattr"] if user_xattrs else ["redirect_dir=nofollow", "metacopy=off", "index=off"]
    return [f"lowerdir={':'.join(lowers)}", *own]


def _overlay(overlay: Overlay, plan: RootPlan, target: str) -> BuildStep:
    options = overlay_options(overlay.lowers, plan.user_xattrs)
    # The upper directory is in memory, so a sync has nothing to save; `volatile` lets overlayfs skip it.
    options += [f"upperdir={overlay.upper}", f"workdir={overlay.work}", *([] if plan.user_xattrs else ["volatile"])]
    return native_init.mount("overlay", target, "overlay", MS_NOSUID | MS_NODEV, ",".join(options))


def _volatile(plan: RootPlan, tmp: str) -> Iterator[BuildStep]:
    """Yield the steps that mount one file system for /dev/shm and /tmp, which are in no snapshot; its size limits both
    together."""
    # The number of inodes also limits extended attributes, which do not count against the size.
    options = f"size={plan.tmp_bytes},nr_inodes={most_inodes(plan.tmp_bytes)},mode=755"
    yield native_init.mount("tmpfs", _SHM, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name in ("tmp", "shm"):
        yield BuildStep(Do.MKDIR, (f"{_SHM}/{name}",), 0o1777)
        yield BuildStep(Do.OWN, (f"{_SHM}/{name}",), plan.owner)
    yield native_init.mount(f"{_SHM}/tmp", tmp, flags=MS_BIND)  # noqa: S108 - of the slot
    yield native_init.mount(f"{_SHM}/shm", _SHM, flags=MS_BIND)


@functools.cache
def _dev(own_devices: bool, owner: int) -> bytes:
    if own_devices:  # through an overlay, so that each slot has its own inodes, and thus its own locks and watches
        flags = MS_RDONLY | MS_NOSUID | MS_NOEXEC
        devices = native_init.mount("overlay", "dev", "overlay", flags, f"lowerdir={_DEV}:{_EMPTY}")
    else:
        devices = native_init.mount(_DEV, "dev", flags=MS_BIND | MS_REC)
    # The kernel has one limit on the number of terminals for all slots together.
    options = f"newinstance,ptmxmode=0666,mode=620,uid={owner},gid={owner},max={_MOST_TERMINALS}"
    terminals = native_init.mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    return native_init.encode_steps([devices, terminals])


@functools.cache
def _proc() -> bytes:
    steps = [native_init.mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)]
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    read_only, directories, files = _kernel_entries()
    for name in read_only:
        steps.append(native_init.mount(f"proc/{name}", f"proc/{name}", flags=MS_BIND | MS_REC))
        # A bind mount ignores all other flags; they hold only after a second call (mount(2)).
        steps.append(native_init.mount("none", f"proc/{name}", flags=MS_REMOUNT | MS_BIND | flags))
    steps += [native_init.mount(_EMPTY, f"proc/{name}", flags=MS_BIND) for name in directories]
    steps += [native_init.mount("dev/null", f"proc/{name}", flags=MS_BIND) for name in files]
    return native_init.encode_steps(steps)


def _kernel_entries() -> tuple[list[str], list[str], list[str]]:
    """Return entries that every /proc of this kernel has: the entries to make read-only, the directories to hide, and
    the files to hide."""
    read_only = [name for name in _PROC_READ_ONLY if os.path.lexists(f"/proc/{name}")]
    hidden = [name for name in _PROC_HIDDEN if os.path.lexists(f"/proc/{name}")]
    directories = [name for name in hidden if os.path.isdir(f"/proc/{name}")]
    # What only the host's root may read is closed to slots anyway, and each mount makes every new slot slower.
    readable = [name for name in hidden if os.stat(f"/proc/{name}").st_mode & _OPEN_TO_ALL]
    files = [name for name in readable if name not in directories]
    return read_only, directories, files
