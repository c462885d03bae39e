"""`palaestra doctor` on the machine that runs the tests."""

import json

import pytest

from palaestra.cli.doctor import machine_facts, verdict
from palaestra.cli.main import main
from palaestra.sandbox.slot import Rung, RungStatus


def test_the_facts_are_all_there() -> None:
    facts = machine_facts()
    assert set(facts) == {"python", "kernel", "user", "cpus", "cgroup", "git"}
    assert all(facts.values())


def test_the_verdict_is_the_best_rung_that_protects() -> None:
    none = RungStatus(Rung.NONE, True, "always")
    userns = RungStatus(Rung.USERNS, True, "works")
    full = RungStatus(Rung.FULL, False, "not root")
    assert verdict([full, userns, none]) == "runs use: userns"
    assert verdict([full, none]) == "runs refuse to start"


@pytest.mark.slots
def test_the_ladder_has_a_reason_for_every_rung(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    ladder = json.loads(capsys.readouterr().out)["ladder"]
    assert {step["rung"] for step in ladder} == {"full", "userns", "confined", "none"}
    assert all(step["reason"] for step in ladder)
    protected = any(step["available"] for step in ladder if step["rung"] != "none")
    assert code == (0 if protected else 5)
