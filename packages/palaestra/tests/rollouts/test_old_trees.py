"""Runs with tree rollouts, which earlier versions made, are read, verified, exported and resumed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tree_journals import unpacked

from palaestra.cli.main import main
from palaestra.rollouts.events import RolloutEnded, TurnTaken
from palaestra.rollouts.export.token_rows import ExportedRow
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.journal.verify import verify_run
from palaestra.rollouts.records import Fork

SCRIPT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def one():
    steps = ["echo 1 >> a", "echo 2 >> a", "echo 3 >> a", "cat a"]
    yield Task(id="one", prompt="Write the numbers.", solution=steps)

@one.score
async def correct(task, sandbox):
    return float(await sandbox.read_text("a", missing="") == "1\\n2\\n3\\n")
"""


def test_the_tokens_of_branches_are_verified_and_exported(tmp_path: Path) -> None:
    journal = unpacked(tmp_path / "run", "exact")
    verdict = verify_run(journal)
    assert verdict.ok, verdict.violation
    out = tmp_path / "rows.jsonl"
    assert main(["export", str(journal.parent), "--to", "rows", "--out", str(out)]) == 0
    rows = [msgspec.json.decode(line, type=ExportedRow) for line in out.read_bytes().splitlines()]
    assert [row.parent is not msgspec.UNSET for row in rows] == [False, False, True, True]
    assert sum(sum(row.mask) for row in rows) == verdict.trained


def test_a_prefix_that_is_not_the_parents_is_found(tmp_path: Path) -> None:
    journal = unpacked(tmp_path, "exact")
    lines = journal.read_bytes().splitlines(keepends=True)
    events = list(read_journal(journal))
    place = next(n for n, event in enumerate(events) if isinstance(event, RolloutEnded) and event.trajectory.parent)
    event = events[place]
    assert isinstance(event, RolloutEnded)
    fork = event.trajectory.parent
    assert fork is not None
    for parent in (Fork(1 - fork.index, fork.turn), Fork(fork.index, 9), Fork(9, fork.turn)):
        wrong = msgspec.structs.replace(event, trajectory=msgspec.structs.replace(event.trajectory, parent=parent))
        journal.write_bytes(b"".join([*lines[:place], msgspec.json.encode(wrong) + b"\n", *lines[place + 1 :]]))
        assert event.trajectory.rollout_id in verify_run(journal).violation


@pytest.mark.slots
@pytest.mark.parametrize("cut", ["before the branches", "in a branch"])
def test_a_cut_off_tree_gets_independent_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cut: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(SCRIPT)
    journal = unpacked(tmp_path / "runs/one--oracle/old", "scripted")
    lines = journal.read_bytes().splitlines(keepends=True)
    events = list(read_journal(journal))
    last = max(n for n, each in enumerate(events) if isinstance(each, TurnTaken))
    roots = next(n for n, each in enumerate(events) if isinstance(each, RolloutEnded)) + 2
    journal.write_bytes(b"".join(lines[: roots if cut == "before the branches" else last]))
    words = ["run", "my_env.py", "--policy", "oracle", "--group", "4", "--resume", str(journal.parent)]
    assert main(words) == 0, capfd.readouterr().err
    (group,) = Recording(journal)
    assert [each.parent for each in group.trajectories] == [None] * 4
    assert [each.reward for each in group.trajectories] == [1.0] * 4
    assert main(["resume", str(journal.parent)]) == 0, capfd.readouterr().err
