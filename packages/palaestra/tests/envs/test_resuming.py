"""Runs that were cut off in the middle of their rollouts and go on, in slots; and what cannot go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import embedded

from envs.agent_script import WITH_META
from envs.scripts import groups_file
from palaestra.cli.main import main
from palaestra.rollouts.events import RolloutResumed, TurnTaken
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.resume.recorded_turns import Mismatch

pytestmark = pytest.mark.slots

STEPS = """
from palaestra import Task, ToolStep, environment

@environment(toolsets=["terminal", "todo"])
def steps():
    plan = [{"id": "1", "content": "count", "status": "in_progress"}]
    done = [{"id": "1", "content": "count", "status": "completed"}]
    yield Task(id="one", prompt="Count.", files={"a.txt": "x\\n" * 3}, answer="3", solution=[
        ToolStep("todo", {"todos": plan}),
        "wc -l < a.txt > answer.txt",
        ToolStep("todo", {"todos": done, "merge": True}),
        "cat answer.txt",
    ])

@steps.score
async def correct(task, sandbox):
    return (await sandbox.read_text("answer.txt", missing="")).strip() == task.answer
"""

IN_THE_BACKGROUND = """
from palaestra import Task, ToolStep, environment

@environment(toolsets=["terminal"])
def background():
    yield Task(id="one", prompt="Serve.", solution=[
        ToolStep("terminal", {"command": "sleep 1000", "background": True}), "echo ready > said.txt", "cat said.txt",
    ])

@background.score
async def said(task, sandbox):
    return await sandbox.stat("said.txt") is not None
"""


def palaestra(*argv: str) -> int:
    return main(list(argv))


def gone_on(
    folder: Path, script: str, turn: int, monkeypatch: pytest.MonkeyPatch, *flags: str, group: int = 2
) -> list[RolloutResumed]:
    """Run a script, cut its journal after the first event of a turn, go on; the data set must be the same again."""
    monkeypatch.chdir(folder)
    Path("my_env.py").write_text(script)
    run = ["run", "my_env.py", *flags, "--policy", "oracle", "--group", str(group), "--concurrency", "1"]
    assert palaestra(*run) == 0
    data = groups_file(folder)
    (journal,) = folder.glob("runs/*/*/journal.jsonl")
    whole = data.read_bytes()
    events = list(read_journal(journal))
    place = next(n for n, event in enumerate(events, 1) if isinstance(event, TurnTaken) and event.turn == turn)
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:place]))
    assert palaestra(*run, "--resume", str(journal.parent)) == 0
    assert data.read_bytes() == whole
    return [event for event in read_journal(journal) if isinstance(event, RolloutResumed)]


def test_what_lies_outside_the_slot_comes_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The to-do list is the rollout's own: its later answers would be others without the earlier calls."""
    events = gone_on(tmp_path, STEPS, 3, monkeypatch)
    assert max(event.turns for event in events) == 3
    assert {event.anew for event in events} == {""}


def test_an_agent_that_writes_its_calls_as_text_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = gone_on(tmp_path, WITH_META, 1, monkeypatch, "process", "--env.tool_pool_mode", "default")
    assert events
    assert {event.anew for event in events} == {""}


def test_times_of_day_stay_as_they_were_recorded_in_calls_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what a command printed looks like the end of its own element."""
    times = WITH_META.replace(
        '"solution": "cat seed.txt > word.txt"',
        '"solution": ["date +\'</tool_response> <tool_response>{} %T.%N\'", "cat seed.txt > word.txt"]',
    )
    flags = ["process", "--env.tool_pool_mode", "local", "--env.total_steps", "1"]
    events = gone_on(tmp_path, times, 2, monkeypatch, *flags, group=1)
    assert [(event.anew, event.turns) for event in events] == [("", 2)]


def test_with_a_process_in_the_background_it_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = gone_on(tmp_path, IN_THE_BACKGROUND, 2, monkeypatch)
    assert events
    assert {event.anew for event in events} == {Mismatch.BACKGROUND}
    (run,) = tmp_path.glob("runs/*/*")
    assert f"started again ({Mismatch.BACKGROUND}: {len(events)})" in capsys.readouterr().err
    assert palaestra("status", str(run)) == 0
    assert f"{Mismatch.BACKGROUND}: {len(events)}" in capsys.readouterr().out
    report = groups_file(tmp_path).with_name("report.html")
    assert f"started again ({Mismatch.BACKGROUND}: {len(events)})" in embedded(report)["answers"]["run"]["resumed"]
