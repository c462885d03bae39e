"""The list of runs, and one run with its rollouts, which can be filtered and sorted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from datetime import datetime
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static

from palaestra.core.errors import ConfigError
from palaestra.core.exits import plural
from palaestra.core.types import JSON
from palaestra.viewer.filter_words import filter_text, parse_filter
from palaestra.viewer.forks import fork_of
from palaestra.viewer.overview import overview
from palaestra.viewer.run_index import FIELDS, Condition
from palaestra.viewer.runs import OpenRuns
from palaestra.viewer.summary import run_summary
from palaestra.viewer.token_texts import TokenTexts
from palaestra.viewer.tui.rollout_screen import RolloutList, RolloutScreen
from palaestra.viewer.tui.safe_text import line
from palaestra.viewer.tui.view_screen import Table, ViewScreen, figure, interval, reward_text

PAGE = 200
_SORTS = ("", "reward", "official", "outcome", "turns", "tokens", "seconds", "errors")


class RunsScreen(ViewScreen):
    """All runs, one a row."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "open", show=True)]

    def __init__(self, runs: OpenRuns, texts: TokenTexts) -> None:
        super().__init__()
        self._runs, self._texts = runs, texts

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Static(classes="path")
        yield Static(classes="note")
        table: Table = DataTable(cursor_type="row", zebra_stripes=True, fixed_columns=1)
        table.add_columns(
            "run", "reward", "state", "scored", "started", "id", "model", "official", "outcomes", "labels"
        )
        yield table
        yield Footer()

    def on_mount(self) -> None:
        """Read the runs."""
        self.show_path("runs")
        self.reload()

    def follows(self, changed: Set[str]) -> bool:
        """Follow every run."""
        return True

    async def load(self) -> None:
        """Show a row for each run."""
        found = [await asyncio.to_thread(run_summary, self._runs[name], name) for name in list(self._runs)]
        table = self.query_one(DataTable)
        kept = table.cursor_row
        table.clear()
        for run in found:
            table.add_row(*_run_cells(run, fork_of(self._runs[run["name"]])), key=run["name"])
        table.move_cursor(row=kept)
        notes = [plural(len(found), "run"), *(f"{name}: {why}" for name, why in self._runs.problems.items())]
        notes += [f"{plural(self._runs.more, 'older run')} not listed"] if self._runs.more else []
        self.query_one(".note", Static).update(line("; ".join(notes), "dim", most=400))

    @on(DataTable.RowSelected)
    def open(self, event: DataTable.RowSelected) -> None:
        """Open a run."""
        if event.row_key.value is not None:
            self.app.push_screen(RunScreen(self._runs, self._texts, event.row_key.value))


def _run_cells(run: dict[str, JSON], fork: dict[str, JSON] | None) -> list[Text]:
    state = (
        run["state"]
        if run["state"] != "running" or not run["totals"]["flying"]
        else f"running, {run['totals']['flying']}"
    )
    return [
        line(f"{'⑂ ' if fork else ''}{run['env'] or run['name']}", "bold", 40),
        Text(interval(run["reward"])),
        line(state, "cyan" if run["state"] == "running" else ""),
        Text(f"{run['scored']:,} of {run['planned']:,}"),
        Text(_time(run["started_at"])),
        line(run["name"] + (f", turn {fork['turn']} of {fork['rollout_id']}" if fork else ""), "dim", 80),
        line(run["model"], most=40),
        Text(interval(run["official"]) + (f", {run['differs']} differ" if run["differs"] else "")),
        line(_counts(run["outcomes"]), most=80),
        line(_counts(run["labels"]), "yellow", 80),
    ]


def _time(at: float) -> str:
    try:
        return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M") if at > 0 else ""
    except (OverflowError, ValueError, OSError):
        return ""  # a damaged journal


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in found.items())


