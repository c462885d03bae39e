"""Going on with a run under other settings: more items, more rollouts, fewer of either, and two processes at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from envs.scripts import groups_file
from palaestra.cli.main import main
from palaestra.rollouts.events import RolloutEnded
from palaestra.rollouts.journal.journal import Journal, read_journal
from palaestra.rollouts.journal.reader import Recording

PLAIN = """
from palaestra import Task, ToolStep, environment

@environment(toolsets=["todo"])
def plain(n: int = 3):
    for number in range(n):
        yield Task(id=f"t-{number}", prompt="Plan.", solution=[
            ToolStep("todo", {"todos": [{"id": "1", "content": "think", "status": "pending"}]}),
        ])

@plain.score
async def paid(task, sandbox):
    return 1.0
"""


def palaestra(*argv: str) -> int:
    return main(list(argv))


def line(n: int, group: int) -> list[str]:
    return ["run", "plain_env.py", "--policy", "oracle", "--env.n", str(n), "--group", str(group)]


class Extended:
    """One run in this folder, made and gone on with."""

    def __init__(self, n: int, group: int, script: str = PLAIN) -> None:
        Path("plain_env.py").write_text(script)
        self.journal = Path()
        assert self.go(n, group) == 0
        (self.journal,) = Path().glob("runs/*/*/journal.jsonl")
        self.data = groups_file()

    def go(self, n: int, group: int, *more: str) -> int:
        return palaestra(*line(n, group), *more, *(["--resume", str(self.journal.parent)] if self.journal.name else []))

    @property
    def lines(self) -> list[int]:
        """The sizes of the groups in the data set."""
        return [len(json.loads(line)["scores"]) for line in self.data.read_text().splitlines()]

    @property
    def rollouts(self) -> list[str]:
        """All that were ever rolled out, in order."""
        return sorted(e.trajectory.rollout_id for e in read_journal(self.journal) if isinstance(e, RolloutEnded))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("n", "group"), [(4, 2), (2, 4), (3, 3)])
def test_only_what_is_missing_is_rolled_out(n: int, group: int) -> None:
    run = Extended(2, 2)
    assert run.go(n, group) == 0
    assert run.lines == [group] * n
    assert run.rollouts == [f"{task:06d}-t-{task}/{index}" for task in range(n) for index in range(group)]
    assert [len(each.trajectories) for each in Recording(run.journal)] == [group] * n
    assert palaestra("verify", str(run.journal.parent)) == 2, "nothing was sampled"


CHANGING = """
import time
from palaestra import Task, environment

@environment(toolsets=["todo"])
def plain(n: int = 3):
    for number in range(n):
        yield Task(id=f"t-{number}", prompt=f"Plan {time.time_ns() if number else 0}.", solution=[])

@plain.score
async def paid(task, sandbox):
    return 1.0
"""


def test_no_group_is_of_two_questions(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts that are drawn without the seed differ when the run goes on: what there is stays, and is not mixed."""
    run = Extended(2, 2, CHANGING)
    asked = [group.asked for group in Recording(run.journal)]
    assert run.go(2, 2) == 0
    assert "task 1 (t-1) has changed" in capsys.readouterr().err
    for _ in range(2):
        assert run.go(3, 4) == 0
        assert "task t-1 has changed" in capsys.readouterr().err
        groups = list(Recording(run.journal))
        assert [len(group.trajectories) for group in groups] == run.lines == [4, 2, 4]
        assert [group.asked for group in groups][:2] == asked
        for group in groups:
            assert len({each.messages[0]["content"] for each in group.trajectories}) == 1


def test_with_fewer_items_nothing_that_was_finished_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    run = Extended(4, 2)
    before = run.data.read_bytes()
    assert run.go(1, 2) == 0
    assert run.data.read_bytes() == before
    assert "4 groups (0 failed), 8 rollouts" in capsys.readouterr().err
    assert run.go(1, 1) == 0
    assert run.data.read_bytes() == before


