"""Which hosts tools on this machine may reach."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from golden_messages import check_message, raises
from palaestra.tools.net.host_policy import AddressPolicy, HostPolicy, PrivateAddress
from palaestra.tools.settings import ToolSettings
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.sandbox.slotd.network import allowlist, tunnel


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "metadata.google.internal", "::ffff:169.254.169.254", "fd00:ec2::1"]
)
def test_metadata_is_never_reached(host: str) -> None:
    assert "never reached" in (HostPolicy(["*:*", "0.0.0.0/0:*", "::/0", "*.internal:*"]).refusal(host, 80) or "")


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "::1", "fc00::1", "100.64.0.1", "localhost"])
def test_private_addresses_are_open_only_where_they_are_named(host: str) -> None:
    assert "this machine" in (HostPolicy().refusal(host, 8000) or "")
    named = f"[{host}]:8000" if ":" in host else f"{host}:8000"
    assert HostPolicy([named]).refusal(host, 8000) is None
    assert HostPolicy([named]).refusal(host, 8001) is not None


def test_a_name_that_means_a_private_address_is_refused_at_the_address() -> None:
    reach = HostPolicy(["*:*"])
    assert reach.refusal("inside.example", 80) is None
    assert "this machine" in (reach.address_refusal("inside.example", 80, ipaddress.ip_address("10.0.0.1")) or "")
    assert (
        HostPolicy(["*:*", "10.0.0.0/8:*"]).address_refusal("inside.example", 80, ipaddress.ip_address("10.0.0.1"))
        is None
    )
    assert reach.address_refusal("outside.example", 80, ipaddress.ip_address("93.184.216.34")) is None


def test_localhost_is_reached_by_its_name_where_that_is_listed() -> None:
    reach = HostPolicy(["localhost:3000"])
    assert reach.refusal("localhost", 3000) is None
    assert reach.address_refusal("localhost", 3000, ipaddress.ip_address("127.0.0.1")) is None
    assert reach.address_refusal("other.example", 3000, ipaddress.ip_address("127.0.0.1")) is not None


def test_only_listed_hosts_are_allowed_and_blocked_ones_never() -> None:
    reach = HostPolicy(["*.example.org:443"], ["bad.example.org:*", "93.184.0.0/16:*"])
    assert reach.refusal("good.example.org", 443) is None
    check_message(reach.refusal("good.example.org", 80) or "", "allowed")
    assert "blocked" in (reach.refusal("bad.example.org", 443) or "")
    check_message(reach.refusal("93.1.2.3", 443) or "", "allowed")
    assert "blocked" in (reach.address_refusal("good.example.org", 443, ipaddress.ip_address("93.184.216.34")) or "")


def test_an_entry_without_meaning_is_a_config_error() -> None:
    with raises(ConfigError):
        ToolSettings(browser_allow=["exa mple.org"])


@pytest.mark.parametrize("network", allowlist.METADATA, ids=str)
def test_no_policy_reaches_cloud_metadata_whatever_is_allowed(network: ipaddress.IPv4Network) -> None:
    """One list for web tools, browsers, slots with a list of hosts, and slots with the network on."""
    address = network[-1] if network.num_addresses > 1 else network[0]
    inside = ("::ffff:", "64:ff9b::", "64:ff9b:1::", "::") if address.version == 4 else ()
    spellings = [address, *(ipaddress.ip_address(f"{prefix}{address}") for prefix in inside)]
    for each in spellings:
        assert not AddressPolicy(["0.0.0.0/0", "::/0"]).covers(each)
        assert HostPolicy(["*:*", "0.0.0.0/0:*", "[::/0]:*"]).address_refusal("x.example", 80, each)
        assert allowlist.address_refusal("x.example", each)
        assert tunnel.refusal(each, 80)


@pytest.mark.parametrize(
    "address",
    ["192.0.0.8", "192.88.99.1", "3fff::1", "5f00::1", "2001:2::1", "2001:10::1", "2002:808:808::", "fec0::1", "100::1",
     "4000::1", "::ffff:0:8.8.8.8", "64:ff9b:1:ffff::7f00:1", "::ffff:192.0.0.8", "64:ff9b::c000:8",
     "64:ff9b:1:a9fe:a9:fe00:808:808", "64:ff9b:1::808:808"],
)  # fmt: skip
def test_special_addresses_are_not_public(address: str) -> None:
    """Whatever version of Python decides which addresses are global."""
    assert not AddressPolicy().covers(ipaddress.ip_address(address))
    assert HostPolicy().address_refusal("x.example", 443, ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["64:ff9b:1:a9fe:a9:fe00:808:808", "64:ff9b:1:a9:fe:a9fe:808:808", "64:ff9b:1:1:a9:fea9:fe08:808"]
)
def test_metadata_is_found_in_each_place_of_a_translated_address(address: str) -> None:
    """Which bytes are the address depends on the length of the network's prefix (RFC 6052)."""
    assert allowlist.is_metadata(ipaddress.ip_address(address))
    assert tunnel.refusal(ipaddress.ip_address(address), 80)


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_are_reached(address: str) -> None:
    assert AddressPolicy().covers(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "host", ["0251.0376.0251.0376", "2852039166", "0xa9fea9fe", "169.254.43518", "127.1", "0x7f.1", "0"]
)
def test_other_spellings_of_an_address_are_checked_where_they_are_resolved(host: str) -> None:
    for info in socket.getaddrinfo(host, 80, type=socket.SOCK_STREAM):
        with pytest.raises(PrivateAddress):
            AddressPolicy().socket(info)
        assert HostPolicy().address_refusal(host, 80, ipaddress.ip_address(info[4][0]))
