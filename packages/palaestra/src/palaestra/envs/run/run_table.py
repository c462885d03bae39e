"""The table over several runs: how well each model did on each environment, how certain that is, and what it took.

The figures are those of `palaestra eval` (`pass_at_k.figures`), with the scores that `palaestra grade` gave. A row says
on how many of the environment's tasks it rests, because a mean over some of the tasks is not the mean over all.
"""

from __future__ import annotations

import csv
import html
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from palaestra.envs.run import pass_at_k
from palaestra.envs.run.pass_at_k import TASKS_TOTAL, chooses, chosen_of
from palaestra.envs.run.set_file import RunPlace, run_places, set_places
from palaestra.rollouts.export.csv_rows import UnixRows
from palaestra.rollouts.finished_run import Run
from palaestra.rollouts.journal.reader import JOURNAL_NAME, run_name
from palaestra.rollouts.observe.console import duration
from palaestra.rollouts.observe.intervals import in_words as interval_in_words
from palaestra.rollouts.observe.intervals import interval_of
from palaestra.rollouts.observe.last_metrics import last_metrics
from palaestra.rollouts.observe.metrics import group_size
from palaestra.rollouts.observe.score_versions import REMEDY, differ, in_words
from palaestra.rollouts.observe.status import RUNNING, RunReader
from palaestra.rollouts.observe.status_file import tasks_planned
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.printable import one_line, printable
from palaestra_slots.core.types import JSON

