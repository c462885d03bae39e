"""`--task`, `--failed-of` and `--tasks`: the same words choose the same tasks of every form of environment, in every
command, and a resumed run plays what was chosen."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

import palaestra
from palaestra.cli.main import main
from palaestra.rollouts.finished_run import open_run
from palaestra.rollouts.schedule import TaskChoice, escaped
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import Task

pytestmark = pytest.mark.slots

FUNCTION = """
from palaestra import Say, Task, environment

@environment(toolsets=[])
def words():
    for name in ("a1", "a2", "b1", "b2"):
        yield Task(id=name, prompt=name, solution=[Say("right" if name != "b1" else "wrong")])

@words.score
def score(rollout):
    return float(rollout.final_response == "right")
"""

CLASS = ["terminal_test", "--tasks", "40"]
"""A class whose `get_next_item` gives its three items again and again, and whose `evaluate` has three others."""

ROWS = ["terminalbench_2", "--env.dataset_name", "built-in", "--env.base_image", "host"]
"""Listed items: the two built-in tasks, which a run gives again and again."""


async def _ids(words: Iterable[str], source: Iterable[str], limit: int = 20) -> list[str]:
    async def tasks() -> AsyncIterator[Task]:
        for name in source:
            yield Task(id=name, prompt="")

    chosen = TaskChoice(words).of(tasks(), "env", {"bad": "bad: not readable"})
    found = []
    async for task in chosen:
        found.append(task.id)
        if len(found) == limit:
            break
    return found


@pytest.mark.parametrize(
    ("words", "source", "wanted"),
    [
        (["b", "a"], "abc", ["a", "b"]),  # in the order of the environment
        (["a"], itertools.cycle("ab"), ["a"]),  # each once, although the tasks come again
        (["?"], itertools.cycle("abc"), ["a", "b", "c"]),
        (["x[1]"], ["x1", "x[1]", "x1"], ["x[1]"]),  # an id that looks like a pattern is an id
        (["x[1]", "y"], ["y", "x[1]", "x1"], ["y", "x[1]"]),
        (["x[12]"], ["x1", "y", "x2"], ["x1", "x2"]),
        (["x[1]", "x?"], ["x1", "x[1]"], ["x1", "x[1]"]),
        ([escaped("x[1]*")], ["x1", "x[1]*", "x[1]a"], ["x[1]*"]),
        ([escaped("x?")], itertools.chain(["xa", "x?"], iter(int, 1)), ["x?"]),  # the rest is not read
        (["9*"], map(str, itertools.count()), ["9", *(str(n) for n in range(90, 100)), *map(str, range(900, 909))]),
    ],
)
async def test_a_word_is_an_id_or_a_pattern(words: list[str], source: Iterable[str], wanted: list[str]) -> None:
    assert await _ids(words, source) == wanted


@pytest.mark.parametrize(
    ("words", "source", "said"),
    [
        (["fix-twoo"], ["fix-one", "fix-two"], "no task 'fix-twoo'. Did you mean fix-two?"),
        (["a", "z*"], "abc", "no task 'z*'. For this command, it has 3 tasks: a, b, c"),
        (["z", "y"], "abc", "no task 'z' \\(and 1 more\\)"),
        (["z"], itertools.cycle("abc"), "it has 3 tasks"),
        (["bad"], "abc", "the task 'bad' cannot be used: bad: not readable"),
        (["a"], "", "it has no tasks"),
    ],
)
async def test_a_word_that_matches_nothing_is_reported_before_anything_is_played(
    words: list[str], source: Iterable[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("*", "\\*").replace("?", "\\?")):
        await _ids(words, source)


async def test_a_large_set_is_not_read_to_its_end() -> None:
    read = itertools.count()
    assert await _ids(["t5"], (f"t{next(read)}" for _ in iter(int, 1))) == ["t5"]
    assert next(read) < 10


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words_env.py").write_text(FUNCTION)


def played(run: str | Path = "last") -> list[str]:
    return [group.task_id for group in open_run(run).groups]


@pytest.mark.parametrize(
    ("command", "environment", "words", "wanted"),
    [
        ("run", ["words_env.py"], ["--task", "b1,a1"], ["a1", "b1"]),
        ("eval", ["words_env.py"], ["--task", "b1,a1"], ["a1", "b1"]),
        ("eval", ["words_env.py"], ["--task", "a*", "--task=b2"], ["a1", "a2", "b2"]),
        ("run", ["words_env.py"], ["--task", "a*", "--tasks", "1"], ["a1"]),
        ("run", CLASS, ["--task", "nested,greeting"], ["greeting", "nested"]),
        ("run", CLASS, ["--tasks", "2"], ["greeting", "count"]),
        ("run", CLASS, ["--task", "*", "--tasks", "2"], ["greeting", "count"]),
        ("eval", CLASS, ["--task", "rev*"], ["reversed"]),
        ("run", ROWS, ["--task", "*"], ["releases", "stock"]),
        ("run", ROWS, ["--task", "rel*", "--tasks", "3"], ["releases"] * 3),
        ("run", ROWS, ["--task", "stock,releases", "--tasks", "3"], ["releases", "stock", "releases"]),
        ("eval", ROWS, ["--task", "stock", "--tasks", "2"], ["stock"]),
        ("eval", ROWS, ["--task", "rel*"], ["releases"]),
        ("eval", ROWS, ["--tasks", "1"], ["releases"]),
    ],
)
def test_every_form_plays_the_chosen_tasks(
    command: str, environment: list[str], words: list[str], wanted: list[str]
) -> None:
    main([command, *environment, "--policy", "noop", "--samples", "1", *words])
    assert played() == wanted


def test_failed_ids_that_look_like_patterns_are_played_again_alone() -> None:
    Path("words_env.py").write_text(FUNCTION.replace('"a1", "a2", "b1", "b2"', '"ba", "b[a]"').replace("b1", "b[a]"))
    main(["eval", "words_env.py", "--policy", "oracle"])
    main(["eval", "words_env.py", "--policy", "noop", "--failed-of", "last"])
    assert played() == ["b[a]"]
    main(["eval", "words_env.py", "--policy", "noop", "--task", "b[a]"])
    assert played() == ["b[a]"]


@pytest.mark.parametrize("environment", [["words_env.py"], CLASS, ROWS])
@pytest.mark.parametrize("command", ["run", "eval"])
def test_an_unknown_id_ends_the_command_without_a_run(
    command: str, environment: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *environment, "--policy", "noop", "--task", "releasez,a1z"]) == 2
    assert "'releasez' (and 1 more)." in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_failed_tasks_of_a_run_are_those_below_full_reward_or_without_a_score() -> None:
    assert main(["run", "words_env.py", "--policy", "oracle"]) == 0
    assert open_run().failed_tasks() == ["b1"]
    assert main(["eval", "words_env.py", "--policy", "oracle", "--samples", "2", "--failed-of", "last"]) == 0
    assert played() == ["b1"]
    assert main(["run", "words_env.py", "--policy", "noop", "--failed-of", "last", "--task", "a2"]) == 0
    assert played() == ["a2", "b1"]
    Path("words_env.py").write_text(FUNCTION.replace('"wrong"', '"right"'))
    assert main(["run", "words_env.py", "--policy", "oracle", "--task", "a*"]) == 0
    assert main(["run", "words_env.py", "--policy", "oracle", "--failed-of", "last"]) == 2


def test_a_resumed_run_plays_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "words_env.py", "--policy", "oracle"]) == 0
    assert (
        main(["run", "words_env.py", "--policy", "oracle", "--failed-of", "last", "--task", "a1", "--tasks", "1"]) == 0
    )
    assert played() == ["a1"]
    assert main(["resume", "last", "--tasks", "9"]) == 0
    assert played() == ["a1", "b1"]
    assert json.loads(next(Path("runs").glob("*/*/config.json")).read_text())["environment"]


def test_other_commands_and_python_choose_tasks_by_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    main(["env", "check", "words_env.py", "--task", "a2,b2"])
    assert "words: 2 tasks (a2, b2)" in capsys.readouterr().out
    main(["run", "words_env.py", "--policy", "oracle", "--task", "b*", "--dry-run"])
    assert "tasks   2 (b1, b2)" in capsys.readouterr().out
    run = palaestra.run_sync("words_env.py", policy="oracle", task=["a1"])
    assert [group.task_id for group in run.groups] == ["a1"]
    with palaestra.Session("words_env.py", policy="oracle", task="b*") as session:
        assert [task.id for task in session.tasks()] == ["b1", "b2"]
