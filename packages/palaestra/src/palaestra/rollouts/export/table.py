"""The formats `table` and `markdown`: one line per group of rollouts of a task, for spreadsheets and web pages.

The tables contain no intervals or estimates. Invariant: a mean covers scored rollouts only and is shown with their
number, so that a failed sandbox never looks like a failed agent.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from palaestra.rollouts.export.csv_rows import UnixRows
from palaestra.rollouts.export.exporter import ExportMeta, ExportReport
from palaestra.rollouts.records import Group
from palaestra_slots.core.printable import one_line, printable

COLUMNS = ("task", "rollouts", "scored", "mean", "best", "official", "rewards", "labels", "outcomes", "error")
_ERROR_CHARS = 200


@dataclass(slots=True)
class _Line:
    """One line, with the `rewards` and `outcomes` of a group's rollouts. `officials` are the official verdicts of the
    scored rollouts; they are shown if a rollout has one of its own (`judged`). The line of totals (`total`) does not
    list the rewards one by one."""

    task: str
    rewards: list[float]
    outcomes: Counter[str]
    officials: list[float]
    labels: Counter[str]
    error: str = ""
    judged: bool = False
    total: bool = False

    def cells(self) -> list[str]:
        """Return the line's cells as text, in the order of `COLUMNS`."""
        return [
            self.task,
            str(self.outcomes.total()),
            str(len(self.rewards)),
            _mean(self.rewards),
            _six_digits(max(self.rewards)) if self.rewards else "",
            _mean(self.officials) if self.judged else "",
            "" if self.total else " ".join(map(_six_digits, self.rewards)),
            _counts(self.labels),
            _counts(self.outcomes),
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
        # Lone surrogates, which models may write, are escaped: they must not end the export.
        text = io.TextIOWrapper(out, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
        writer = csv.writer(UnixRows(text))
        writer.writerow(COLUMNS)
        writer.writerows(line.cells() for line in _table_lines(groups, meta, report))
        # Otherwise the wrapper would close the caller's file when it is deleted.
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
        right = ("rollouts", "scored", "mean", "best", "official")
        rules = ["---:" if column in right else "---" for column in COLUMNS]
        for cells in [COLUMNS, rules, *(map(_cell, line.cells()) for line in _table_lines(groups, meta, report))]:
            out.write(f"| {' | '.join(cells)} |\n".encode(errors="backslashreplace"))
        return report


def _table_lines(groups: Iterable[Group], meta: ExportMeta, report: ExportReport) -> Iterator[_Line]:
    total = _Line("TOTAL", [], Counter(), [], Counter(), total=True)
    for group in groups:
        chosen = list(report.chosen(group, meta))
        # The error of a group comes first: it is usually the cause of those of its rollouts.
        errors = [group.error, *(trajectory.error for trajectory in chosen if not trajectory.scored)]
        scored = [each for each in chosen if each.scored]
        line = _Line(
            task=group.task_id,
            rewards=[trajectory.reward for trajectory in chosen if trajectory.reward is not None],
            outcomes=Counter(trajectory.outcome.value for trajectory in chosen),
            officials=[each.official_reward or 0.0 for each in scored],
            judged=any(each.official is not None for each in scored),
            labels=Counter(name for each in chosen for name in {label.name for label in each.labels}),
            error=one_line(next(filter(None, errors), ""), _ERROR_CHARS),
        )
        total.rewards += line.rewards
        total.outcomes += line.outcomes
        total.officials += line.officials
        total.labels += line.labels
        total.judged |= line.judged
        report.records += 1
        report.rollouts += len(chosen)
        yield line
    yield total


def _mean(values: Sequence[float]) -> str:
    return _six_digits(math.fsum(values) / len(values)) if values else ""


def _counts(counted: Counter[str]) -> str:
    return " ".join(f"{name}:{count}" for name, count in counted.most_common())


def _six_digits(value: float) -> str:
    """Return the number with at most six significant digits, without an exponent for usual scores."""
    return f"{value:.6g}"


def _cell(text: str) -> str:
    return printable(text).replace("\n", " ").replace("\\", "\\\\").replace("|", "\\|")
