"""`palaestra env check`: its own flags mean the same before and after the environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.cli.main import main

ENV = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def words(n: int = 5):
    for i in range(n):
        yield Task(id=f"w{i}", prompt="p", solution="echo hi > answer.txt")

@words.score
async def right(task, sandbox):
    return (await sandbox.read_text("answer.txt", missing="")) == "hi\\n"
"""


def test_an_unknown_cheat_is_answered_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(ENV)
    assert main(["env", "check", "my_env.py", "--only", "nope"]) == 2
    assert "conftest-skip" in capsys.readouterr().err


def test_attacks_are_not_played_without_isolation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(ENV)
    assert main(["env", "check", "my_env.py", "--only", "git-log-all", "--env.isolation", "none"]) == 2
    assert "isolation level none" in capsys.readouterr().err


@pytest.mark.slots
@pytest.mark.parametrize(
    "words",
    [
        ["my_env.py", "--tasks", "2", "--only", "git-log-all", "--json", "--env.n", "3"],
        ["--tasks", "2", "--only", "git-log-all", "--json", "my_env.py", "--env.n", "3"],
        ["--env.n", "3", "my_env.py", "--tasks", "2", "--only", "git-log-all", "--json"],
    ],
)
def test_flags_mean_the_same_in_every_place(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(ENV)
    assert main(["env", "check", *words]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == ["w0", "w1"]


@pytest.mark.slots
def test_a_check_prints_what_is_to_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(ENV)
    only = ["--only", "git-log-all", "--only", "named-files"]
    assert main(["env", "check", "my_env.py", *only]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3
    assert "way of judging: outside" in shown.out
    assert "1 task (w0)" in shown.out
    check_message(shown.out, "2 ways")
    assert "ok" not in shown.err
    assert main(["env", "check", "my_env.py", *only, "--all"]) == 0
    assert "git-log-all" in capsys.readouterr().out
    Path("my_env.py").write_text(ENV.replace("return (await", "return 1 or (await"))
    assert main(["env", "check", "my_env.py"]) == 1
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) < 15
    assert "conftest-skip" not in shown.out
    assert "not played: " in shown.out


@pytest.mark.slots
@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (("", ""), 0, "doing nothing and 1 way of reward hacking score 0"),
        (
            ('== "hi\\n"', '== "hi\\n" or task.id == "w1"'),
            1,
            "w1: doing nothing earns 1, and its floor is 0. If that is right for this task, give it Task(floor=1)",
        ),
        (
            ('prompt="p"', 'prompt="p", floor=1.0'),
            0,
            "doing nothing and 1 way of reward hacking score at most their task's floor, here 1",
        ),
    ],
    ids=["sound", "too-generous", "with-floor"],
)
def test_the_line_of_a_check_names_the_task_and_the_remedy(
    change: tuple[str, str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(ENV.replace(*change) if change[0] else ENV)
    assert main(["env", "check", "my_env.py", "--task", "w0,w1", "--only", "git-log-all"]) == code
    assert said in capsys.readouterr().out
