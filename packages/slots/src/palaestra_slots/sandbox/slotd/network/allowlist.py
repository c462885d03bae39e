"""Decides which hosts and ports a slot with a list of hosts may reach, and which addresses no slot may reach. This
module performs no I/O.

    example.org            this name, ports 80 and 443          10.0.0.0/8:5432     addresses, one port
    example.org:8443       this name, this port                 [2001:db8::1]:443   an address of version 6
    *.example.org:*        every name below it, every port      *                   every name, ports 80 and 443

A listed name allows only requests that use the name; the proxy resolves it and connects to the address that was
checked. Addresses of cloud metadata services, which give out credentials, are always refused. Addresses to which no
listed name should resolve are refused unless they are listed themselves: a name that resolves to this host's loopback
is an attack on this host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Range = ipaddress.IPv4Network | ipaddress.IPv6Network

# The proxy's port on the loopback of every slot with a list of hosts. Except for the proxy, only the slot's own
# programs can listen on that loopback.
PROXY_PORT = 3128
_USUAL_PORTS = frozenset({80, 443})

# Addresses at which clouds serve metadata about the machine, and its credentials.
METADATA: tuple[Range, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "169.254.0.0/16",  # link-local: AWS, Google, Azure, Oracle, DigitalOcean, ECS tasks
        "fe80::/10",
        "fd00:ec2::/32",  # AWS
        "fd00:42::42/128",  # Scaleway
        "fd20:ce::254/128",  # Google
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure's host
        "192.0.0.192/32",  # Oracle
    )
)
_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal", "metadata.goog", "instance-data"})
# IPv6 addresses that end in the IPv4 address to which a gateway translates them (RFC 6052, RFC 8215).
TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
# The range for translation in local networks. A network's own prefix in this range may be longer; the length of the
# prefix decides which bytes are the IPv4 address.
TRANSLATED_LOCALLY = ipaddress.IPv6Network("64:ff9b:1::/48")
_TRANSLATED_BYTES = ((6, 7, 9, 10), (7, 9, 10, 11), (9, 10, 11, 12), (12, 13, 14, 15))


@dataclass(frozen=True, slots=True)
class HostRule:
    """One entry: a name (`*.` before the name means all names below it) or a range of addresses. If `ports` is None,
    the entry covers every port."""

    name: str
    range: Range | None
    ports: frozenset[int] | None

    def covers(self, host: str, port: int) -> bool:
        """Return whether the entry covers the port `port` of the host `host`, which is written as in the request."""
        if self.ports is not None and port not in self.ports:
            return False
        address = literal(host)
        if self.range is not None:
            return address is not None and address.version == self.range.version and address in self.range
        # A pattern covers names, whose addresses are judged later; an address must be listed itself.
        if self.name.startswith("*"):
            return address is None and host.endswith(self.name[1:])
        return host == self.name


def parse(entry: str) -> HostRule:
    """Return the rule for one entry of a list. Raises ValueError for an invalid entry."""
    host, ports = _host_and_ports(entry.strip())
    bare = host[2:] if host.startswith("*.") else host
    if host == "*":
        return HostRule("*", None, ports)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        # Not strict, because 10.0.0.1/8 is a usual way to write the network of an address.
        return HostRule("", ipaddress.ip_network(host, strict=False), ports)
    except ValueError:
        pass
    if not bare or not all(character.isalnum() or character in "-_." for character in bare) or ".." in bare:
        raise ValueError(f"{entry!r} is not a host or address: write example.org, *.example.org:443 or 10.0.0.0/8")
    return HostRule(normal(host), None, ports)


def _host_and_ports(entry: str) -> tuple[str, frozenset[int] | None]:
    host, colon, port = entry.rpartition(":")
    # An address of version 6 has colons itself, so a port can only follow its brackets.
    if not colon or port.endswith("]") or (host.count(":") and not host.endswith("]")):
        return entry, _USUAL_PORTS
    if port == "*":
        return host, None
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{entry!r} has no valid port: write a number from 1 to 65535, or *")
    return host, frozenset({int(port)})


def normal(host: str) -> str:
    """Return a host name in the form in which names are compared: lower case, in the DNS alphabet, without a final
    dot."""
    host = host.strip("[]").rstrip(".").lower()
    try:
        return host if host.isascii() else host.encode("idna").decode("ascii")
    except UnicodeError:
        raise ValueError(f"{host!r} is not a host name") from None


def literal(host: str) -> Address | None:
    """Return the address if a host is written as an address; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def refusal(rules: Sequence[HostRule], host: str, port: int) -> str | None:
    """Return the reason to refuse a host, before it is resolved; None if it may be tried."""
    address = literal(host)
    if is_metadata_name(host) or (address is not None and is_metadata(address)):
        return f"{host} serves cloud metadata; no slot may reach it"
    if not any(rule.covers(host, port) for rule in rules):
        return f"{host}:{port} is not on this slot's list of hosts"
    return None


def address_refusal(host: str, address: Address) -> str | None:
    """Return the reason to refuse an address of a listed host; None if slots may connect to it."""
    if is_metadata(address):
        return f"{host} resolves to {address}, which serves cloud metadata; no slot may reach it"
    if literal(host) is not None or host == "localhost":
        return None  # the list names it explicitly
    # Whoever owns a listed name may let it resolve to an address of this machine (DNS rebinding).
    if any(one.is_loopback or one.is_unspecified or one.is_multicast for one in meanings(address)):
        return f"{host} resolves to {address}, which is not a host of the network; list the address if you mean it"
    return None


def is_metadata_name(host: str) -> bool:
    """Return whether a host is a name at which clouds serve metadata."""
    return host in _METADATA_NAMES


def is_metadata(address: Address) -> bool:
    """Return whether clouds serve metadata at an address, in whichever form it is written."""
    return any(one in network for one in meanings(address) for network in METADATA if one.version == network.version)


def meanings(address: Address) -> list[Address]:
    """Return the address, and the IPv4 addresses that it contains according to the standards."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    inner = [address.ipv4_mapped, address.sixtofour, address.teredo[1] if address.teredo else None]
    # The second is the old IPv4-compatible form, such as ::192.0.2.1 (RFC 4291, 2.5.5.1).
    if address in TRANSLATED or int(address) >> 32 == 0:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address in TRANSLATED_LOCALLY:
        inner += [ipaddress.IPv4Address(bytes(address.packed[at] for at in places)) for places in _TRANSLATED_BYTES]
    return [address, *(found for found in inner if found is not None)]
