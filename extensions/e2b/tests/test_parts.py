"""The parts that need no slot: keys, the record of endings, requests, errors, envelopes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palaestra_e2b.api_keys import ApiKey, ApiKeys, own_key, read_keys
from palaestra_e2b.connect_protocol import dumps, envelope
from palaestra_e2b.endings import Endings
from palaestra_e2b.requests import NewSandbox, read_body
from palaestra_e2b.templates import absolute
from palaestra_e2b.wire_errors import ApiError, api_error, rpc_error
from palaestra_slots.core.errors import ConfigError, SlotLost
from palaestra_slots.core.types import AllowList, Network


def test_keys_are_read_with_their_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nann e2b_secret_1 sandboxes=3 kept=1\nbob e2b_secret_2 # a comment\n")
    keys = read_keys(file)
    assert keys.find("e2b_secret_1") == ApiKey("ann", "e2b_secret_1", 3, 1)
    assert keys.find("e2b_secret_3") is None
    assert keys.find("\udcff") is None
    assert "secret" not in repr(keys.first)


@pytest.mark.parametrize(
    "text",
    ["", "ann\n", "ann sandboxes=3\n", "ann short\n", "ann e2b_secret limit=3\n", "a e2b_secret\na e2b_other1\n",
     "a e2b_secret\nb e2b_secret\n", "a e2b_secret kept=-1\n", "a e2b_secret kept=²\n"],
)  # fmt: skip
def test_wrong_keys_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_keys(file)


def test_a_server_without_keys_makes_one_and_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "new" / "keys"
    made = own_key(file).first.secret
    assert own_key(file).first.secret == made
    assert made.startswith("e2b_")
    assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError):
        ApiKeys([ApiKey("a", "x" * 9), ApiKey("a", "y" * 9)])


def test_the_record_of_a_killed_server_says_what_ended(tmp_path: Path) -> None:
    file = tmp_path / "sandboxes.jsonl"
    with Endings(file) as first:
        first.began("i1", "ann")
        first.began("i2", "ann")
        first.ended("i1", "ann", "it was killed")
    with file.open("ab") as torn:
        torn.write(b'{"began": "i3", "ke')
    with Endings(file) as second:
        assert second.recovered == 1
        assert second.reason("i1", "ann") == "it was killed"
        assert "killed or crashed" in second.reason("i2", "ann")
        assert second.reason("i2", "bob") == "no such sandbox"
        assert second.reason("i3", None) == "no such sandbox"
    with Endings(file) as third:
        assert third.recovered == 0
        assert "killed or crashed" in third.reason("i2", "ann")


def test_network_rules_become_a_slots_network() -> None:
    def wanted(**body: object) -> object:
        return read_body(json.dumps({"templateID": "base", **body}).encode(), NewSandbox).wanted_network()

    everything = "0.0.0.0/0"
    assert wanted() is None
    assert wanted(allow_internet_access=False) is Network.OFF
    assert wanted(allow_internet_access=True) is Network.ON
    assert wanted(network={"denyOut": [everything]}) is Network.OFF
    assert wanted(network={"allowOut": ["pypi.org"]}) is Network.ON
    assert wanted(network={"allowOut": ["pypi.org", "*.x.org"], "denyOut": [everything]}) == AllowList(
        ("pypi.org", "*.x.org")
    )
    for rules in ({"denyOut": ["8.8.8.8"]}, {"allowOut": ["8.8.8.8"], "denyOut": [everything]},
                  {"allowOut": ["a b"], "denyOut": [everything]}):  # fmt: skip
        with pytest.raises(ApiError):
            wanted(network=rules)


def test_failures_have_the_codes_that_the_sdks_read() -> None:
    def code(error: Exception) -> object:
        found = rpc_error(error, "i1")
        return found.status if isinstance(found, ApiError) else found.code

    assert code(FileNotFoundError(2, "gone", "/x")) == "not_found"
    assert code(PermissionError(13, "no")) == "permission_denied"
    assert code(OSError(28, "full")) == "resource_exhausted"
    assert code(IsADirectoryError(21, "a directory")) == "invalid_argument"
    assert code(TimeoutError()) == "deadline_exceeded"
    assert code(SlotLost("dead")) == 502
    assert "was not found" in str(rpc_error(SlotLost("dead"), "i1"))
    assert api_error(OSError(28, "full"), "i1").status == 507
    with pytest.raises(KeyError):
        rpc_error(KeyError("ours"), "i1")


@pytest.mark.parametrize(
    ("path", "found"),
    [("a", "/home/user/a"), ("~/a", "/home/user/a"), ("~", "/home/user"), ("", "/home/user"), ("/a/../b/", "/b"),
     ("../../../x", "/x"), ("~x", "/home/user/~x")],
)  # fmt: skip
def test_relative_paths_start_at_home(path: str, found: str) -> None:
    assert absolute(path, "/home/user") == found


@pytest.mark.parametrize("name", ["a\udcff", "\udcff\udcfe", "half \ud83d", "whole \U0001f600", "caf\u00e9"])
def test_every_name_is_json_that_every_client_reads(name: str) -> None:
    for written in (dumps({"name": name}).encode(), envelope({"name": name})[5:]):
        read = json.loads(written)["name"]
        assert read.encode().decode() == read
        assert len(read) == len(name)
