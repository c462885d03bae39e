"""Which hosts a tool that runs on this machine may reach: `Reach`, for the browser and whatever else fetches pages.

Not for slots, whose network is theirs (`sandbox`), though names, lists and the addresses of cloud metadata are judged
by the same rules. Does no I/O: who connects asks `refusal` before the look-up and `address_refusal` for each address
found, and then connects to the address that was judged, not to the name again.

Invariant: cloud metadata is refused whatever the lists say. Loopback, private and other addresses that the internet
does not route are refused unless the allow-list names the address itself (or `localhost`, for the loopback).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from palaestra.sandbox.slotd import allowlist
from palaestra.sandbox.slotd.allowlist import Address
from palaestra.tools.web.addresses import Reachable


class Reach:
    """Lists of hosts in the form of `AllowList`, `*:*` by default. Raises ValueError for an entry without meaning."""

    def __init__(self, allowed: Iterable[str] = ("*:*",), blocked: Iterable[str] = ()) -> None:
        self._allowed = tuple(allowlist.parse(entry) for entry in allowed)
        self._blocked = tuple(allowlist.parse(entry) for entry in blocked)

    def refusal(self, host: str, port: int) -> str | None:
        """Why a host, as it was asked for, may not be reached; None where it may be looked up."""
        try:
            host = allowlist.normal(host)
        except ValueError as error:
            return str(error)
        if allowlist.is_metadata_name(host):
            return f"{host} answers questions about the machine and is never reached"
        if any(_covers(rule, host, port) for rule in self._blocked):
            return f"{host}:{port} is on the list of blocked hosts"
        address = allowlist.literal(host)
        if address is not None:
            return self.address_refusal(host, port, address)
        if _is_localhost(host) and not self._names(host, port):
            return f"{host} is this machine, which is not open"
        if not any(_covers(rule, host, port) for rule in self._allowed):
            return f"{host}:{port} is not on the list of allowed hosts"
        return None

    def address_refusal(self, host: str, port: int, address: Address) -> str | None:
        """Why an address, found for an allowed host or written as one, may not be connected to; None where it may."""
        if allowlist.is_metadata(address):
            return f"{_as(host, address)} answers questions about the machine and is never reached"
        if any(_covers(rule, str(address), port) for rule in self._blocked):
            return f"{_as(host, address)} is on the list of blocked hosts"
        if self._names(str(address), port) or (address.is_loopback and _is_localhost(host) and self._names(host, port)):
            return None
        if not Reachable().covers(address):
            return f"{_as(host, address)} belongs to this machine or to a private network, and is not open"
        if allowlist.literal(host) is not None and not any(
            rule.name == "*" and rule.covers("x", port) for rule in self._allowed
        ):
            return f"{address}:{port} is not on the list of allowed hosts"
        return None

    def _names(self, host: str, port: int) -> bool:
        """Whether the allow-list names exactly this host or a range that it lies in."""
        return any(rule.name != "*" and _covers(rule, host, port) for rule in self._allowed)


def _as(host: str, address: Address) -> str:
    return host if host == str(address) else f"{host}, which is {address},"


def _is_localhost(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost")


def _covers(rule: allowlist.Rule, host: str, port: int) -> bool:
    """A range is every spelling of its addresses: version 4 may be written inside version 6."""
    address = allowlist.literal(host)
    if rule.range is None or not isinstance(address, ipaddress.IPv6Address):
        return rule.covers(host, port)
    return any(rule.covers(str(one), port) for one in allowlist.meanings(address))
