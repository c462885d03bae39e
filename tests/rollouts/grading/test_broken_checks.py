"""A check that the work makes fail scores 0; one that fails anyway is a failure of the grader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.scripts import groups_file
from palaestra.cli.main import main

ENV = """
from palaestra import Task, environment

ATTACKS = {
    "fifo": "rm -f answer.txt; mkfifo answer.txt",
    "directory": "rm -f answer.txt; mkdir answer.txt",
    "garbage": "echo many > answer.txt",
    "removed": "cd /; rm -rf /workspace; ln -s /nowhere /workspace",
    "honest": "echo 4 > answer.txt",
}

@environment(toolsets=["terminal"])
def breaking():
    for name, command in ATTACKS.items():
        yield Task(id=name, prompt="?", files={"answer.txt": "0"}, solution=command)

@breaking.score
async def right(task, sandbox):
    text = await sandbox.read_text("answer.txt")
    return float(int(text) == 4)
"""

FAULTY = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def faulty():
    yield Task(id="one", prompt="?", solution="echo 4 > answer.txt")

@faulty.score
async def right(sandbox):
    return float(int(await sandbox.read_text("nowhere.txt")) == 4)
"""


@pytest.mark.slots
def test_work_that_breaks_its_check_scores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("breaking_env.py").write_text(ENV)
    assert main(["run", "breaking_env.py", "--policy", "oracle", "--env.group_size", "1"]) == 0
    lines = [json.loads(line) for line in groups_file().read_text().splitlines()]
    assert {line["task_id"]: line["scores"] for line in lines} == {
        "fifo": [0.0],
        "directory": [0.0],
        "garbage": [0.0],
        "removed": [0.0],
        "honest": [1.0],
    }


@pytest.mark.slots
def test_a_check_that_always_fails_is_the_graders_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("faulty_env.py").write_text(FAULTY)
    assert main(["run", "faulty_env.py", "--policy", "oracle", "--env.group_size", "1"]) == 3
