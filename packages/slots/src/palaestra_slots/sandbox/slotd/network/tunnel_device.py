"""Makes the network device of a slot with the network on: a TUN device in the slot's own network namespace.

All packets that leave the slot go to the process that holds the device's descriptor (`tunnel.py`). The slot shares no
loopback, abstract socket or port with the host, and its root has no capability to change the device or its routes.
Needs /dev/net/tun. The numbers are those of the kernel's `if_tun.h`, `sockios.h`, `route.h` and `ipv6.h`.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence

# The addresses of the slot and of the tunnel, from the range for benchmarks (RFC 2544) and a private range (RFC 4193).
# At the tunnel's address, the slot also finds its resolver and the ports in `host_ports`.
SLOT = {4: ipaddress.ip_address("198.18.0.1"), 6: ipaddress.ip_address("fdc6:1200::1")}
GATEWAY = {4: ipaddress.ip_address("198.18.0.2"), 6: ipaddress.ip_address("fdc6:1200::2")}
HOST_NAME = "host.internal"  # the gateway's name in /etc/hosts

_NAME = b"net0"
# Packets go only to the process that reads the device, so they need not fit any link, and few large ones cost less.
_MTU = 65_000
_PREFIX = {4: 30, 6: 126}
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_SIOCADDRT, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x890B, 0x8914, 0x8916, 0x891C, 0x8922
_IPV6_FREEBIND = 78
_UP_WITHOUT_NEIGHBOURS, _RTF_UP, _RTF_GATEWAY = 1 | 1 << 7, 1, 2


def usable(root: str) -> bool:
    """Return whether this process may open the device file below the host's root."""
    try:
        os.close(_open_tun(root))
    except OSError:
        return False
    return True


def versions() -> list[int]:
    """Return the IP versions for which this machine has a route to other networks; 4 is always included."""
    found = [4]
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1", 9))
            found.append(6)
        except OSError:
            pass
    return found


def make(root: str, wanted: Sequence[int]) -> list[int]:
    """Make the device in the network namespace of this process. Returns its descriptor, followed for each version by a
    listening socket on which the tunnel terminates connections. Raises OSError."""
    fds = [_open_tun(root)]
    fcntl.ioctl(fds[0], _TUNSETIFF, struct.pack("16sH22x", _NAME, _IFF_TUN | _IFF_NO_PI))
    for version in wanted:
        _configure(version)
        listener = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6)
        if version == 6:
            listener.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)  # the address is tentative for a moment
        listener.bind((str(SLOT[version]), 0))
        listener.listen(512)
        fds.append(listener.detach())
    return fds


def _open_tun(root: str) -> int:
    return os.open(f"{root}/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def _configure(version: int) -> None:
    address, gateway, prefix = SLOT[version].packed, GATEWAY[version].packed, _PREFIX[version]
    with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as control:
        if version == 4:
            fcntl.ioctl(control, _SIOCSIFADDR, struct.pack("16s16s8x", _NAME, _sockaddr(address)))
            mask = ipaddress.ip_network(f"0.0.0.0/{prefix}").netmask.packed
            fcntl.ioctl(control, _SIOCSIFNETMASK, struct.pack("16s16s8x", _NAME, _sockaddr(mask)))
            fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", _NAME, _MTU))
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", _NAME, _UP_WITHOUT_NEIGHBOURS))
            anywhere, flags = _sockaddr(bytes(4)), _RTF_UP | _RTF_GATEWAY
            fields = (0, anywhere, _sockaddr(gateway), anywhere, flags, 0, 0, 0, 0, 0, 0, 0, 0)
            fcntl.ioctl(control, _SIOCADDRT, struct.pack("@L16s16s16sHhLPhPLLH6x", *fields))
        else:
            index = socket.if_nametoindex(_NAME.decode())
            fcntl.ioctl(control, _SIOCSIFADDR, struct.pack("=16sIi", address, prefix, index))
            route = (bytes(16), bytes(16), gateway, 0, 0, 0, 1, 0, _RTF_UP | _RTF_GATEWAY, index)
            fcntl.ioctl(control, _SIOCADDRT, struct.pack("@16s16s16sIHHILIi", *route))


def _sockaddr(packed: bytes) -> bytes:
    """Return a `struct sockaddr_in` without a port."""
    return struct.pack("=HH4s8x", socket.AF_INET, 0, packed)