class RunScreen(ViewScreen):
    """One run: its figures, what went wrong, and its rollouts."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select", "open"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("o", "sort", "sort"),
        Binding("O", "reverse", "reverse", key_display="O"),
        Binding("x", "clear", "clear filter", show=False),
    ]
    HELP_LINES = (
        "A filter has words such as:",
        "  reward<1 outcome:max_turns     label=tests_edited",
        "  differs    reward=none blame=sandbox    metric.NAME>=0.5",
        "  verdict=hack tag:slow          parser (a word in the texts)",
        f"Fields: {', '.join(FIELDS)}, and the environment's criteria",
        "A click on the head of a column sorts by it.",
    )

    def __init__(self, runs: OpenRuns, texts: TokenTexts, name: str) -> None:
        super().__init__()
        self._runs, self._texts, self._run = runs, texts, name
        self._where: Sequence[Condition] = ()
        self._sort, self._descending = "", False
        self._rows: list[dict[str, JSON]] = []
        self._total = 0
        self._columns: Sequence[tuple[str, str]] = ()
        self._criteria: Sequence[str] = ()

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Static(classes="path")
        yield Static(classes="head")
        yield Input(placeholder="reward<1 outcome:max_turns task:words; enter filters, esc leaves", id="filter")
        yield Static(classes="note")
        table: Table = DataTable(cursor_type="row", zebra_stripes=True, fixed_columns=1)
        yield table
        yield Footer()

    def on_mount(self) -> None:
        """Read the run."""
        self.show_path("runs", self._run)
        self.query_one(DataTable).focus()
        self.reload()

    def follows(self, changed: Set[str]) -> bool:
        """Follow the run."""
        return self._run in changed

    async def load(self) -> None:
        """Show the figures and as many rollouts as before."""
        index = self._runs[self._run]
        summary = await asyncio.to_thread(run_summary, index, self._run)
        notes = await asyncio.to_thread(overview, index)
        self.query_one(".head", Static).update(_run_head(summary, [*notes["causes"], *notes["verdicts"]]))
        limit = max(PAGE, len(self._rows))
        total, rows = await asyncio.to_thread(self._read, 0, limit)
        table = self.query_one(DataTable)
        kept = self._rows[table.cursor_row]["id"] if table.cursor_row < len(self._rows) else ""
        self._total, self._rows = total, rows
        self._criteria = list(summary["criteria"])
        self._columns = _columns(summary, self._runs.marks(self._run).summary())
        if [each.value for each in table.columns] != [key for _, key in self._columns]:
            table.clear(columns=True)
            for label, key in self._columns:
                table.add_column(label, key=key)
        table.clear()
        self._add(rows)
        place = next((place for place, row in enumerate(rows) if row["id"] == kept), 0)
        table.move_cursor(row=place)
        self._describe()

    def _read(self, offset: int, limit: int) -> tuple[int, list[dict[str, JSON]]]:
        index = self._runs[self._run]
        total, rows = index.rows(self._where, sort=self._sort, descending=self._descending, offset=offset, limit=limit)
        return total, self._runs.marks(self._run).annotated(rows)

    def _add(self, rows: Sequence[dict[str, JSON]]) -> None:
        table = self.query_one(DataTable)
        for row in rows:
            cells = _rollout_cells(row)
            table.add_row(*(cells[key] for _, key in self._columns))

    def _describe(self) -> None:
        words = [plural(self._total, "rollout")]
        words += [f"filter: {filter_text(self._where)}"] if self._where else []
        words += [f"sorted by {self._sort} {'↓' if self._descending else '↑'}"] if self._sort else []
        self.query_one(".note", Static).update(line("; ".join(words), "dim"))

    @on(DataTable.RowHighlighted)
    async def more(self, event: DataTable.RowHighlighted) -> None:
        """Read the next rollouts when the reader comes to the end of those that are listed."""
        if event.cursor_row >= len(self._rows) - 20 and len(self._rows) < self._total:
            _, rows = await asyncio.to_thread(self._read, len(self._rows), PAGE)
            self._rows = [*self._rows, *rows]
            self._add(rows)

    @on(DataTable.RowSelected)
    def open(self, event: DataTable.RowSelected) -> None:
        """Open a rollout."""
        if event.cursor_row < len(self._rows):
            rollout_id = str(self._rows[event.cursor_row]["id"])
            listing = RolloutList(self._where, self._sort, self._descending, event.cursor_row)
            self.app.push_screen(RolloutScreen(self._runs, self._texts, self._run, rollout_id, listing))

    @on(DataTable.HeaderSelected)
    def sort_by(self, event: DataTable.HeaderSelected) -> None:
        """Sort by a column, and the other way round when it is chosen again."""
        key = str(event.column_key.value)
        if key in FIELDS:
            self._descending = not self._descending if self._sort == key else False
            self._sort = key
            self._restart()

    def action_sort(self) -> None:
        """Sort by the next field."""
        self._sort = _SORTS[(_SORTS.index(self._sort) + 1) % len(_SORTS)] if self._sort in _SORTS else ""
        self._restart()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._sort, self._descending = self._sort or "index", not self._descending
        self._restart()

    def action_filter(self) -> None:
        """Open the field for the filter."""
        field = self.query_one(Input)
        field.value = filter_text(self._where)
        field.add_class("on")
        field.focus()

    def action_clear(self) -> None:
        """Show all rollouts again."""
        self._where = ()
        self._restart()

    def action_back(self) -> None:
        """Leave the field, or go to the runs."""
        field = self.query_one(Input)
        if field.has_class("on"):
            self._leave(field)
        else:
            super().action_back()

    @on(Input.Submitted)
    def filtered(self, event: Input.Submitted) -> None:
        """Filter the rollouts."""
        try:
            where = parse_filter(event.value, self._criteria)
            self._runs[self._run].rows(where, limit=1)
        except ConfigError as error:
            self.show_note(str(error))
            return
        self._where = where
        self._leave(event.input)
        self._restart()

    def _restart(self) -> None:
        """Read the rollouts again, from the first."""
        self._rows = []
        self.reload()

    def _leave(self, field: Input) -> None:
        field.remove_class("on")
        self.query_one(DataTable).focus()


def _columns(run: dict[str, JSON], judged: dict[str, JSON]) -> list[tuple[str, str]]:
    """Return the label and the field of each column. A column without any value is left out."""
    said = bool(judged["tags"] or judged["verdicts"])
    return [
        ("task", "task"),
        ("#", "index"),
        ("reward", "reward"),
        *([("again", "regraded")] if judged["regraded"] else []),
        *([("judged", "verdict")] if said else []),
        *([("official", "official")] if run["official"] else []),
        ("outcome", "outcome"),
        *([("labels", "label")] if run["labels"] else []),
        ("turns", "turns"),
        ("calls", "calls"),
        ("failed", "errors"),
        ("exit≠0", "exits"),
        ("tokens", "tokens"),
        ("time", "seconds"),
        ("last reply or error", "answer"),
    ]


def _rollout_cells(row: dict[str, JSON]) -> dict[str, Text]:
    blame = f" {row['blame']}" if row["blame"] and row["outcome"] != "natural" else ""
    return {
        "task": line(row["task"], most=30),
        "index": Text(str(row["position"])),
        "reward": reward_text(row["reward"], row["outcome"]),
        "regraded": Text("") if row["regraded"] is None else reward_text(row["regraded"]),
        "verdict": line(" ".join([row["verdict"], *row["tags"]]).strip(), "cyan", 40),
        "official": Text("") if row["official"] is None else reward_text(row["official"]),
        "outcome": line(f"{row['outcome']}{blame}", "" if row["outcome"] == "natural" else "yellow", 30),
        "label": line(", ".join(row["labels"]), "yellow", 40),
        "turns": Text(str(row["turns"])),
        "calls": Text(str(row["calls"])),
        "errors": Text(str(row["errors"] or ""), style="red"),
        "exits": Text(str(row["exits"] or ""), style="yellow"),
        "tokens": Text(figure((row["prompt_tokens"] or 0) + (row["completion_tokens"] or 0))),
        "seconds": Text(f"{row['seconds'] or 0:.1f} s"),
        "answer": line(row["error"] or row["answer"], "red" if row["error"] else "dim", 120),
    }


def _run_head(run: dict[str, JSON], lines: Sequence[str]) -> Text:
    head = line(f"{run['env']} {run['model']}", "bold", 100)
    head.append(f"  {run['state']}", "cyan" if run["state"] == "running" else "dim")
    facts = [f"reward {interval(run['reward'])}", f"scored {run['scored']:,} of {run['planned']:,}",
             f"groups {run['groups']['ended']:,} of {run['groups']['begun']:,}"]  # fmt: skip
    facts += [f"official {interval(run['official'])}, {run['differs']} differ"] if run["official"] else []
    head.append("\n" + "; ".join(facts))
    for counts, style in ((run["outcomes"], ""), (run["labels"], "yellow")):
        if counts:
            head.append("\n").append_text(line(_counts(counts), style, 200))
    for each in lines[:4]:
        head.append("\n").append_text(line(f"! {each}", "yellow", 200))
    head.no_wrap = False
    return head
