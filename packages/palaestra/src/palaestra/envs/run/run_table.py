"""The table over several runs: how well each model did on each environment, how certain that is, and what it took.

The figures are those of `palaestra eval` (`pass_at_k.figures`), with the scores that `palaestra grade` gave. A row says
on how many of the environment's tasks it rests, because a mean over some of the tasks is not the mean over all.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from palaestra.envs.run import pass_at_k
from palaestra.rollouts.finished_run import Run, last_metrics
from palaestra.rollouts.journal.reader import JOURNAL_NAME, find_run
from palaestra.rollouts.observe.console import duration
from palaestra.rollouts.observe.intervals import in_words
from palaestra.rollouts.observe.metrics import group_size
from palaestra.rollouts.observe.status import RunReader
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.printable import printable
from palaestra_slots.core.types import JSON

TASKS_PLANNED, TASKS_LEFT_OUT = "tasks_planned", "tasks_left_out"
"""The metrics of a run with the number of its tasks, and with the number of tasks that the environment refused."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """The figures of one run. A figure is None if there is none, and an interval if it cannot be computed. `k` is the
    number of rollouts per task. `tasks_scored` of `tasks` have a score; `tasks` includes those that were refused
    (`tasks_left_out`) or not played."""

    environment: str
    model: str
    run: str
    state: str
    pass_1: float | None
    pass_1_interval: tuple[float, float] | None
    k: int
    pass_k: float | None
    mean_reward: float | None
    official: float | None
    tasks_scored: int
    tasks: int
    tasks_left_out: int
    cost: float | None
    seconds: float
    prompt_tokens: int
    completion_tokens: int


def find_runs(names: Sequence[str | Path]) -> list[Path]:
    """Return the folders of the runs that the names mean: a run, as in `find_run`, or a folder with runs below it, in
    the order of their paths. Raises `ConfigError`."""
    found: dict[Path, None] = {}
    for name in names:
        path = find_run(name)
        runs = [path.parent] if path.is_file() else [path]
        if path.is_dir() and not (path / JOURNAL_NAME).is_file():
            runs = sorted(each.parent for depth in ("*", "*/*") for each in path.glob(f"{depth}/{JOURNAL_NAME}"))
        if not runs:
            raise ConfigError(f"{path} has no runs: neither it nor a folder below it has a {JOURNAL_NAME}")
        found.update(dict.fromkeys(runs))
    return [*found]


def table_row(folder: Path) -> TableRow:
    """Return the row of the run in this folder. Raises `ConfigError`."""
    run, status = Run(folder), RunReader(folder / JOURNAL_NAME).read()
    attempts, own = group_size(run.recording.meta.config), last_metrics(folder / "metrics.jsonl")
    found, ended = figures_of(run, run.graded_groups())
    played = len({*ended, *run.recording.unfinished_tasks})
    left_out = int(own.get(TASKS_LEFT_OUT, 0))
    planned = 0 if status.state == "done" else int(own.get(TASKS_PLANNED, 0))
    low, high = found.get("pass@1/low"), found.get("pass@1/high")
    slots = own.get("slots/cost")
    tokens_cost = None if status.tokens_unknown else status.cost
    return TableRow(
        environment=status.env,
        model=status.model,
        run=str(folder),
        state=status.state,
        pass_1=found.get("pass@1"),
        pass_1_interval=None if low is None or high is None else (low, high),
        k=attempts,
        pass_k=found.get(f"pass@{attempts}"),
        mean_reward=found.get("mean_reward"),
        official=found.get("official/mean_reward"),
        tasks_scored=int(found.get("pass@1/tasks", 0)),
        tasks=max(played, planned) + left_out,
        tasks_left_out=left_out,
        cost=tokens_cost if slots is None else (tokens_cost or 0.0) + slots,
        seconds=max(0.0, status.last_at - status.started_at - status.paused_s),
        prompt_tokens=status.prompt_tokens,
        completion_tokens=status.completion_tokens,
    )


def figures_of(run: Run, groups: Iterable[Group]) -> tuple[Mapping[str, JSON], set[str]]:
    """Return the metrics of an evaluation with these groups of a run, and the ids of their tasks."""
    done, tasks = list[Trajectory](), set[str]()
    for group in groups:
        tasks.add(group.task_id)
        done += map(_result, group.trajectories)
    return pass_at_k.figures(done, group_size(run.recording.meta.config), tasks=len(tasks)), tasks


def _result(trajectory: Trajectory) -> Trajectory:
    """Return the rollout without its messages and tokens, because a run may have very many."""
    return msgspec.structs.replace(trajectory, messages=[], turns=[], ledger=None, row=None, detail={})


def spent(folder: Path) -> float:
    """Return what the run in this folder has cost; 0 without prices."""
    slots = last_metrics(folder / "metrics.jsonl").get("slots/cost", 0.0)
    return (RunReader(folder / JOURNAL_NAME).read().cost or 0.0) + slots


_COLUMNS: Mapping[str, Callable[[TableRow], str]] = {
    "environment": lambda row: row.environment,
    "model": lambda row: row.model,
    "pass@1": lambda row: _figure(row.pass_1) + in_words(row.pass_1_interval),
    "pass@k": lambda row: "-" if row.pass_k is None else f"{row.pass_k:.3f} (k={row.k})",
    "mean reward": lambda row: _figure(row.mean_reward),
    "official": lambda row: _figure(row.official),
    "tasks scored": lambda row: f"{row.tasks_scored} of {row.tasks}",
    "cost": lambda row: "-" if row.cost is None else f"{row.cost:.4f}",
    "time": lambda row: duration(row.seconds),
    "tokens": lambda row: f"{row.prompt_tokens + row.completion_tokens:,}",
    "state": lambda row: row.state,
    "run": lambda row: Path(row.run).name,
}


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def cells(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns that say anything, and the cells of each row."""
    one_each = len({(row.environment, row.model) for row in rows}) == len(rows)
    empty = {
        "run": one_each,
        "cost": all(row.cost is None for row in rows),
        "official": all(row.official is None for row in rows),
    }
    columns = {name: text for name, text in _COLUMNS.items() if not empty.get(name)}
    return [*columns], [[text(row) for text in columns.values()] for row in rows]