def test_an_extended_run_is_replayed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    run = Extended(1, 1)
    assert run.go(3, 2) == 0
    assert palaestra("replay", str(run.journal.parent), "--environment", "plain_env.py") == 0
    assert "6 played" in capsys.readouterr().out
    assert run.go(1, 2) == 0
    assert palaestra("replay", str(run.journal.parent), "--environment", "plain_env.py") == 1, (
        "what it was is not what it would give now"
    )
    assert "no task has this number now" in capsys.readouterr().out


def test_a_damaged_last_line_costs_that_line_however_often_the_run_goes_on() -> None:
    run = Extended(2, 2)
    whole = run.data.read_bytes()
    lines = run.journal.read_bytes().splitlines(keepends=True)
    run.journal.write_bytes(b"".join(lines[:-3]) + lines[-3].replace(b'"event"', b'"evend"'))
    for _ in range(2):
        assert run.go(2, 2) == 0
        assert run.data.read_bytes() == whole


def test_a_run_that_was_moved_goes_on_where_it_is_now(tmp_path: Path) -> None:
    run = Extended(2, 2)
    whole = run.data.read_bytes()
    moved = run.journal.parent.rename(tmp_path / "moved")
    assert palaestra(*line(2, 2), "--resume", str(moved)) == 0
    assert (moved / "groups.jsonl").read_bytes() == whole
    assert not run.data.exists()


def test_a_copy_of_a_run_goes_on_and_leaves_the_original_alone(tmp_path: Path) -> None:
    run = Extended(2, 2)
    whole, before = run.data.read_bytes(), run.journal.read_bytes()
    copied = Path(shutil.copytree(run.journal.parent, tmp_path / "copied"))
    assert palaestra(*line(3, 2), "--resume", str(copied)) == 0
    assert (run.data.read_bytes(), run.journal.read_bytes()) == (whole, before)
    assert (copied / "groups.jsonl").read_bytes().startswith(whole)
    assert run.go(3, 2) == 0
    assert run.data.read_bytes() == (copied / "groups.jsonl").read_bytes()


def test_one_process_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    run = Extended(1, 1)
    before, held = run.journal.read_bytes(), Journal(run.journal)
    assert run.go(2, 1) == 2
    assert "another process is writing" in capsys.readouterr().err
    assert run.journal.read_bytes() == before
    held.close()
    assert run.go(2, 1, "--env.seed", "5") == 2
    assert "was run with seed" in capsys.readouterr().err
    assert run.go(2, 1) == 0, "what is refused has let go of the run"
    assert run.lines == [1, 1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
@pytest.mark.parametrize("size", ["48k", "64k"])
def test_a_full_disk_ends_the_run_with_one_line_and_a_way_on(
    size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", "small"], check=True)
    try:
        with monkeypatch.context() as inside:
            inside.chdir("small")
            Path("plain_env.py").write_text(PLAIN)
            run = ["run", "plain_env.py", "--policy", "oracle", "--env.n", "12", "--group", "4"]
            assert palaestra(*run) == 1
            said = capsys.readouterr().err
            (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
            assert "No space left on device" in line
            (journal,) = Path().glob("runs/*/*/journal.jsonl")
            assert f"continue with palaestra resume {journal.parent}" in said
            subprocess.run(["mount", "-o", "remount,size=8m", "../small"], check=True)
            assert palaestra(*run, "--resume", str(journal.parent)) == 0
            assert [len(json.loads(line)["scores"]) for line in groups_file().read_text().splitlines()] == [4] * 12
            ended = [e.trajectory for e in read_journal(journal) if isinstance(e, RolloutEnded)]
            scored = [trajectory.rollout_id for trajectory in ended if trajectory.scored]
            assert len(scored) == len(set(scored)) == 48
    finally:
        subprocess.run(["umount", "-l", "small"], check=True)
