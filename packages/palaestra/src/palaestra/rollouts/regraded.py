"""The rewards that `palaestra grade` gave to the rollouts of a finished run, next to the recorded ones.

They are in a file of their own in the run's folder, so the journal stays as it was. The file is append-only; the latest
line of a rollout counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from palaestra.rollouts.annotations import append_lines, appended_lines
from palaestra.rollouts.journal.journal import encoded
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.io.durable_files import UNREADABLE
from palaestra_slots.core.types import Label

GRADES_NAME = "grades.jsonl"
GRADE_SCHEMA = "palaestra.grade/1"


class Grade(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line: the new score of a rollout. `before` is the recorded reward. `reward` is None if the check failed, and
    `error` then has the reason. `at` is in seconds since the epoch."""

    schema: str
    at: float
    rollout_id: str
    before: float | None = None
    reward: float | None = None
    official: float | None = None
    labels: list[Label] = []
    metrics: dict[str, float] = {}
    error: str = ""


_lines = msgspec.json.Decoder(Grade)


def write_grade(folder: Path, grade: Grade) -> None:
    """Append a new score to the file of the run in this folder. Raises `ConfigError` and `DiskError`."""
    append_lines(folder / GRADES_NAME, encoded(grade) + b"\n")


def read_grades(folder: Path) -> dict[str, Grade]:
    """Return the latest new score of each rollout. Lines that cannot be read are left out. Raises `ConfigError` if the
    file cannot be read."""
    found: dict[str, Grade] = {}
    for line in appended_lines(folder / GRADES_NAME):
        try:
            grade = _lines.decode(line)
        except UNREADABLE:
            continue
        if grade.schema == GRADE_SCHEMA:
            found[grade.rollout_id] = grade
    return found


def graded(group: Group, grades: Mapping[str, Grade]) -> Group:
    """Return the group with the new scores of its rollouts. A rollout whose check failed keeps its recorded score."""
    new = {each.rollout_id: grades[each.rollout_id] for each in group.trajectories if each.rollout_id in grades}
    if not any(each.reward is not None for each in new.values()):
        return group
    replaced = (_with_grade(each, new.get(each.rollout_id)) for each in group.trajectories)
    return msgspec.structs.replace(group, trajectories=list(replaced))


def _with_grade(trajectory: Trajectory, grade: Grade | None) -> Trajectory:
    if grade is None or grade.reward is None:
        return trajectory
    return msgspec.structs.replace(
        trajectory, reward=grade.reward, official=grade.official, labels=grade.labels, metrics=grade.metrics
    )
