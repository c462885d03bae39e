"""Decides which hosts tools on this machine may reach: `AddressPolicy` for web tools, `HostPolicy` for browsers.

A model names hosts, but the address of the connection decides. `AddressPolicy` checks the address when the socket is
created, which covers redirects and names that later resolve to another address. Unless its list has them, it refuses
loopback, private, link-local, shared, reserved and multicast addresses, even if an IPv6 address contains them
(IPv4-mapped or NAT64), and all addresses of 6to4 and Teredo tunnels. It always refuses cloud metadata. It does not
check what public servers do.

`HostPolicy` has lists and does no I/O: call `refusal` before the look-up and `address_refusal` for each address found,
and connect to that address, not to the name. Invariant: cloud metadata is refused whatever the lists say, and so are
other non-public addresses unless an entry of the allow-list other than `*` covers the address (or `localhost`). Slots
have a separate network, for which `sandbox` applies the same rules.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, TypeAlias

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.sandbox.host_tools import Address, allowlist

IPAddress: TypeAlias = IPv4Address | IPv6Address
IPNetwork: TypeAlias = IPv4Network | IPv6Network

_REFUSAL = "it is at a private or reserved address, which web tools do not reach"
"""The reason for refusing an address. It is the same for all addresses, so that a name with several of them gives one
error, which does not reveal an address."""


_UNICAST = IPv6Network("2000::/3")
"""The IPv6 addresses that the internet routes."""

_SPECIAL: tuple[IPNetwork, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24",  # protocol assignments
        "192.88.99.0/24",  # relays of 6to4
        "64:ff9b:1::/48",  # NAT64 inside a private network, which reaches its private addresses
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)
"""Special addresses that some versions of Python treat as global. Source: IANA's special-purpose registries."""


class PrivateAddress(PermissionError):
    """Raised if the address of a host must not be reached."""


class AddressPolicy:
    """The addresses to which tools may connect: public ones, and the private ones in `allowed`."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed: list[IPNetwork] = []
        for each in allowed:
            try:
                self._allowed.append(ipaddress.ip_network(each, strict=False))
            except ValueError:
                raise ConfigError(f"web_allow: {each!r} is not an address or a network such as 10.1.0.0/16") from None

    def covers(self, address: IPAddress) -> bool:
        """Return whether tools may connect to the address. Cloud metadata is refused, whatever `allowed` contains."""
        if allowlist.is_metadata(address):
            return False
        address = _carried(address)
        if any(address.version == network.version and address in network for network in self._allowed):
            return True
        if isinstance(address, IPv6Address) and address not in _UNICAST:
            return False
        if any(address.version == network.version and address in network for network in _SPECIAL):
            return False
        # Python counts multicast addresses as global.
        return address.is_global and not address.is_multicast and not address.is_reserved

    def socket(self, info: tuple[Any, ...]) -> socket.socket:
        """Return a socket for a resolved address, as aiohttp's `socket_factory`. Raises `PrivateAddress`."""
        # A name that was checked earlier may have another address by now (DNS
        # rebinding); this is the address of the connection.
        family, kind, protocol, _, where = info
        self.check(str(where[0]))
        return socket.socket(family, kind, protocol)

    def check(self, resolved: str) -> None:
        """Raise `PrivateAddress` for an address that `covers` refuses."""
        address = ipaddress.ip_address(resolved.partition("%")[0])
        if not self.covers(address):
            raise PrivateAddress(_REFUSAL)


def _carried(address: IPAddress) -> IPAddress:
    """Return the IPv4 address that an IPv6 address contains, because that is the real target; otherwise, return the
    address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in allowlist.TRANSLATED:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address


class HostPolicy:
    """The hosts that a browser may reach, and blocked hosts, both in the form of `AllowList`. The default allows `*:*`.
    Raises ValueError for an invalid entry."""

    def __init__(self, allowed: Iterable[str] = ("*:*",), blocked: Iterable[str] = ()) -> None:
        self._allowed = tuple(allowlist.parse(entry) for entry in allowed)
        self._blocked = tuple(allowlist.parse(entry) for entry in blocked)

    def refusal(self, host: str, port: int) -> str | None:
        """Return the reason why a host must not be reached, or None if its name may be looked up."""
        try:
            host = allowlist.normal(host)
        except ValueError as error:
            return str(error)
        # Before every list: whoever can read cloud metadata has the keys of the machine, so no setting permits it.
        if allowlist.is_metadata_name(host):
            return f"{host} serves cloud metadata and is never reached"
        if any(_covers(rule, host, port) for rule in self._blocked):
            return f"{host}:{port} is on the list of blocked hosts"
        address = allowlist.literal(host)
        if address is not None:
            return self.address_refusal(host, port, address)
        # A rule such as `*` does not include this machine; only its own name or address does.
        if _is_localhost(host) and not self._names(host, port):
            return f"{host} is this machine, which is not on the list of allowed hosts"
        if not any(_covers(rule, host, port) for rule in self._allowed):
            return f"{host}:{port} is not on the list of allowed hosts"
        return None

    def address_refusal(self, host: str, port: int, address: Address) -> str | None:
        """Return the reason why a connection to `host` must not use `address`, or None. `host` may be the address
        itself."""
        if allowlist.is_metadata(address):
            return f"{_as(host, address)} serves cloud metadata and is never reached"
        if any(_covers(rule, str(address), port) for rule in self._blocked):
            return f"{_as(host, address)} is on the list of blocked hosts"
        if self._names(str(address), port) or (address.is_loopback and _is_localhost(host) and self._names(host, port)):
            return None
        if not AddressPolicy().covers(address):
            return f"{_as(host, address)} belongs to this machine or to a private network, and is not allowed"
        # An address is no name, so a rule for names says nothing about it.
        if allowlist.literal(host) is not None and not any(
            rule.name == "*" and rule.covers("x", port) for rule in self._allowed
        ):
            return f"{address}:{port} is not on the list of allowed hosts"
        return None

    def _names(self, host: str, port: int) -> bool:
        """Return whether an entry of the allow-list other than `*` covers the host."""
        return any(rule.name != "*" and _covers(rule, host, port) for rule in self._allowed)


def _as(host: str, address: Address) -> str:
    return host if host == str(address) else f"{host}, which is {address},"


def _is_localhost(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost")


def _covers(rule: allowlist.HostRule, host: str, port: int) -> bool:
    """Return whether a rule covers a host. A range covers every spelling of its addresses: IPv4 may be written inside
    IPv6."""
    address = allowlist.literal(host)
    if rule.range is None or not isinstance(address, ipaddress.IPv6Address):
        return rule.covers(host, port)
    return any(rule.covers(str(one), port) for one in allowlist.meanings(address))
