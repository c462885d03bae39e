"""Tasks from a seed: the same bytes everywhere, composed of many families, told in full."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_suites.endless_terminals.compose_tasks import AREAS, FAMILIES, HIGHEST_LEVEL, TaskSelection, generate
from palaestra_suites.endless_terminals.generated_task import GeneratedTask, from_row, read_tasks, to_line
from palaestra_suites.endless_terminals.random_stream import Stream

COUNT = len(FAMILIES)
DIGEST = "6eefc786d395cdd395ab05652129fc589b60652773c9e6b48d4090c8769916cb"
"""Of the first tasks of seed 7. It changes when a family or a wording is changed on purpose, and never otherwise."""

SCRIPT = """
import hashlib
from palaestra_suites.endless_terminals.compose_tasks import TaskSelection, generate
from palaestra_suites.endless_terminals.generated_task import to_line
print(hashlib.sha256(b"".join(map(to_line, generate(TaskSelection(7), %d)))).hexdigest())
"""


def lines(choice: TaskSelection, count: int) -> list[bytes]:
    return [to_line(task) for task in generate(choice, count)]


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_a_seed_gives_the_same_bytes_in_every_process(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": "Asia/Kolkata", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT % COUNT], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == DIGEST


def test_a_longer_file_begins_with_the_shorter_one() -> None:
    long = lines(TaskSelection(3), 12)
    assert lines(TaskSelection(3), 5) == long[:5]
    assert [to_line(task) for task in generate(TaskSelection(3), 4, first=8)] == long[8:]
    assert lines(TaskSelection(4), 5) != long[:5]
    assert len({hashlib.sha256(line).digest() for line in long}) == len(long)
    ids = {task.id for level in (1, 2) for task in generate(TaskSelection(3, levels=(level,)), 12)}
    assert len(ids) == 24


def test_there_are_many_families_in_every_area() -> None:
    assert COUNT >= 40
    assert sum(map(len, AREAS.values())) == COUNT
    asked = ["files", "text", "logs", "archives", "processes", "git", "databases", "scripts"]
    assert all(len(AREAS[area]) >= 5 for area in asked)
    assert len(AREAS["tables"]) + len(AREAS["formats"]) >= 15
    assert {task.families[0] for task in generate(TaskSelection(1), COUNT)} == {*FAMILIES}


def test_a_level_is_the_number_of_parts_and_a_part_goes_on_with_the_one_before() -> None:
    fed = 0
    for task in generate(TaskSelection(5, levels=(3, 5)), 60):
        assert task.level == len(task.families) == len(set(task.families))
        assert task.prompt.count("\n1. ") == task.prompt.count(f"\n{task.level}. ") == 1
        steps = task.prompt.split("\n")
        outputs = [check.path for check in task.final if check.path not in task.files]
        fed += any(sum(f"`{path}`" in step for step in steps) > 1 for path in outputs)
    assert fed >= 30


@pytest.mark.parametrize("seed", [0, 1])
def test_a_prompt_names_every_file_that_is_checked_and_shows_no_check(seed: int) -> None:
    for task in generate(TaskSelection(seed, levels=(1,)), COUNT):
        told = {"file-sort", "table-partition", "process-serve", "git-merge", "git-untrack"}  # by a rule, not by name
        for check in task.final:
            known = check.path in task.files or any(check.path.startswith(f"{path}/") for path in task.files)
            named = check.path in task.prompt or check.path.rpartition("/")[2] in task.prompt
            assert named or known or task.families[0] in told, (task.id, check)
        assert task.solution.strip() not in task.prompt
        assert all(task.solution.strip() not in text for text in task.files.values())


def test_what_can_be_chosen() -> None:
    only = list(generate(TaskSelection(0, levels=(2,), areas=("git",), families=("text-clean",)), 9))
    allowed = {family.name for family in AREAS["git"]} | {"text-clean"}
    assert {name for task in only for name in task.families} == allowed
    assert {task.level for task in only} == {2}
    assert all(task.needs == ["git"] for task in only if any(name.startswith("git") for name in task.families))
    alone = next(generate(TaskSelection(0, levels=(4,), families=("text-clean",)), 1))
    assert (alone.level, alone.families) == (1, ["text-clean"])
    assert {task.level for task in generate(TaskSelection(0), 100)} == {*range(1, HIGHEST_LEVEL + 1)}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (TaskSelection(levels=(6,)), "level 6"),
        (TaskSelection(families=("text-claen",)), "Did you mean text-clean"),
        (TaskSelection(areas=("gti",)), "Did you mean git"),
    ],
)
def test_what_cannot_be_chosen(choice: TaskSelection, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(generate(choice, 1))


def test_rows_go_to_a_file_and_back_and_a_bad_row_hides_no_other(tmp_path) -> None:
    tasks = list(generate(TaskSelection(9), 20))
    assert [from_row(json.loads(to_line(task))) for task in tasks] == tasks
    path = tmp_path / "tasks.jsonl"
    old = to_line(tasks[1]).replace(b"terminal-task/1", b"terminal-task/9")
    unknown = to_line(tasks[2]).replace(b'"check":', b'"chick":')
    path.write_bytes(to_line(tasks[0]) + b"{}\n\nnot json\n" + old + unknown + to_line(tasks[3]))
    read = list(read_tasks(str(path)))
    assert [task.id for task in read if isinstance(task, GeneratedTask)] == [tasks[0].id, tasks[3].id]
    problems = [str(problem) for problem in read if isinstance(problem, TaskError)]
    assert [problem[:5] for problem in problems] == ["row 2", "row 3", "row 4", "row 5"]
    assert "terminal-task/9" in problems[2]
    with raises(ConfigError):
        list(read_tasks(str(tmp_path / "absent.jsonl")))


def test_a_stream_is_fair_and_named() -> None:
    draws = [Stream("a", 1).below(6) for _ in range(3)]
    assert len(set(draws)) == 1
    stream = Stream("dice")
    counts = [0] * 6
    for _ in range(6000):
        counts[stream.below(6)] += 1
    assert all(850 < count < 1150 for count in counts)
    assert sorted(stream.shuffled(range(50))) == list(range(50))
    assert stream.child("x").below(10**9) == Stream("dice", "x").below(10**9)
    for wrong in (lambda: stream.below(0), lambda: stream.sample([1], 2)):
        with pytest.raises(ValueError):
            wrong()
