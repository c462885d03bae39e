"""`palaestra doctor` on the machine that runs the tests."""

import json
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.cli.doctor import machine_facts, verdict
from palaestra.cli.main import main
from palaestra_slots.sandbox.backend_check import MEASURED
from palaestra_slots.sandbox.slot import Rung, RungStatus


def test_the_facts_are_all_there() -> None:
    facts = machine_facts()
    assert set(facts) == {"python", "kernel", "user", "cpus", "cgroup", "git", "peers"}
    assert all(facts.values())


def test_the_verdict_is_the_best_rung_that_protects() -> None:
    none = RungStatus(Rung.NONE, True, "always")
    userns = RungStatus(Rung.USERNS, True, "works")
    full = RungStatus(Rung.FULL, False, "not root")
    assert verdict([full, userns, none]) == "runs use: userns"
    check_message(verdict([full, none]))


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
    facts = {name: found[name] for name in ("name", "isolation", "problem", "reachable", "images", "checkpoints")}
    assert facts == {
        "name": "local",
        "isolation": "confined",
        "problem": "",
        "reachable": True,
        "images": ["name", "path"],
        "checkpoints": False,
    }
    assert set(found["seconds"]) == set(MEASURED)
    assert all(seconds > 0 for seconds in found["seconds"].values())


@pytest.mark.slots
def test_one_table_has_all_backends_and_a_fix_for_each_that_does_not_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    words = ["--set", "nomad_address=http://127.0.0.1:9", "--set", "docker_hosts=unix:///nowhere"]
    assert main(["doctor", "--backend", "all", *words]) == 1
    heading, *lines = capsys.readouterr().out.splitlines()
    assert [each.split()[:2] for each in lines[:8]] == [
        ["local", "yes"],
        *([name, "no"] for name in ("docker", "singularity", "nomad", "ssh", "slurm", "kubernetes", "modal")),
    ]
    assert {"create", "exec", "fork", "reset"} < set(heading.split())
    problems = {each.split()[0]: each for each in lines if " does not work: " in each}
    fixes = {"docker": "DOCKER_HOST", "singularity": "apptainer", "nomad": "nomad_address", "ssh": "ssh_hosts"}
    for name, fix in {**fixes, "modal": "modal"}.items():
        assert fix in problems[name] or f"{name}_image" in problems[name]


@pytest.mark.parametrize("word", ["nothing=1", "docker_image", "backend_options.level", "isolation.level=full"])
def test_a_setting_that_cannot_be_read_is_refused(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main(["doctor", "--backend", "local", "--set", word]) == 2
    error = capsys.readouterr().err
    assert word in error
    assert "FIELD=VALUE" in error
