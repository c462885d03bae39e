"""The scores that `palaestra grade` gave to the rollouts of a run, next to the recorded ones.

They are in a file of their own in the run's folder, so the journal stays as it was. Invariants: the file is replaced as
a whole, so readers see all scores of a regrade or none of them; a rollout whose check failed keeps its earlier score.
Readers of a run get the new scores from `Recording`, which applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from palaestra.rollouts.annotations import appended_lines
from palaestra.rollouts.journal.journal import encoded
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.io.durable_files import UNREADABLE, replaced, writing
from palaestra_slots.core.types import Label

GRADES_NAME = "grades.jsonl"
GRADE_SCHEMA = "palaestra.grade/1"


class Grade(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line: the new score of a rollout. `before` is the recorded reward. If the latest check failed, `error` has
    the reason, and `reward` and the other fields are from an earlier one; None if there is none. `at` is in seconds
    since the epoch. `version` is the hash of the environment's file that gave the score, with the settings
    of the command if it had any; empty if the environment is not in a file."""

    schema: str
    at: float
    rollout_id: str
    before: float | None = None
    reward: float | None = None
    official: float | None = None
    labels: list[Label] = []
    metrics: dict[str, float] = {}
    version: str = ""
    error: str = ""


_lines = msgspec.json.Decoder(Grade)


def write_grades(folder: Path, grades: Iterable[Grade]) -> None:
    """Replace the file of the run in this folder: its earlier scores with these over them. Raises `ConfigError` and
    `DiskError`."""
    found, path = read_grades(folder), folder / GRADES_NAME
    for grade in grades:
        _keep_grade(found, grade)
    with writing(path), replaced(path) as file:
        file.writelines(encoded(each) + b"\n" for each in found.values())


def read_grades(folder: Path) -> dict[str, Grade]:
    """Return the new score of each rollout. Lines that cannot be read are left out. Raises `ConfigError` if the file
    cannot be read."""
    found: dict[str, Grade] = {}
    for line in appended_lines(folder / GRADES_NAME):
        try:
            grade = _lines.decode(line)
        except UNREADABLE:
            continue
        if grade.schema == GRADE_SCHEMA:
            _keep_grade(found, grade)
    return found


def _keep_grade(found: dict[str, Grade], grade: Grade) -> None:
    earlier = found.get(grade.rollout_id)
    if grade.reward is None and earlier is not None:
        grade = msgspec.structs.replace(earlier, error=grade.error)
    found[grade.rollout_id] = grade


def graded(group: Group, grades: Mapping[str, Grade]) -> Group:
    """Return the group with the new scores of its rollouts, where there are any."""
    if not grades:
        return group
    return msgspec.structs.replace(group, trajectories=[with_grade(each, grades) for each in group.trajectories])


def with_grade(trajectory: Trajectory, grades: Mapping[str, Grade]) -> Trajectory:
    """Return the rollout with its new score, if it has one."""
    grade = grades.get(trajectory.rollout_id)
    if grade is None or grade.reward is None:
        return trajectory
    return msgspec.structs.replace(
        trajectory, reward=grade.reward, official=grade.official, labels=grade.labels, metrics=grade.metrics
    )
