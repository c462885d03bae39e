"""`palaestra status` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded import broken, sky, write_run

from golden_messages import check_message
from palaestra.cli.main import main


def status(*argv: object) -> int:
    return main(["status", *map(str, argv)])


def test_a_run_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", sky(), broken())
    assert status(folder, "--watch") == 0, "watching ends with the run"
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "run        run: weather with m"
    assert said[1].startswith("state      done after ")
    assert "groups     2 ended of 2 begun, 1 failed" in said
    assert any("; 3 of 4 rollouts scored; 0.312 (" in line and "33.3 % full (" in line for line in said)
    assert any(line.startswith("blame      sandbox 1: 25.0 % (") for line in said)
    assert "tokens     18 read, 0 written" in said


def test_tokens_that_the_model_server_did_not_count_are_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = write_run(tmp_path / "run", ended=False) / "journal.jsonl"
    assert status(journal) == 0
    assert "tokens     0 read, 0 written" in capsys.readouterr().out, "no model was asked"
    turn = {"event": "messages", "at": 1.0, "rollout_id": "g/0", "turn": 1, "messages": [], "tokens": [0, 0]}
    with journal.open("a") as file:
        file.write(json.dumps({**turn, "turn": 0}) + "\n" + json.dumps({**turn, "cost": 0.0}) + "\n")
    assert status(journal) == 0
    said = capsys.readouterr().out
    assert "tokens     unknown" in said
    assert "0.0000" not in said
    assert status(journal, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens_unknown"] is True


def test_a_run_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", sky(), ended=False)
    assert status(folder / "journal.jsonl", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["state"], said["rollouts"], said["blame"]["sandbox"]["count"]) == ("killed", 4, 1)


def test_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(tmp_path) == 2
    check_message(capsys.readouterr().err, "folder")
