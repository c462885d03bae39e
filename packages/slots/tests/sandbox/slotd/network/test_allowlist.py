"""Lists of hosts: what an entry means, what no list allows, and what a request to the proxy asks for."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra_slots.sandbox.slotd.network import allowlist, forward
from palaestra_slots.sandbox.slotd.network.allowlist import parse, refusal


@pytest.mark.parametrize(
    ("entry", "host", "port", "covered"),
    [
        ("example.org", "example.org", 443, True),
        ("example.org", "example.org", 8443, False),
        ("example.org", "sub.example.org", 443, False),
        ("example.org", "notexample.org", 443, False),
        ("Example.ORG.", "example.org", 80, True),
        ("example.org:8443", "example.org", 8443, True),
        ("example.org:8443", "example.org", 443, False),
        ("example.org:*", "example.org", 1, True),
        ("*.example.org", "a.b.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "badexample.org", 443, False),
        ("*", "anything.test", 80, True),
        ("*", "10.0.0.1", 80, False),
        ("10.0.0.0/8:5432", "10.1.2.3", 5432, True),
        ("10.0.0.0/8:5432", "11.1.2.3", 5432, False),
        ("10.0.0.0/8:*", "ten.example.org", 80, False),
        ("[2001:db8::1]:443", "2001:db8::1", 443, True),
        ("2001:db8::/32", "2001:db8::9", 80, True),
        ("bücher.example", "xn--bcher-kva.example", 443, True),
    ],
)
def test_an_entry_covers_what_it_says(entry: str, host: str, port: int, covered: bool) -> None:
    assert parse(entry).covers(host, port) is covered


@pytest.mark.parametrize("entry", ["", "*.", "a b", "http://a", "a:0", "a:70000", "a:b", "a..b", "a/b", "[::1", "*x"])
def test_an_entry_that_means_nothing_is_refused(entry: str) -> None:
    with pytest.raises(ValueError):
        parse(entry)


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "169.254.170.2", "fd00:ec2::254", "100.100.100.200", "::ffff:169.254.169.254", "metadata"],
)
def test_no_list_leads_to_metadata(host: str) -> None:
    everything = [parse("*:*"), parse("0.0.0.0/0:*"), parse("[::/0]:*"), parse("metadata:*")]
    assert refusal(everything, host, 80) is not None
    address = allowlist.literal(host)
    if address is not None:
        assert allowlist.address_refusal("rebound.example.org", address) is not None


@settings(deadline=None)
@given(st.ip_addresses(v=4))
def test_an_address_inside_another_is_seen_through(inner: ipaddress.IPv4Address) -> None:
    refused = allowlist.address_refusal("name.example.org", inner) is not None
    for text in (f"::ffff:{inner}", f"64:ff9b::{inner}", f"2002:{int(inner) >> 16:x}:{int(inner) & 0xFFFF:x}::"):
        outer = ipaddress.ip_address(text)
        assert not refused or allowlist.address_refusal("name.example.org", outer) is not None


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0", "224.0.0.1"])
def test_a_name_does_not_mean_this_host(address: str) -> None:
    found = ipaddress.ip_address(address)
    assert allowlist.address_refusal("rebound.example.org", found) is not None
    assert allowlist.address_refusal(address, found) is None


def test_a_request_is_passed_on_without_what_was_meant_for_the_proxy() -> None:
    head = b"GET http://User:pw@Example.org:81/a?b HTTP/1.1\r\nHost: other\r\nProxy-Authorization: x\r\nA: b\r\n\r\n"
    method, host, port, request = forward.parse_request(head)
    assert (method, host, port) == ("GET", "example.org", 81)
    assert request == b"GET /a?b HTTP/1.1\r\nHost: Example.org:81\r\nA: b\r\nConnection: close\r\n\r\n"
    assert forward.parse_request(b"CONNECT [::1]:443 HTTP/1.1\r\n\r\n")[:3] == ("CONNECT", "::1", 443)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_request_ends_the_proxy(junk: bytes) -> None:
    try:
        _, host, port, _ = forward.parse_request(junk + b"\r\n\r\n")
    except forward.ForwardRefused:
        return
    assert host
    assert 0 <= port < 65536
