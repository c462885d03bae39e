"""Limits the memory, processes and processor time of slots through control groups of version 1 or 2.

Each server has a directory in each hierarchy, which contains one directory per slot. In version 1, it is below the
server's own group if that group is visible; otherwise, it is at the top of the hierarchy. The server locks its
directory as long as it lives. A directory that another process can lock is therefore abandoned, and is removed.

In version 1, the inits of all slots share one more directory without limits, and each command moves to its slot's
directory before its program starts. In version 2, such a move takes 10 ms, so an init stays in its slot's directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass

from ..protocol.frames import Fields
from .namespaces import write_file

PARENT = "palaestra"
_INITS = "inits"

_PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted hierarchy: its controllers, and the parent of all servers' directories. A hierarchy of version 2
    without controllers, next to version 1, is used only for slots that share the host's network."""

    version: int
    controllers: tuple[str, ...]
    parent: str


def find(prefix: str = "") -> list[Hierarchy]:
    """Return the hierarchies that have the memory, pids or cpu controller, and any writable hierarchy of version 2. If
    there is no controller for memory or for pids, return [], because limits cannot be set."""
    own = _own_groups()
    found: list[Hierarchy] = []
    for point, kind, options in _mounts(prefix):
        if kind == "cgroup2":
            available = _read_or_empty(f"{point}/cgroup.controllers").split()
            if {"memory", "pids"} <= set(available):
                found.append(Hierarchy(2, ("memory", "pids", "cpu"), f"{point}/{PARENT}"))
            # Without controllers, a group can still freeze and end all of its processes.
            elif os.access(point, os.W_OK):
                found.append(Hierarchy(2, (), f"{point}/{PARENT}"))
        elif wanted := tuple(name for name in ("memory", "pids", "cpu") if name in options):
            group = f"{point}{own.get(wanted[0], '/')}".rstrip("/")
            # In a container, the mount may begin at its own group, while /proc/self/cgroup has the path on the host.
            base = group if os.path.isdir(group) else point
            found.append(Hierarchy(1, wanted, f"{base}/{PARENT}"))
    covered = {name for hierarchy in found for name in hierarchy.controllers}
    return found if {"memory", "pids"} <= covered else []


_CLAIMS = 100  # the number of times that a server tries to make its directory while other servers start or end


class ServerCgroup:
    """The directories of one server. The locks belong to the server and to the process that watches it."""

    def __init__(self, hierarchies: list[Hierarchy], name: str) -> None:
        self._hierarchies, self._name = hierarchies, name
        self._locks: list[int] = []

    def create(self) -> None:
        """Make and lock the directories. Raises OSError."""
        for hierarchy in self._hierarchies:
            self._locks.append(self._claim(hierarchy))
            if hierarchy.version == 1:
                os.mkdir(f"{hierarchy.parent}/{self._name}/{_INITS}")

    def _claim(self, hierarchy: Hierarchy) -> int:
        """Make and lock one directory. Until it is locked, another server may remove it as abandoned when it starts, or
        remove the empty parent when it ends."""
        directory = f"{hierarchy.parent}/{self._name}"
        for tries_left in reversed(range(_CLAIMS)):
            try:
                os.makedirs(directory, exist_ok=True)
                if hierarchy.version == 2 and hierarchy.controllers:
                    # A group has a controller only if every group above it passes the controller on. Source:
                    # cgroups(7).
                    for ancestor in (os.path.dirname(hierarchy.parent), hierarchy.parent, directory):
                        write_file(f"{ancestor}/cgroup.subtree_control", "+memory +pids +cpu")
                lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                if not tries_left:
                    raise
                continue
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(directory):
                return lock
            os.close(lock)
        raise OSError(errno.EBUSY, "other servers keep removing the directory", directory)

    def add(self, slot: str, limits: Fields, prefix: str = "", network: bool = False) -> list[str]:
        """Make the directories of one slot, set its limits, and return the directories. A hierarchy without controllers
        is used only if `network` is true, for a slot that shares the host's network."""
        made = []
        for hierarchy in self._hierarchies:
            if not hierarchy.controllers and not network:
                continue
            directory = f"{prefix}{hierarchy.parent}/{self._name}/{slot}"
            os.mkdir(directory)
            made.append(directory)
            for name, value in _limit_settings(hierarchy, limits):
                with contextlib.suppress(FileNotFoundError):  # the limit on memory plus swap needs swap accounting
                    write_file(f"{directory}/{name}", value)
        return made

    def guarded(self, slot: str, prefix: str = "") -> str | None:
        """Return the directory of a slot in a hierarchy of version 2; None if there is no such hierarchy."""
        parents = [hierarchy.parent for hierarchy in self._hierarchies if hierarchy.version == 2]
        return f"{prefix}{parents[0]}/{self._name}/{slot}" if parents else None

    def remove(self) -> bool:
        """Remove this server's directories that no process uses any more. Returns True if none of them is left."""
        gone = remove([f"{hierarchy.parent}/{self._name}" for hierarchy in self._hierarchies])
        for hierarchy in self._hierarchies:
            with contextlib.suppress(OSError):  # the parent holds other servers' directories
                os.rmdir(hierarchy.parent)
        return gone


