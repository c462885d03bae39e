"""Makes and enters the user, process and network namespaces of slots.

There are two kinds of user namespace. A server that runs as root gives each slot a namespace whose uids 0 to 65535 are
a private range outside. All slots share the range (they cannot see each other's files or processes), but not the
namespace: the kernel counts inotify instances, queued signals, message queues and locked memory per namespace, and
charges them to the user who made the namespace. Each namespace therefore has a separate maker, a uid with no other use.
A server without root gives each slot a namespace in which only uid 0 exists: the user who started the server.

Making a network namespace costs as much as a fifth of a slot, and freeing it costs the kernel more. A server that runs
as root therefore keeps the network namespace of a dead slot for a later one, if it was never used (`UnusedNetworks`).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import signal
import socket
import struct
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


_MOST_KEPT = 64  # the maximum number of unused network namespaces that a server keeps
# What a network namespace tells about its past, in files of /proc/net: devices with their counters, packets that were
# sent or received, and flow labels, which outlive their sockets. `sockstat` begins with the number of all its sockets.
_TRACES = ("dev", "snmp", "snmp6", "netstat", "ip6_flowlabel")
_SOCKETS = "sockstat"
_MOST_TEXT = 1 << 16
_SIOCSIFFLAGS, _UP_AND_RUNNING = 0x8914, 0x41


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


class UnusedNetworks:
    """Network namespaces of dead slots in which nothing was ever sent, for later slots. No two live slots share one.

    Nothing of one slot can reach the next: a namespace with a socket, with a device other than the loopback, with a
    flow label, or with any counter that is not as the kernel made it, is not kept. A slot may change nothing else in
    it, since its root has no capability there and its `/proc/sys` is read-only. A namespace in which a program merely
    opened a socket and closed it again is as new.

    Only a server that may enter the namespaces of its slots and return, which is root's right, can use this.
    """

    def __init__(self) -> None:
        self._own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._inode = os.fstat(self._own).st_ino
        self._free: list[int] = []
        try:
            self._unused = self._trial()
        except OSError:
            # Where a namespace does not show whether it was used, none is kept.
            self._unused = ()

    def take(self) -> int | None:
        """Return a descriptor of an unused namespace whose loopback is up, or None if there is none."""
        return self._free.pop() if self._free else None

    def of_slot(self, pid: int) -> int | None:
        """Return a descriptor of the namespace of a slot that is about to be killed, for `keep`, or None if it will not
        be needed. `pid` is the slot's init, which has built the slot."""
        if not self._unused or len(self._free) >= _MOST_KEPT:
            return None
        try:
            network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the init may be dead already
            return None
        # The slot shares the server's network.
        if os.fstat(network).st_ino == self._inode:
            os.close(network)
            return None
        return network

    def keep(self, network: int) -> None:
        """Keep the namespace of a dead slot if it is unused, otherwise let the kernel free it."""
        if len(self._free) < _MOST_KEPT and self._read_traces(network) == self._unused:
            self._free.append(network)
        else:
            os.close(network)

    def _trial(self) -> tuple[bytes, ...]:
        """Return what a new namespace tells, or nothing if it tells too little here: if an open socket or a sent
        datagram does not show."""
        network = self._new()
        try:
            unused = self._read_traces(network)
            with self._inside(network), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                opened = _traces()
                sender.sendto(b"", ("127.0.0.1", 9))
            sent = self._read_traces(network)
        finally:
            os.close(network)
        shows = opened[-1] != unused[-1] and sent[:-1] != unused[:-1] and sent[-1] == unused[-1]
        return unused if shows else ()

    def _new(self) -> int:
        """Return a descriptor of a new namespace whose loopback is up."""
        syscalls.unshare(syscalls.CLONE_NEWNET)
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _UP_AND_RUNNING))
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            syscalls.setns(self._own, syscalls.CLONE_NEWNET)

    def _read_traces(self, network: int) -> tuple[bytes, ...]:
        with self._inside(network):
            return _traces()

    @contextlib.contextmanager
    def _inside(self, network: int) -> Iterator[None]:
        """Move this thread to a network namespace during the block, in which nothing of the server may open a
        socket."""
        syscalls.setns(network, syscalls.CLONE_NEWNET)
        try:
            yield
        finally:
            syscalls.setns(self._own, syscalls.CLONE_NEWNET)


def _traces() -> tuple[bytes, ...]:
    """Return the traces of this thread's network namespace."""
    sockets = _start_of(_SOCKETS).partition(b"\n")[0]
    return (*map(_start_of, _TRACES), sockets)


def _start_of(name: str) -> bytes:
    """Return a file of /proc/net, or nothing if this kernel has no such file."""
    try:
        file = os.open(f"/proc/thread-self/net/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # a kernel may have no IPv6
        return b""
    try:
        return os.read(file, _MOST_TEXT)
    finally:
        os.close(file)


def make_range_namespace(maker: int = 0) -> int:
    """Return a descriptor of a new user namespace whose ids are the private range, made by the user `maker`. Needs
    root."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            if maker:  # with the one capability that allows making a namespace even if ordinary users may not
                # Otherwise, the change to a user other than root drops all capabilities (capabilities(7)).
                syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)
                # The group first, because only root may change it.
                os.setresgid(maker, maker, maker)
                os.setresuid(maker, maker, maker)
                syscalls.capset(_SYS_ADMIN)
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            # The child opens its namespace itself: without CAP_SYS_PTRACE, as in a container, root may not open the
            # namespace of a child that has become another user.
            socket.send_fds(theirs, [b"+"], [os.open("/proc/self/ns/user", os.O_RDONLY)])
            # The parent writes the maps through this process's entry in /proc, so it lives until it is killed.
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
    # Without privileges outside, the kernel accepts a map of groups only after this (user_namespaces(7)).
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
