"""Makes and enters the user, process and network namespaces of slots.

There are two kinds of user namespace. A server that runs as root gives each slot a namespace whose uids 0 to 65535 are
a private range outside. All slots share the range (they cannot see each other's files or processes), but not the
namespace: the kernel counts inotify instances, queued signals, message queues and locked memory per namespace, and
charges them to the user who made the namespace. Each namespace therefore has a separate maker, a uid with no other use.
A server without root gives each slot a namespace in which only uid 0 exists: the user who started the server.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
from collections.abc import Iterator

from .. import syscalls
from ..exec import pipes

# The first uid of the private range, as seen outside the slots: above the uids that systemd gives to containers, and
# below the sign bit.
RANGE_START = 0x70000000
RANGE_SIZE = 65536

# The first uid that may make a namespace. A server draws its first maker at random, so that two servers rarely share
# a maker.
_MAKERS_START, _MAKERS = RANGE_START + RANGE_SIZE, 0x0F000000
_SYS_ADMIN = 1 << 21

# The limits of each slot if the user who started the server is charged for all slots: paths below /proc/sys and values.
SHARED_COUNTERS = (("user/max_inotify_instances", "32"), ("user/max_inotify_watches", "65536"),
                   ("user/max_fanotify_groups", "0"), ("user/max_fanotify_marks", "0"))  # fmt: skip

# Settings that let unprivileged programs in a new network namespace listen below port 1024 and send pings.
OPEN_PORTS = (("ip_unprivileged_port_start", "0"), ("ping_group_range", "0 65534"))


def is_real_root() -> bool:
    """Return whether this process is root of the whole machine, not only of a user namespace."""
    with open("/proc/self/uid_map") as file:
        return os.geteuid() == 0 and file.read().split() == ["0", "0", "4294967295"]


class RangeNamespaces:
    """The user namespaces of one server's slots. The namespace of a slot that has ended is reused, because its counts
    are zero again."""

    def __init__(self) -> None:
        self._makers = itertools.count(_MAKERS_START + random.randrange(_MAKERS))
        self._free: list[int] = []

    def take(self) -> int:
        """Return a descriptor of a namespace that no slot uses. Raises OSError."""
        return self._free.pop() if self._free else make_range_namespace(next(self._makers))

    def give_back(self, namespace: int) -> None:
        """Keep the namespace of a dead slot for the next one."""
        self._free.append(namespace)


def make_range_namespace(maker: int = 0) -> int:
    """Return a descriptor of a new user namespace whose ids are the private range, made by the user `maker`. Needs
    root."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            if maker:  # with the one capability that allows making a namespace even if ordinary users may not
                syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)
                os.setresgid(maker, maker, maker)
                os.setresuid(maker, maker, maker)
                syscalls.capset(_SYS_ADMIN)
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            # The child opens its namespace itself: without CAP_SYS_PTRACE, as in a container, root may not open the
            # namespace of a child that has become another user.
            socket.send_fds(theirs, [b"+"], [os.open("/proc/self/ns/user", os.O_RDONLY)])
            signal.pause()
        finally:
            os._exit(1)
    theirs.close()
    try:
        _, namespaces = pipes.receive(ours, 1, 1)
        if not namespaces:
            raise PermissionError(1, "cannot make a user namespace")
        try:
            for kind in ("uid", "gid"):
                write_file(f"/proc/{child}/{kind}_map", f"0 {RANGE_START} {RANGE_SIZE}")
        except OSError:
            os.close(namespaces[0])
            raise
        return namespaces[0]
    finally:
        ours.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def enter_single_namespace(uid: int, gid: int) -> None:
    """Move this process to a new user namespace, in which it is root and no other user exists."""
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    with open("/proc/self/setgroups", "w") as file:
        try:
            file.write("deny")
            file.flush()
        except PermissionError:
            pass  # the outer namespace denies it already
    write_file("/proc/self/uid_map", f"0 {uid} 1")
    write_file("/proc/self/gid_map", f"0 {gid} 1")


@contextlib.contextmanager
def new_pid_namespace() -> Iterator[None]:
    """Make the one child that this process starts in the block pid 1 of a new process namespace."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        try:
            yield
        finally:
            # Later children of this process belong to its own namespace again.
            syscalls.setns(own, syscalls.CLONE_NEWPID)
    finally:
        os.close(own)


def write_file(path: str, text: str) -> None:
    """Write a small file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