def as_text(rows: Sequence[TableRow]) -> str:
    names, lines = cells(rows)
    table = [names, *([printable(cell) for cell in line] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in table
    )


def as_csv(rows: Sequence[TableRow]) -> str:
    """Return one line per row, with the exact figures."""
    text = io.StringIO()
    fields = [name for name in TableRow.__slots__ if name != "pass_1_interval"]
    writer = csv.DictWriter(text, [*fields, "pass_1_low", "pass_1_high"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        low, high = row.pass_1_interval or (None, None)
        writer.writerow({name: getattr(row, name) for name in fields} | {"pass_1_low": low, "pass_1_high": high})
    return text.getvalue()


def as_markdown(rows: Sequence[TableRow]) -> str:
    names, lines = cells(rows)
    table = [names, ["---"] * len(names), *([_in_markdown(cell) for cell in line] for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def _in_markdown(cell: str) -> str:
    return "".join(f"\\{each}" if each in "\\|*_`<[" else each for each in " ".join(cell.split()))


def as_latex(rows: Sequence[TableRow]) -> str:
    """Return a `tabular` that needs no package."""
    names, lines = cells(rows)
    body = [" & ".join(map(_in_latex, line)) + r" \\" for line in (names, *lines)]
    head = [rf"\begin{{tabular}}{{{'l' * len(names)}}}", r"\hline", body[0], r"\hline"]
    return "\n".join([*head, *body[1:], r"\hline", r"\end{tabular}", ""])


_LATEX = {each: f"\\{each}" for each in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def _in_latex(cell: str) -> str:
    return "".join(_LATEX.get(each, each) for each in " ".join(cell.split()))


_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2em; }
table { border-collapse: collapse; } th, td { padding: .3em .8em; text-align: left; border-bottom: 1px solid #bbb; }
td { font-variant-numeric: tabular-nums; } .less { color: #a33; }"""


def as_html(rows: Sequence[TableRow]) -> str:
    """Return one page that needs no other file."""
    names, lines = cells(rows)

    def line(tag: str, cells: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(printable(cell))}</{tag}>' for cell in cells)}</tr>"

    body = "\n".join(line("td", cells) for cells in lines)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Runs</title>'
        f"<style>{_STYLE}</style></head><body><h1>Runs</h1>\n<table><thead>{line('th', names)}</thead>\n"
        f"<tbody>\n{body}\n</tbody></table>\n<p>{html.escape(ABOUT)}</p></body></html>\n"
    )


ABOUT = (
    "In brackets: 95% intervals over the tasks. Scores that palaestra grade gave replace the recorded ones. A task "
    "that was refused, or has no scored rollout, is in no mean."
)

FORMATS: Mapping[str, Callable[[Sequence[TableRow]], str]] = {
    "text": as_text,
    "html": as_html,
    "csv": as_csv,
    "markdown": as_markdown,
    "latex": as_latex,
}


def as_json(row: TableRow) -> dict[str, JSON]:
    return asdict(row)
