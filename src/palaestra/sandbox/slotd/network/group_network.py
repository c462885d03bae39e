"""Joins slots by networks of their own. The slots of a group reach each other and, by this network, nothing else.

A group has a bridge in a network namespace without processes, and each slot a pair of virtual Ethernet devices between
its own namespace and the bridge. No other device leads out of that namespace, so no packet leaves the group. A slot's
root has no capability to change a device, or to send packets other than those of TCP, UDP and ICMP from its own
address. The server's descriptor holds the namespace of the bridge, and the kernel removes everything with the server.

The kernel needs the modules `bridge` and `veth`; root on the host is not needed. The numbers are those of the kernel's
`rtnetlink.h`, `if_link.h`, `veth.h` and `sockios.h`.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass, field

from .. import syscalls
from ..server_slot import ServerSlot

NETWORK = ipaddress.ip_network("198.19.0.0/24")
"""The addresses of every group, from the range for benchmarks (RFC 2544)."""

_BRIDGE, _DEVICE = "group0", "eth0"
_NEWLINK, _ERROR = 16, 2
_REQUEST, _ACK, _EXCL, _CREATE = 1, 4, 0x200, 0x400
_IFNAME, _MASTER, _LINKINFO, _NET_NS_FD, _KIND, _DATA, _PEER = 3, 10, 18, 28, 1, 2, 1
_UP = 1
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_HEAD, _LINK, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BxHiII"), struct.Struct("=HH")
_MOST_ANSWER = 1 << 16


@dataclass(slots=True)
class _Group:
    bridge: int  # a descriptor of the bridge's network namespace
    members: set[str] = field(default_factory=set)


class GroupNetworks:
    """The networks of all groups of one server. A group exists from its first member to the end of its last one."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def join(self, slot: ServerSlot, name: str, number: int) -> None:
        """Give a slot an address in a group's network: the one with this number. Raises OSError."""
        address = NETWORK[number]
        if name not in self._groups:
            self._groups[name] = _Group(slot.make_in_network(_make_bridge)[0])
        group = self._groups[name]
        group.members.add(slot.name)

        def attach() -> list[int]:
            _attach(group.bridge, str(address), f"slot{number}")
            return [os.dup(group.bridge)]  # `make_in_network` hands over at least one descriptor

        try:
            for fd in slot.make_in_network(attach):
                os.close(fd)
        except OSError:
            self.leave(slot.name)
            raise

    def leave(self, slot: str) -> None:
        """Forget a dead slot, if it was in a group. The last one takes its group along."""
        for name, group in list(self._groups.items()):
            group.members.discard(slot)
            if not group.members:
                os.close(group.bridge)
                del self._groups[name]


def _make_bridge() -> list[int]:
    """Return a descriptor of a new network namespace with a bridge. This runs in a child, which then ends."""
    syscalls.unshare(syscalls.CLONE_NEWNET)
    _set_link(_name(_BRIDGE) + _attribute(_LINKINFO, _attribute(_KIND, b"bridge")), flags=_CREATE | _EXCL)
    return [os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)]


def _attach(bridge: int, address: str, port: str) -> None:
    """Join the network namespace of this process, a child, to a bridge."""
    peer = _LINK.pack(0, 0, 0, 0, 0) + _name(port) + _attribute(_NET_NS_FD, struct.pack("=I", bridge))
    pair = _attribute(_KIND, b"veth") + _attribute(_DATA, _attribute(_PEER, peer))
    _set_link(_name(_DEVICE) + _attribute(_LINKINFO, pair), flags=_CREATE | _EXCL)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, text in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, str(NETWORK.netmask))):
            value = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))
            fcntl.ioctl(control, request, struct.pack("16s16s8x", _DEVICE.encode(), value))
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", _DEVICE.encode(), _UP))
    syscalls.setns(bridge, syscalls.CLONE_NEWNET)
    master = struct.pack("=I", socket.if_nametoindex(_BRIDGE))
    _set_link(_attribute(_MASTER, master), index=socket.if_nametoindex(port))


def _set_link(attributes: bytes, *, index: int = 0, flags: int = 0) -> None:
    """Make or change a network device, and bring it up. Raises OSError."""
    body = _LINK.pack(0, 0, index, _UP, _UP) + attributes
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.sendto(_HEAD.pack(_HEAD.size + len(body), _NEWLINK, _REQUEST | _ACK | flags, 1, 0) + body, (0, 0))
        answer = kernel.recv(_MOST_ANSWER)
    _, kind, *_ = _HEAD.unpack_from(answer)
    number = -struct.unpack_from("=i", answer, _HEAD.size)[0] if kind == _ERROR else 0
    if number:
        raise OSError(number, os.strerror(number))


def _name(text: str) -> bytes:
    return _attribute(_IFNAME, text.encode() + b"\0")


def _attribute(kind: int, value: bytes) -> bytes:
    size = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(size, kind) + value + bytes(-size % 4)
