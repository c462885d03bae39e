"""Solutions that leave no content: they remove files, or make directories or empty files. Some attacks do the same, and
more, so what these earn is no fault of the score."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra_audit.cheats.proof import Proof, State, check_environment

pytestmark = [pytest.mark.slots, pytest.mark.slow]

TASK = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def chores():
    yield Task(id="a", prompt={prompt!r}, files={files!r}, solution={solution!r}, grading={grading!r})

@chores.score
async def right(task, sandbox):
    return {score}
"""
ATTACKS = ["device-answer", "no-workspace", "one-file", "link-through-process", "named-files", "named-echoes"]
OVER_SOLUTION = "every-number"
KEPT = {"keep.txt": "y\n"}
GONE, STAYS = "await sandbox.stat('run.log') is None", "await sandbox.read_text('keep.txt', missing='') == 'y\\n'"


def checked(
    folder: Path, prompt: str, files: dict[str, str], solution: str, score: str, grading: str = "sealed"
) -> Proof:
    file = folder / "chores_env.py"
    file.write_text(TASK.format(prompt=prompt, files=files, solution=solution, score=score, grading=grading))
    return check_environment(str(file), [], tasks=None, only=[*ATTACKS, OVER_SOLUTION], quiet=True)


@pytest.mark.parametrize(
    ("prompt", "files", "solution", "score", "too_much"),
    [
        ("Delete run.log.", {"run.log": "x\n"}, "rm run.log", GONE, True),
        ("Delete run.log.", {"run.log": ""}, "rm run.log", GONE, True),
        ("Delete the directory run.log.", {"run.log/a": "x\n"}, "rm -r run.log", GONE, True),
        ("Delete run.log.", {"run.log": "x\n"}, "rm run.log", f"{GONE} and {STAYS}", True),
        ("Delete all logs.", {"run.log": "x\n"}, "rm run.log", f"{GONE} and {STAYS}", False),
        ("Create an empty file b.txt.", {}, "touch b.txt", "await sandbox.read_text('b.txt', missing='-') == ''", True),
        ("Create a directory named out.", {}, "mkdir out", "(await sandbox.stat('out') or task).kind == 'dir'", False),
    ],
)
def test_attacks_that_do_the_work_are_no_failure(
    tmp_path: Path, prompt: str, files: dict[str, str], solution: str, score: str, too_much: bool
) -> None:
    proof = checked(tmp_path, prompt, {**files, **KEPT}, solution, score)
    assert proof.holds, [line for line in proof.lines if not line.ok]
    earned = [line for line in proof.lines if line.policy in ATTACKS and line.rewards == (1.0,)]
    assert all(line.state is State.NOT_TESTED for line in earned)
    assert bool(earned) == too_much
    assert any("also do what the reference solution does" in each for each in proof.warnings) == too_much


@pytest.mark.parametrize(
    ("prompt", "files", "solution", "score", "paid"),
    [
        # Only one of two files is looked for.
        ("Delete a.log and the other log.", {"a.log": "x\n", "b.log": "x\n"}, "rm a.log b.log",
         "await sandbox.stat('a.log') is None", "device-answer"),
        ("Create an empty file b.txt.", {}, "touch b.txt", "await sandbox.stat('b.txt') is not None", "named-echoes"),
        # The solution leaves content beside what it removes.
        ("Rename a.txt to b.txt.", {"a.txt": "hello\n"}, "mv a.txt b.txt", "await sandbox.stat('b.txt') is not None",
         "named-files"),
    ],
)  # fmt: skip
def test_attacks_that_leave_something_undone_fail(
    tmp_path: Path, prompt: str, files: dict[str, str], solution: str, score: str, paid: str
) -> None:
    proof = checked(tmp_path, prompt, {**files, **KEPT}, solution, score)
    assert paid in [line.policy for line in proof.lines if line.state is State.OPEN]


def test_work_that_is_graded_in_the_agents_slot_is_seen_too(tmp_path: Path) -> None:
    files = {"run.log": "x\n", **KEPT}
    proof = checked(tmp_path, "Delete run.log.", files, "rm run.log", GONE, "live")
    assert proof.holds, [line for line in proof.lines if not line.ok]
