"""What somebody wrote for a network is meant, or refused; numbers of any library are read."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest

from golden_messages import raises
from palaestra_slots.core.types import AllowList, Network, NetworkPolicy, number
from palaestra_slots.sandbox.slot import SlotSpec


def test_a_network_may_be_said_as_text() -> None:
    assert NetworkPolicy(agent="on").agent is Network.ON  # type: ignore[arg-type]
    assert SlotSpec(network="on").network is Network.ON  # type: ignore[arg-type]
    assert NetworkPolicy(agent="off") == NetworkPolicy()  # type: ignore[arg-type]
    listed = AllowList(["example.org"])  # type: ignore[arg-type]
    assert NetworkPolicy(agent=listed).agent == AllowList(("example.org",))


@pytest.mark.parametrize("wrong", [True, None, "yes", ["example.org"]], ids=repr)
def test_what_is_no_network_is_refused(wrong: object) -> None:
    with raises(ValueError, "on", "off", "AllowList"):
        NetworkPolicy(agent=wrong)  # type: ignore[arg-type]
    with raises(ValueError, "on", "off"):
        SlotSpec(network=wrong)  # type: ignore[arg-type]
    with raises(ValueError):
        AllowList("example.org")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "read"),
    [(True, 1.0), (Decimal("0.5"), 0.5), (10**400, math.inf), (-(10**400), -math.inf), ("1", None), (None, None)],
    ids=["bool", "decimal", "large", "small", "text", "none"],
)
def test_numbers_are_read(value: object, read: float | None) -> None:
    assert number(value) == read
