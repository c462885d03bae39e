"""Joins slots by networks of their own. The slots of a group reach each other and, by this network, nothing else.

Each slot of a group has a macvlan device, and a bridge joins them: a device in a network namespace without processes,
over which the kernel passes a packet from one macvlan device directly to another one. This device is one end of a pair
of virtual Ethernet devices, whose other end is in the same namespace, so no packet leaves the group. (To remove a
device of the kind `bridge`, the kernel waits for tens of milliseconds and lets no network of the machine change
meanwhile; a pair of devices for each slot would cost twice as much as a macvlan device.)

A slot's root has no capability to change a device, or to send packets other than those of TCP, UDP and ICMP from its
own address. The server's descriptor holds the namespace of the bridge, and the kernel removes everything with the
server; if several servers have slots in a group (`bridge_exchange.py`), with the last one.

The kernel counts neighbours (addresses on the same network) for the whole machine. The network of a group therefore has
no more addresses than it needs, and no IPv6, so that a slot which asks for every address takes few of them.

The kernel needs the modules `veth` and `macvlan`; root on the host is not needed. The numbers are those of the
kernel's `rtnetlink.h`, `if_link.h`, `veth.h` and `sockios.h`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable

from .. import syscalls
from ..exec import pipes
from ..server_slot import ServerSlot
from . import network_namespace
from .bridge_exchange import BridgeExchange

_BRIDGE, _OTHER_END, _DEVICE = "group0", "group1", "eth0"
_FIRST = ipaddress.ip_address("198.19.0.0")  # of every group, from the range for benchmarks (RFC 2544)
_NO_IPV6 = f"/proc/sys/net/ipv6/conf/{_DEVICE}/disable_ipv6"
_NEWLINK, _ERROR = 16, 2
_REQUEST, _ACK, _EXCL, _CREATE = 1, 4, 0x200, 0x400
_HARDWARE, _IFNAME, _LOWER, _LINKINFO, _NET_NS_FD = 1, 3, 5, 18, 28
_KIND, _DATA, _PEER, _MODE, _BRIDGE_MODE = 1, 2, 1, 1, 4
_LOCAL = b"\x02\x00"  # the first two bytes of a hardware address that no manufacturer gives
_UP = 1
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_HEAD, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_NEW_LINK = bytes(16)  # `struct ifinfomsg` of a device that is down, since IPv6 must be off before it comes up
_MOST_ANSWER = 1 << 16


class _InNamespace(threading.Thread):
    """Runs a function in a thread of its own, which then ends: a thread that has entered a network namespace without
    privileges could not return, and a child would cost more."""

    def __init__(self, work: Callable[[], int]) -> None:
        super().__init__()
        self._work, self._returned = work, -1
        self._error: OSError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._returned = self._work()
        except OSError as error:
            self._error = error

    def result(self) -> int:
        """Return what the function returned. Raises its OSError."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._returned


class _Group:
    """A group. If no other server can have slots in it, its bridge is made while the first slot starts."""

    def __init__(self, name: str, exchange: BridgeExchange) -> None:
        self.members: set[str] = set()
        self._name, self._exchange = name, exchange
        self._bridge: int | None = None
        self._making = _InNamespace(_make_bridge) if exchange.alone else None

    def bridge(self) -> int:
        """Return a descriptor of the network namespace with the bridge. Raises OSError."""
        if self._bridge is None:
            self._bridge = self._exchange.ask(self._name)
        if self._bridge is None:
            self._bridge = (self._making or _InNamespace(_make_bridge)).result()
            self._exchange.offer_bridge(self._name, self._bridge)
        return self._bridge

    def close(self) -> None:
        self._exchange.withdraw(self._name)
        with contextlib.suppress(OSError):  # the bridge could not be made
            if self._bridge is None and self._making is not None:
                self._bridge = self._making.result()
            if self._bridge is not None:
                os.close(self._bridge)