TASKS_PLANNED, TASKS_LEFT_OUT = "tasks_planned", "tasks_left_out"
"""The metrics of a run with the number of its tasks, and with the number of tasks that the environment refused."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """The figures of one run. A figure is None if there is none, and an interval if it cannot be computed. `k` is the
    number of rollouts per task. `tasks_scored` of `tasks` have a score; `tasks` includes those that were refused
    (`tasks_left_out`) or not played, once their number is known (`tasks_known`). `pass_k_tasks` have at least k scored
    rollouts, so that pass@k covers them. `rollouts_scored` of `rollouts` have a score, where each task counts with k
    rollouts. If the tasks are only some of the environment's (`chosen`), `tasks_total` is the number of all, or None if
    it is unknown. `cost` leaves out `unpriced_tokens`; tokens and cost leave out `uncounted` turns, for which the model
    server reported no tokens. A content filter ended `filtered` rollouts, and `asked_again` count those of which an
    earlier attempt failed at the model server or its filter. `score_versions` counts the scored rollouts by version of
    the score. A member of an evaluation set without a run has no figures."""

    environment: str
    model: str
    run: str
    state: str
    pass_1: float | None = None
    pass_1_interval: tuple[float, float] | None = None
    k: int = 0
    pass_k: float | None = None
    pass_k_interval: tuple[float, float] | None = None
    pass_k_tasks: int = 0
    mean_reward: float | None = None
    official: float | None = None
    tasks_scored: int = 0
    tasks: int = 0
    tasks_left_out: int = 0
    chosen: bool = False
    tasks_total: int | None = None
    rollouts_scored: int = 0
    rollouts: int = 0
    started_at: float = 0.0
    cost: float | None = None
    seconds: float = 0.0
    tasks_known: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unpriced_tokens: int = 0
    uncounted: int = 0
    filtered: int = 0
    asked_again: int = 0
    score_versions: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    """Why a member of an evaluation set has no run, if that is known."""


def table_rows(names: Sequence[str | Path]) -> list[TableRow]:
    """Return the rows of what the names mean, as in `run_places`. Raises `ConfigError`."""
    return list(map(_row_of, run_places(names)))


def set_rows(folder: Path) -> list[TableRow]:
    """Return a row for each member of an evaluation set, in their order. Raises `ConfigError`."""
    return list(map(_row_of, set_places(folder)))


def _row_of(place: RunPlace) -> TableRow:
    member = place.member
    given = "" if member is None else _shown_name(member.environment)
    if member is None or place.has_begun:
        row = table_row(place.folder)
        return replace(row, environment=given or row.environment)
    name, _, model = member.folder.partition("--")  # older sets have no names
    environment = given or member.name or name
    return TableRow(environment, member.model or model, str(place.folder), "not run", reason=place.reason)


def _shown_name(reference: str) -> str:
    """Return the reference of an environment that has its tasks from a folder or another library, such as `harbor:tb`;
    empty for others, whose own name says more."""
    return reference if ".py" not in reference and not {"/", ":"}.isdisjoint(reference) else ""


def _name_of(env: str, config: Mapping[str, JSON]) -> str:
    """Return the name of a run's environment, or the folder of its tasks if it has the general name of an environment
    that plays any such folder."""
    reference = _shown_name(str(config.get("environment") or ""))
    here = f"{config.get('folder', '')}/"
    return reference.removeprefix(here) or env


def table_row(folder: Path) -> TableRow:
    """Return the row of the run in this folder. Raises `ConfigError`."""
    run, status = Run(folder), RunReader(folder / JOURNAL_NAME).read()
    attempts, own = group_size(run.recording.meta.config), last_metrics(folder / "metrics.jsonl")
    found, ended = figures_of(run, run)
    played = len({*ended, *run.recording.unfinished_tasks})
    left_out = int(own.get(TASKS_LEFT_OUT, 0))
    planned = 0 if status.state == "done" else int(own.get(TASKS_PLANNED, 0)) or tasks_planned(folder)
    tasks = max(played, planned)
    total = own.get(f"eval/{TASKS_TOTAL}")
    chosen = chooses(run.recording.meta.config, tasks) and (total is None or total > tasks + left_out)
    return TableRow(
        environment=_name_of(status.env, run.recording.meta.config),
        model=status.model,
        run=str(folder),
        state=status.state,
        pass_1=found.get("pass@1"),
        pass_1_interval=interval_of(found, "pass@1"),
        k=attempts,
        pass_k=found.get(f"pass@{attempts}"),
        pass_k_interval=interval_of(found, f"pass@{attempts}"),
        pass_k_tasks=int(found.get(f"pass@{attempts}/tasks", 0)),
        mean_reward=found.get("mean_reward"),
        official=found.get("official/mean_reward"),
        tasks_scored=int(found.get("pass@1/tasks", 0)),
        tasks=tasks + left_out,
        tasks_left_out=left_out,
        chosen=chosen,
        tasks_total=int(total) if chosen and total is not None else None,
        rollouts_scored=int(found.get("scored", 0)),
        rollouts=max((tasks + left_out) * attempts, status.planned),
        started_at=status.started_at,
        cost=status.cost,
        unpriced_tokens=status.unpriced_tokens,
        seconds=status.seconds,
        tasks_known=status.state == "done" or planned > 0,
        prompt_tokens=status.prompt_tokens,
        completion_tokens=status.completion_tokens,
        uncounted=status.uncounted,
        filtered=status.filtered,
        asked_again=status.asked_again,
        score_versions=status.score_versions,
    )


def figures_of(run: Run, groups: Iterable[Group]) -> tuple[Mapping[str, JSON], set[str]]:
    """Return the metrics of an evaluation with these groups of a run, and the ids of their tasks."""
    done, tasks = list[Trajectory](), set[str]()
    for group in groups:
        tasks.add(group.task_id)
        done += map(_without_messages, group.trajectories)
    return pass_at_k.figures(done, group_size(run.recording.meta.config), tasks=len(tasks)), tasks


def _without_messages(trajectory: Trajectory) -> Trajectory:
    """Return the rollout without its messages and tokens, because a run may have very many."""
    return msgspec.structs.replace(trajectory, messages=[], turns=[], ledger=None, row=None, detail={})


def spent(folder: Path) -> float:
    """Return what the run in this folder has cost; 0 without prices."""
    return RunReader(folder / JOURNAL_NAME).read().cost or 0.0


_COLUMNS: Mapping[str, Callable[[TableRow], str]] = {
    "environment": lambda row: row.environment,
    "model": lambda row: row.model,
    "pass@1": lambda row: _figure(row.pass_1) + interval_in_words(row.pass_1_interval),
    "pass@k": lambda row: _pass_k(row),
    "mean reward": lambda row: _figure(row.mean_reward),
    "official": lambda row: _figure(row.official),
    "score version": lambda row: in_words(row.score_versions) or "-",
    "tasks scored": lambda row: _of_tasks(row),
    "rollouts scored": lambda row: _of_rollouts(row),
    "cost": lambda row: _cost(row),
    "time": lambda row: duration(row.seconds),
    "tokens": lambda row: _tokens(row),
    "state": lambda row: row.state + (f": {one_line(row.reason, 100)}" if row.reason else ""),
    "date": lambda row: _day(row) if row.started_at else "-",
    "run": lambda row: run_name(Path(row.run)),
}


def _cost(row: TableRow) -> str:
    if row.cost is None:
        return "-"
    return f"{'at least ' if row.unpriced_tokens or row.uncounted else ''}{row.cost:.4f}"


def _tokens(row: TableRow) -> str:
    tokens = row.prompt_tokens + row.completion_tokens
    if row.uncounted:
        return f"at least {tokens:,}" if tokens else "unknown"
    return f"{tokens:,}"


def _pass_k(row: TableRow) -> str:
    if row.k < 2:
        return "-"
    figure = f"{_figure(row.pass_k)}{interval_in_words(row.pass_k_interval)} k={row.k}"
    return figure + (f", only {row.pass_k_tasks} of {row.tasks} tasks" if row.pass_k_tasks < row.tasks_scored else "")


def _of_tasks(row: TableRow) -> str:
    # A run that is going on may not know how many tasks there are.
    more = " so far" if row.state == RUNNING and not row.tasks_known else ""
    return f"{row.tasks_scored} of {row.tasks}{chosen_of(row.chosen, row.tasks_total, row.tasks, '?')}{more}"


def _of_rollouts(row: TableRow) -> str:
    counts = {"filtered": row.filtered, "asked again": row.asked_again}
    marks = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{row.rollouts_scored} of {row.rollouts}{marks and f' ({marks})'}"


def _day(row: TableRow) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(row.started_at))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def cells(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns that say anything, and the cells of each row."""
    one_each = len({(row.environment, row.model) for row in rows}) == len(rows)
    empty = {
        "run": one_each,
        "cost": all(row.cost is None for row in rows),
        "official": all(row.official is None for row in rows),
        "score version": not _of_other_versions(rows),
        "date": len({_day(row) for row in rows if row.started_at}) < 2,
    }
    columns = {name: text for name, text in _COLUMNS.items() if not empty.get(name)}
    return [*columns], [[text(row) for text in columns.values()] for row in rows]


