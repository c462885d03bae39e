"""A bug in the score costs no rollout: nothing is played again, and the work is kept until it has a score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import palaestra
from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.rollouts.events import AttemptDiscarded, RolloutEnded
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.workspaces import Workspaces
from palaestra_slots.core.io.plugins import installed
from palaestra_slots.core.types import Blame

pytestmark = pytest.mark.slots

ENV = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def wrong():
    for name in "ab":
        yield Task(id=name, prompt="Write x.", solution=f"echo {name} > x; echo kept > /tmp/beside")

@wrong.state
def notes():
    return {"seen": 1}

@wrong.score
async def right(task, sandbox, rollout, state):
    BUG
    return (await sandbox.read_text("x", missing="")).strip() == task.id and state["seen"] == 1
"""

BUGS = [
    "task.nothing",
    "nothing",
    "{}['key']",
    "len(3)",
    "int('x')",
    "import nothing",
    "[][1]",
    "(await sandbox.read_text('x')).nothing",
]


def run(bug: str, *flags: str) -> tuple[int, Path]:
    Path("my_env.py").write_text(ENV.replace("BUG", bug))
    code = main(["run", "my_env.py", "--policy", "oracle", *flags])
    (journal,) = Path.cwd().glob("runs/*/*/journal.jsonl")
    return code, journal


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_score_is_not_played_again(bug: str) -> None:
    code, journal = run(bug, "--env.infra_retries", "2")
    assert code == 3
    events = list(read_journal(journal))
    assert not any(isinstance(event, AttemptDiscarded) for event in events)
    ended = [event.trajectory for event in events if isinstance(event, RolloutEnded)]
    assert [(each.reward, each.blame) for each in ended] == [(None, Blame.GRADER)] * 2
    assert f"`palaestra grade {journal.parent.name}`" in ended[0].error


def test_a_check_that_breaks_by_chance_is_played_again_as_before() -> None:
    _, journal = run("raise OSError('the disk')", "--env.infra_retries", "1")
    assert sum(isinstance(event, AttemptDiscarded) for event in read_journal(journal)) == 2


def test_the_kept_work_is_graded_once_the_score_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    _, journal = run("task.nothing if task.id == 'a' else 0")
    assert [path.name for path in journal.parent.glob("workspaces/*")] == ["000000-a"]
    assert main(["grade", str(journal.parent)]) == 1  # it is still wrong, so the work stays
    assert list(journal.parent.glob("workspaces/*/*"))
    Path("my_env.py").write_text(ENV.replace("BUG", "assert await sandbox.read_text('/tmp/beside')"))
    capsys.readouterr()
    assert main(["grade", str(journal.parent)]) == 0
    assert "000000-a/0: unscored -> 1" in capsys.readouterr().out
    last = json.loads((journal.parent / "grades.jsonl").read_text().splitlines()[-1])
    assert (last["rollout_id"], last["reward"]) == ("000000-a/0", 1.0)
    assert not list(journal.parent.glob("workspaces/*/*"))


def test_a_score_that_reads_no_file_keeps_the_work_too() -> None:
    _, journal = run("rollout.nothing")
    Path("my_env.py").write_text(ENV.replace("BUG", "pass"))
    assert main(["grade", str(journal.parent)]) == 0


def test_kept_workspaces_are_kept_whatever_the_score_reads() -> None:
    _, journal = run("return 1", "--keep-workspaces")
    Path("my_env.py").write_text(ENV.replace("BUG", "pass"))
    for _ in range(2):
        assert main(["grade", str(journal.parent)]) == 0
    assert len(list(journal.parent.glob("workspaces/*/*"))) == 2


def test_only_so_much_work_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palaestra.rollouts.workspaces.UNSCORED_BYTES", 1)
    _, journal = run("task.nothing")
    assert not list(journal.parent.glob("workspaces/*/*"))
    trajectories: list[Any] = palaestra.open_run(journal.parent).trajectories
    assert all("palaestra grade" not in each.error for each in trajectories)
    assert not Workspaces(None).keeps_unscored  # type: ignore[arg-type]


def test_work_stays_until_its_new_score_is_stored() -> None:
    _, journal = run("task.nothing")
    Path("my_env.py").write_text(ENV.replace("BUG", "pass"))
    grades = journal.parent / "grades.jsonl"
    grades.mkdir()  # so that no score can be written
    assert main(["grade", str(journal.parent)]) == 2
    assert len(list(journal.parent.glob("workspaces/*/*"))) == 2
    grades.rmdir()
    assert main(["grade", str(journal.parent)]) == 0
    assert not list(journal.parent.glob("workspaces/*/*"))


def test_work_that_an_earlier_part_of_the_run_kept_is_not_deleted() -> None:
    _, journal = run("pass", "--keep-workspaces")
    assert main(["resume", str(journal.parent), "--env.save_workspaces", "false", "--tasks", "2"]) == 0
    assert main(["grade", str(journal.parent)]) == 0
    assert len(list(journal.parent.glob("workspaces/*/*"))) == 2


ELSEWHERE = """
from palaestra import LocalBackend

class Elsewhere:
    name = "elsewhere"

    def __init__(self, config):
        self._slots = LocalBackend()

    def __getattr__(self, name):
        return getattr(self._slots, name)
"""


def test_a_backend_that_cannot_keep_work_goes_on_after_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = Path("elsewhere-1.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[palaestra.backends]\nelsewhere = elsewhere:Elsewhere\n")
    Path("elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    installed.cache_clear()
    try:
        _, journal = run("task.nothing", "--env.terminal_backend", "elsewhere")
        found = palaestra.open_run(journal.parent).trajectories
        assert ["has no attribute 'nothing'" in each.error for each in found] == [True] * 2
        assert not any("palaestra grade" in each.error for each in found)
        assert main(["run", "my_env.py", "--policy", "oracle", "--backend", "elsewhere", "--keep-workspaces"]) == 2
        check_message(capsys.readouterr().err, "elsewhere")
    finally:
        installed.cache_clear()
