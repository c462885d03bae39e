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


@pytest.mark.slots
def test_a_backend_is_used_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "local", "--set", "isolation=confined", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["backends"]
    assert (found["name"], found["isolation"], found["problem"]) == ("local", "confined", "")
    assert set(found["seconds"]) == {"start", "create", "command", "fork", "reset"}
    assert all(seconds > 0 for seconds in found["seconds"].values())


@pytest.mark.slots
def test_a_backend_that_does_not_work_has_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "nomad_address=http://127.0.0.1:9", "--set", "docker_hosts=unix:///nowhere"]
    assert main(["doctor", "--backend", "nomad", "--backend", "docker", "--backend", "local", *words]) == 1
    nomad, docker, local = capsys.readouterr().out.splitlines()
    assert nomad.startswith("nomad: no: ")
    assert "nomad_address" in nomad
    assert docker.startswith("docker: no: ")
    assert "DOCKER_HOST" in docker
    assert local.startswith("local: yes: ")


def test_a_setting_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "local", "--set", "nothing=1"]) == 2
    assert "nothing" in capsys.readouterr().err