class GroupNetworks:
    """The networks of all groups of one server. A group exists from its first member to the end of its last one. Its
    other members may be slots of the servers that `exchange` reaches."""

    def __init__(self, exchange: BridgeExchange) -> None:
        self.exchange = exchange
        self._groups: dict[str, _Group] = {}

    def enter(self, slot: str, name: str) -> None:
        """Make a slot that is about to start a member of a group."""
        if name not in self._groups:
            self._groups[name] = _Group(name, self.exchange)
        self._groups[name].members.add(slot)

    def join(self, slot: ServerSlot, name: str, number: int, members: int) -> None:
        """Give a member an address in its group's network: the one with this number, from 1 to `members` + 1. Raises
        OSError."""
        address = ipaddress.IPv4Interface((int(_FIRST) + number, 32 - (members + 2).bit_length()))
        bridge = self._groups[name].bridge()
        places = network_namespace.open_network(slot.pid)
        try:
            _InNamespace(lambda: _attach(bridge, places[0], address)).result()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise OSError(errno.EADDRINUSE, f"another slot of the group has its number {number}") from None
        finally:
            pipes.close(*places)

    def leave(self, slot: str) -> None:
        """Forget a dead slot, if it was in a group. The last one takes its group along."""
        for name, group in list(self._groups.items()):
            group.members.discard(slot)
            if not group.members:
                del self._groups[name]
                group.close()


def _make_bridge() -> int:
    """Return a descriptor of a new network namespace with a bridge."""
    syscalls.unshare(syscalls.CLONE_NEWNET)
    _make_link(_name_attribute(_BRIDGE), b"veth", _attribute(_PEER, _NEW_LINK + _name_attribute(_OTHER_END)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for device in (_BRIDGE, _OTHER_END):
            _switch_on(control, device)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _attach(bridge: int, slot: int, address: ipaddress.IPv4Interface) -> int:
    """Join the network namespace `slot` to that of a bridge. The kernel refuses an address that another one has, since
    the hardware address is made from it."""
    # The number of the lower device holds in the namespace in which the kernel is asked. IFLA_NET_NS_FD puts the new
    # device into the slot's namespace.
    syscalls.setns(bridge, syscalls.CLONE_NEWNET)
    lower = _attribute(_LOWER, struct.pack("=I", socket.if_nametoindex(_BRIDGE)))
    where = _attribute(_NET_NS_FD, struct.pack("=I", slot)) + _attribute(_HARDWARE, _LOCAL + address.ip.packed)
    _make_link(_name_attribute(_DEVICE) + lower + where, b"macvlan", _attribute(_MODE, struct.pack("=I", _BRIDGE_MODE)))
    syscalls.setns(slot, syscalls.CLONE_NEWNET)
    with contextlib.suppress(FileNotFoundError), open(_NO_IPV6, "w") as file:  # a kernel may have no IPv6
        file.write("1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, each in ((_SIOCSIFADDR, address.ip), (_SIOCSIFNETMASK, address.netmask)):
            value = struct.pack("=HH4s8x", socket.AF_INET, 0, each.packed)
            fcntl.ioctl(control, request, struct.pack("16s16s8x", _DEVICE.encode(), value))
        _switch_on(control, _DEVICE)
    return 0


def _switch_on(control: socket.socket, device: str) -> None:
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", device.encode(), _UP))


def _make_link(attributes: bytes, kind: bytes, data: bytes) -> None:
    """Make a network device. Raises OSError."""
    info = _attribute(_LINKINFO, _attribute(_KIND, kind) + _attribute(_DATA, data))
    body = _NEW_LINK + attributes + info
    head = _HEAD.pack(_HEAD.size + len(body), _NEWLINK, _REQUEST | _ACK | _EXCL | _CREATE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.sendto(head + body, (0, 0))
        answer = kernel.recv(_MOST_ANSWER)
    _, kind_of_answer, *_ = _HEAD.unpack_from(answer)
    number = -struct.unpack_from("=i", answer, _HEAD.size)[0] if kind_of_answer == _ERROR else 0
    if number == errno.EOPNOTSUPP:
        raise OSError(number, f"the kernel lacks the module {kind.decode()}, which groups of slots need")
    if number:
        raise OSError(number, os.strerror(number))


def _name_attribute(text: str) -> bytes:
    return _attribute(_IFNAME, text.encode() + b"\0")


def _attribute(kind: int, value: bytes) -> bytes:
    size = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(size, kind) + value + bytes(-size % 4)
