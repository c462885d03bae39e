"""`palaestra runs`, `palaestra resume`, and the short names of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palaestra import open_run
from palaestra.cli.main import main

ENV = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def words(n: int = 2):
    for i in range(n):
        yield Task(id=f"w{i}", prompt="p", solution="true")

@words.score
def right(task): return 1
"""


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(ENV)
    assert (
        main(["run", "my_env.py", "--policy", "oracle", "--group", "2", "--env.seed", "7", "--concurrency", "1"]) == 0
    )
    capsys.readouterr()


def test_runs_are_listed_the_latest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "my_env.py", "--policy", "noop"]) == 0
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["state"], row["groups"], row["rollouts"]) for row in rows] == [
        ("noop", "done", 2, 2), ("oracle", "done", 2, 4),
    ]  # fmt: skip
    assert main(["runs", "--limit", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(rows[0]["id"])
    assert "1 older runs" in shown.err


@pytest.mark.parametrize("command", [["status"], ["export", "--to", "table", "--out", "-"], ["replay"], ["verify"]])
def test_every_command_takes_the_short_name_of_a_run(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    codes = {main([command[0], name, *command[1:]]) for name in ("last", open_run().path.name[:16])}
    assert codes == ({2} if command == ["verify"] else {0})  # nothing to prove without tokens
    assert "no run folder" not in capsys.readouterr().err


def test_a_run_is_resumed_with_the_settings_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = open_run().path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    started = [number for number, line in enumerate(lines) if b'"event":"group"' in line]
    journal.write_bytes(b"".join(lines[: started[-1] + 1]))  # killed during its second group
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["resume", str(journal.parent)]) == 0
    said = capsys.readouterr().err
    assert "1 groups and 2 rollouts are kept, 1 groups were in progress" in said
    run = open_run(journal.parent)
    assert [len(group.trajectories) for group in run.groups] == [2, 2]
    assert run.recording.meta.seed == 7


def test_a_resumed_run_can_be_extended() -> None:
    assert main(["resume", "last", "--env.n", "3"]) == 0
    assert [group.task_id for group in open_run().groups] == ["w0", "w1", "w2"]
    assert main(["run", "my_env.py", "--policy", "oracle", "--group", "2", "--env.seed", "7", "--resume", "last"]) == 0
    assert len(list(Path("runs").glob("*/*"))) == 1


def test_an_unknown_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "nothing"]) == 2
    assert "no run folder nothing" in capsys.readouterr().err
