"""What people have said about the rollouts of one run, and the rewards that `palaestra grade` gave them, for its pages.

Both are in files of their own next to the journal. They are read again when they have changed. What people have said is
put into the run's index, so that rollouts can be filtered by it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from palaestra.rollouts.annotations import ANNOTATIONS_NAME, VERDICTS, Judgement, Judgements, read_annotations
from palaestra.rollouts.observe.intervals import mean_interval
from palaestra.rollouts.regraded import GRADES_NAME, Grade, read_grades
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_view.run_index import RunIndex, file_stamp


class Marks:
    """The judgements and new rewards of the run of `index`."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self._folder = index.path.parent
        self._stamp: tuple[JSON, ...] | None = None
        self._judgements = Judgements()
        self._grades: dict[str, Grade] = {}
        self.problem = ""
        """The reason why one of the files cannot be read; empty if they can."""

    def update(self) -> bool:
        """Read the files again if they have changed, and return whether they have."""
        stamp = tuple(file_stamp(self._folder / name) for name in (ANNOTATIONS_NAME, GRADES_NAME))
        if stamp == self._stamp:
            return False
        self.problem = ""
        try:
            self._judgements, self._grades = read_annotations(self._folder), read_grades(self._folder)
        except ConfigError as error:
            self.problem = str(error)
            self._judgements, self._grades = Judgements(), {}
        self.index.put_marks(self._rows())
        self._stamp = stamp  # last, because another thread that finds this stamp relies on what was read
        return True

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        for rollout, said in self._judgements.by_rollout.items():
            yield from ((rollout, "tag", tag) for tag in said.tags)
            yield from ((rollout, "note", note.text) for note in said.notes)
            if said.verdict:
                yield rollout, "verdict", said.verdict

    def annotated(self, rows: Sequence[Mapping[str, JSON]]) -> list[dict[str, JSON]]:
        """Return the rows of rollouts, each with its `tags`, its `verdict`, the number of its `notes`, and its new
        reward (`regraded`, None if it was not graded again)."""
        found = []
        for row in rows:
            said = self._judgements.by_rollout.get(str(row["id"])) or Judgement()
            grade = self._grades.get(str(row["id"]))
            more = {"tags": said.tags, "verdict": said.verdict, "notes": len(said.notes)}
            found.append({**row, **more, "regraded": None if grade is None else grade.reward})
        return found

    def of(self, rollout_id: str) -> dict[str, JSON]:
        """Return what the page of a rollout shows: its `judgement`, its new score (`grade`, None if it was not graded
        again), and the `verdicts` that a person can give, with their meaning."""
        said, grade = self._judgements.by_rollout.get(rollout_id), self._grades.get(rollout_id)
        return {
            "judgement": {} if said is None else said.to_dict(),
            "grade": None if grade is None else msgspec.to_builtins(grade),
            "verdicts": dict(VERDICTS),
            "problem": self.problem,
        }

    def summary(self) -> dict[str, JSON]:
        """Return what the page of the run shows: the numbers of rollouts by tag and by verdict, lines that cannot be
        read, and the mean reward of the rollouts that were graded again, before and after."""
        said = self._judgements.by_rollout.values()
        return {
            "tags": dict(Counter(tag for each in said for tag in each.tags).most_common(50)),
            "verdicts": dict(Counter(each.verdict for each in said if each.verdict).most_common()),
            "damaged": self._judgements.damaged,
            "problem": self.problem,
            "regraded": self._regraded() if self._grades else None,
        }

    def _regraded(self) -> dict[str, JSON]:
        before, after = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        changed = 0
        _, rows = self.index.rows([("regraded", "!=", "")], limit=10**9)
        for row in rows:
            if (grade := self._grades.get(row["id"])) is None:
                continue
            now, was = grade.reward, row["recorded"]
            changed += now != was
            if now is not None and was is not None:
                before[row["task"]].append(was)
                after[row["task"]].append(now)
        return {
            "rollouts": len(rows),
            "failed": sum(bool(grade.error) for grade in self._grades.values()),
            "changed": changed,
            "at": max((grade.at for grade in self._grades.values()), default=0.0),
            "before": _mean(before),
            "after": _mean(after),
        }


def _mean(tasks: Mapping[str, Sequence[float]]) -> dict[str, JSON]:
    values, interval = [value for task in tasks.values() for value in task], mean_interval([*tasks.values()])
    return {"mean": math.fsum(values) / len(values) if values else None, "interval": interval and [*interval]}