def _of_other_versions(rows: Sequence[TableRow]) -> list[str]:
    """Return the environments of which different versions of the score judged the rollouts."""
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row.environment, set()).update(row.score_versions)
    return [name for name, versions in found.items() if differ(versions)]


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
    bounds = {name: (f"{name}_low", f"{name}_high") for name in ("pass_1", "pass_k")}
    fields = [name for name in TableRow.__slots__ if not name.endswith("_interval")]
    writer = csv.DictWriter(UnixRows(text), [*fields, *bounds["pass_1"], *bounds["pass_k"]])
    writer.writeheader()
    for row in rows:
        line = {name: getattr(row, name) for name in fields} | {"score_versions": in_words(row.score_versions)}
        for name, ends in bounds.items():
            line |= zip(ends, getattr(row, f"{name}_interval") or (None, None), strict=True)
        writer.writerow(line)
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


def as_html(rows: Sequence[TableRow], links: Mapping[str, str] = {}) -> str:
    """Return one page that needs no other file. The first cell of a run links to the address that `links` has for its
    folder."""
    names, lines = cells(rows)

    def html_row(tag: str, cells: Iterable[str], link: str | None = None) -> str:
        texts = [html.escape(printable(cell)) for cell in cells]
        if link is not None:
            texts[0] = f'<a href="{html.escape(link)}">{texts[0]}</a>'
        return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"

    body = "\n".join(html_row("td", cells, links.get(row.run)) for row, cells in zip(rows, lines, strict=True))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Runs</title>'
        f"<style>{_STYLE}</style></head><body><h1>Runs</h1>\n<table><thead>{html_row('th', names)}</thead>\n"
        f"<tbody>\n{body}\n</tbody></table>\n<p>{html.escape(about(rows))}</p></body></html>\n"
    )


def about(rows: Sequence[TableRow]) -> str:
    """Return what a reader of the table needs to know, with a warning about rows that cannot be compared."""
    others = _of_other_versions(rows)
    warning = f" WARNING: different versions of the score judged the rollouts of {', '.join(others)}; {REMEDY}."
    return _ABOUT + (warning if others else "")


_ABOUT = (
    "In brackets: 95% intervals over the tasks. pass@1 and pass@k are means over the tasks, the mean reward over the "
    "scored rollouts. A task that was refused, or has fewer than k scored rollouts, is not in pass@k. Chosen tasks are "
    "some of the environment's tasks, whose number may be unknown (?). A content filter ended the filtered rollouts; "
    "those asked again failed first at the model server or its filter. Scores that palaestra grade gave replace the "
    "recorded ones."
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
