"""The ladder names every rung, and says why not."""

from __future__ import annotations

import pytest

from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.isolation.isolation_probe import probe
from palaestra_slots.sandbox.isolation.self_test import _claims
from palaestra_slots.sandbox.slot import Rung

pytestmark = pytest.mark.slots


async def test_every_rung_has_a_line_and_what_it_says_is_so() -> None:
    steps = {step.rung: step for step in await probe()}
    assert list(steps) == [Rung.FULL, Rung.USERNS, Rung.CONFINED, Rung.NONE]
    for rung, step in steps.items():
        assert step.reason
        assert bool(step.covers) == step.available
        backend = LocalBackend(rung=rung)
        try:
            await backend.start()
            assert step.available
        except IsolationUnavailable:
            assert not step.available
        finally:
            await backend.aclose()


def test_the_proof_can_fail() -> None:
    lines = {
        "uid": "0", "outside": "1879048192", "ids": "65536", "NoNewPrivs:": "1", "Seccomp:": "2",
        "CapBnd:": "00000000000004fb", "CapEff:": "00000000000004fb", "init": "(slot-init)", "interfaces": "0",
        "workspace": "writable",
    }  # fmt: skip
    good = {fact: [value] for fact, value in lines.items()}
    assert all(_claims(good, Rung.FULL).values())
    for fact, value in (
        ("uid", "1"), ("outside", "0"), ("NoNewPrivs:", "0"), ("Seccomp:", "0"), ("CapEff:", "1ffffffffff"),
        ("init", "(systemd)"), ("interfaces", "1"), ("shadow", "yes"), ("sysctl", "writable"), ("workspace", ""),
    ):  # fmt: skip
        assert not all(_claims({**good, fact: [value]}, Rung.FULL).values()), fact
