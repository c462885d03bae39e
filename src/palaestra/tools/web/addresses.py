"""Which addresses a call of a model may reach: public ones, and those that the configuration allows.

A model names hosts; what counts is the address that is connected to. The check is made where the socket is made, so a
name that resolves to something else a moment later, or a redirect, is checked like any other.

Covered: loopback, private, link-local (cloud metadata), shared, reserved and multicast addresses, also where an IPv6
address carries an IPv4 one (mapped, NAT64; the tunnels 6to4 and Teredo are not used at all). Not covered: what a public
server does with a request.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, TypeAlias

from palaestra.core.errors import ConfigError

IPAddress: TypeAlias = IPv4Address | IPv6Address
IPNetwork: TypeAlias = IPv4Network | IPv6Network

_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))

_REFUSAL = "it is at a private or reserved address, which web tools do not reach"
"""The same for all addresses of a name, so that one error is left of them. It does not tell what a name stands for."""


class PrivateAddress(PermissionError):
    """The address that a name stands for is not to be reached."""


class Reachable:
    """The addresses that may be connected to. `allowed` are private ones that may be all the same."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed: list[IPNetwork] = []
        for each in allowed:
            try:
                self._allowed.append(ipaddress.ip_network(each, strict=False))
            except ValueError:
                raise ConfigError(f"web_allow: {each!r} is no address and no network such as 10.1.0.0/16") from None

    def covers(self, address: IPAddress) -> bool:
        """Whether the address may be connected to."""
        address = _carried(address)
        if any(address.version == network.version and address in network for network in self._allowed):
            return True
        if isinstance(address, IPv6Address) and (address.is_site_local or address.sixtofour or address.teredo):
            return False
        return address.is_global and not address.is_multicast and not address.is_reserved

    def socket(self, info: tuple[Any, ...]) -> socket.socket:
        """A socket for a resolved address, as aiohttp's `socket_factory`. Raises `PrivateAddress`."""
        family, kind, protocol, _, where = info
        self.check(str(where[0]))
        return socket.socket(family, kind, protocol)

    def check(self, resolved: str) -> None:
        """Raises `PrivateAddress` for an address that may not be connected to."""
        address = ipaddress.ip_address(resolved.partition("%")[0])
        if not self.covers(address):
            raise PrivateAddress(_REFUSAL)


def _carried(address: IPAddress) -> IPAddress:
    """The IPv4 address that an IPv6 one stands for, where it does: what is reached is that."""
    if isinstance(address, IPv4Address):
        return address
    if any(address in network for network in _NAT64):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address