def sweep(hierarchies: list[Hierarchy], only_list: bool = False) -> list[str]:
    """Remove the directories of killed servers, and return the names of the removed directories. If `only_list` is
    true, only return the names of the directories that could be removed."""
    gone: set[str] = set()
    for hierarchy in hierarchies:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(hierarchy.parent):
                directory = f"{hierarchy.parent}/{name}"
                with _locked(directory) as left:
                    if left and (only_list or _remove_tree(directory)):
                        gone.add(name)
        with contextlib.suppress(OSError):
            # This fails while another server has its directory there.
            if not only_list:
                os.rmdir(hierarchy.parent)
    return sorted(gone)


def init_group(group: str) -> str | None:
    """Return the directory of inits next to a slot's directory; None if the slot's init stays in the slot's
    directory."""
    directory = f"{os.path.dirname(group)}/{_INITS}"
    return directory if os.path.isdir(directory) else None


def oom_kills(directories: list[str]) -> int:
    """Return the number of a slot's processes that the kernel has killed so far for lack of memory."""
    for directory in directories:
        for name in ("memory.oom_control", "memory.events"):
            for line in _read_or_empty(f"{directory}/{name}").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def remove(directories: list[str]) -> bool:
    """Remove a slot's directories. Returns False if the kernel still holds one of them."""
    kept = [directory for directory in directories if not _remove_tree(directory)]
    return not kept


def _limit_settings(hierarchy: Hierarchy, limits: Fields) -> list[tuple[str, str]]:
    settings: list[tuple[str, str]] = []
    first = hierarchy.version == 1
    if "memory" in hierarchy.controllers and limits["memory_bytes"] is not None:
        memory = str(limits["memory_bytes"])
        # In this order, since the limit on memory plus swap may never be below the limit on memory.
        settings += [("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)] if first else []
        # Version 1 does not count the buffers of TCP sockets against the limit on memory.
        settings += [("memory.kmem.tcp.limit_in_bytes", memory)] if first else []  # of TCP
        # Version 2 has no limit on both together: with swap, a slot could use more than its limit.
        settings += [] if first else [("memory.max", memory), ("memory.swap.max", "0")]
    if "pids" in hierarchy.controllers and limits["pids"] is not None:
        settings.append(("pids.max", str(limits["pids"])))
    if "cpu" in hierarchy.controllers and limits["cpus"] is not None:
        # The kernel refuses a quota of less than a millisecond.
        quota = str(max(1000, int(limits["cpus"] * _PERIOD_US)))
        settings.append(("cpu.cfs_quota_us", quota) if first else ("cpu.max", f"{quota} {_PERIOD_US}"))
    return settings


def _own_groups() -> dict[str, str]:
    """Return the group of this process by controller, from /proc/self/cgroup (version 1 lines)."""
    groups: dict[str, str] = {}
    for line in _read_or_empty("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _mounts(prefix: str) -> list[tuple[str, str, set[str]]]:
    """Return mount point, type and options of every cgroup hierarchy (proc(5), mountinfo)."""
    mounts = []
    for line in _read_or_empty("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()[:3]
        point = left.split()[4]
        if kind in ("cgroup", "cgroup2") and point.startswith(prefix):
            mounts.append((point, kind, set(options.split(","))))
    return mounts


def abandoned(directory: str) -> bool:
    """Return whether a directory exists and no living server holds its lock."""
    with _locked(directory) as left:
        return left


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[bool]:
    """Lock a directory during the block if it exists and no living server holds its lock; yields whether that is so.
    Whoever removes the directory does so in the block, since its server may be about to lock it."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _remove_tree(directory: str) -> bool:
    if _is_removed(directory):  # most have no directories in them, and listing their files would take longer
        return True
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                _remove_tree(entry.path)
    return _is_removed(directory)


def _is_removed(directory: str) -> bool:
    """Remove a directory, and return whether it is gone."""
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read_or_empty(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
