"""The formats `table` and `markdown`: one line per group of rollouts of a task, for spreadsheets and web pages.

The tables contain no intervals or estimates. Invariant: a mean covers scored rollouts only and is shown with their
number, so that a failed sandbox never looks like a failed agent.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO

from palaestra.core.printable import one_line, printable
from palaestra.rollouts.export.exporter import ExportMeta, ExportReport
from palaestra.rollouts.records import Group

COLUMNS = ("task", "rollouts", "scored", "mean", "best", "rewards", "outcomes", "error")
_ERROR_CHARS = 200


@dataclass(slots=True)
class _Line:
    """One line, with the `rewards` and `outcomes` of a group's rollouts. The line of totals (`total`) does not list the
    rewards one by one."""

    task: str
    rewards: list[float]
    outcomes: Counter[str]
    error: str = ""
    total: bool = False

    def cells(self) -> list[str]:
        """Return the line's cells as text, in the order of `COLUMNS`."""
        return [
            self.task,
            str(self.outcomes.total()),
            str(len(self.rewards)),
            _number(math.fsum(self.rewards) / len(self.rewards)) if self.rewards else "",
            _number(max(self.rewards)) if self.rewards else "",
            "" if self.total else " ".join(map(_number, self.rewards)),
            " ".join(f"{name}:{count}" for name, count in self.outcomes.most_common()),
            self.error,
        ]


class TableExporter:
    """Comma-separated values with a header line, and a last line `TOTAL` over all rollouts."""

    name = "table"
    ending = ".csv"
    everything = True

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the table."""
        report = ExportReport()
        text = io.TextIOWrapper(out, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(line.cells() for line in _lines(groups, meta, report))
        text.detach()
        return report


class MarkdownExporter:
    """The table in Markdown."""

    name = "markdown"
    ending = ".md"
    everything = True

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the table."""
        report = ExportReport()
        right = ("rollouts", "scored", "mean", "best")
        rules = ["---:" if column in right else "---" for column in COLUMNS]
        for cells in [COLUMNS, rules, *(map(_cell, line.cells()) for line in _lines(groups, meta, report))]:
            out.write(f"| {' | '.join(cells)} |\n".encode(errors="backslashreplace"))
        return report


def _lines(groups: Iterable[Group], meta: ExportMeta, report: ExportReport) -> Iterator[_Line]:
    total = _Line("TOTAL", [], Counter(), total=True)
    for group in groups:
        chosen = list(report.chosen(group, meta))
        errors = [group.error, *(trajectory.error for trajectory in chosen if not trajectory.scored)]
        line = _Line(
            task=group.task_id,
            rewards=[trajectory.reward for trajectory in chosen if trajectory.reward is not None],
            outcomes=Counter(trajectory.outcome.value for trajectory in chosen),
            error=one_line(next(filter(None, errors), ""), _ERROR_CHARS),
        )
        total.rewards += line.rewards
        total.outcomes += line.outcomes
        report.records += 1
        report.rollouts += len(chosen)
        yield line
    yield total


def _number(value: float) -> str:
    """Return the number with at most six significant digits, without an exponent for usual scores."""
    return f"{value:.6g}"


def _cell(text: str) -> str:
    return printable(text).replace("\n", " ").replace("\\", "\\\\").replace("|", "\\|")
