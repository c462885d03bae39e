"""Siblings side by side in the terminal, with the first token and the first call at which they differ."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static

from palaestra.core.printable import printable
from palaestra.core.types import JSON
from palaestra.viewer.divergence import MOST, siblings
from palaestra.viewer.rollout_record import token_record
from palaestra.viewer.run_index import RunIndex
from palaestra.viewer.runs import OpenRuns
from palaestra.viewer.token_texts import TokenTexts
from palaestra.viewer.tui.safe_text import line
from palaestra.viewer.tui.steps import arguments
from palaestra.viewer.tui.view_screen import Table, ViewScreen, figure, reward_text

_BEFORE, _AFTER = 16, 24
_MOST_TESTS, _MOST_CALLS = 60, 200


class SiblingsScreen(ViewScreen):
    """Up to 16 rollouts of a group, compared with one of them. `show` opens one of them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "reference", "use as reference"),
        Binding("t", "token", "other token"),
    ]
    HELP_LINES = (
        "Each column is a rollout. Left and right choose one, and enter opens it.",
        "▶ marks the first call in which it differs from the reference; equal calls are dim.",
    )

    def __init__(
        self,
        runs: OpenRuns,
        texts: TokenTexts,
        run: str,
        rollout_id: str,
        members: Sequence[str],
        show: Callable[[str], None],
    ) -> None:
        super().__init__()
        place = members.index(rollout_id) if rollout_id in members else 0
        first = max(0, min(place - MOST // 2, len(members) - MOST))
        self._runs, self._texts, self._run = runs, texts, run
        self._show = show
        self._members = list(members[first : first + MOST])
        self._reference = ""
        self._found: dict[str, JSON] = {}

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Static(classes="path")
        yield Static(classes="note")
        with VerticalScroll(classes="siblings", can_focus=False):
            facts: Table = DataTable(cursor_type="column", fixed_columns=1, id="facts")
            yield facts
            yield Static(classes="part")
            calls: Table = DataTable(cursor_type="cell", fixed_columns=1, zebra_stripes=True, id="calls")
            yield calls
        yield Footer()

    def on_mount(self) -> None:
        """Compare."""
        self.query_one("#facts").focus()
        self.reload()

    async def load(self) -> None:
        """Show the comparison."""
        index = self._runs[self._run]
        await asyncio.to_thread(self._compare, index)
        rows = await asyncio.to_thread(_rows, index, self._members)
        self.show_path("runs", self._run, str(next(iter(rows.values()))["task"]), "siblings")
        self._fill_facts(rows)
        self._fill_calls(rows)
        await self.action_token()

    def _compare(self, index: RunIndex) -> None:
        found = [each for each in map(index.trajectory, self._members) if each is not None]
        self._found = siblings(found, self._reference)
        self._reference = self._found["reference"]

    def _shown(self) -> list[str]:
        return [str(each["id"]) for each in self._found.get("rollouts", [])]

    def _fill_facts(self, rows: dict[str, dict[str, JSON]]) -> None:
        table = self.query_one("#facts", DataTable)
        column = max(1, table.cursor_column)
        table.clear(columns=True)
        table.add_columns("", *(self._name_of(each) for each in self._shown()))
        every = self._found["rollouts"]
        for label, cells in _facts(self._found, [(each, rows[each["id"]]) for each in every]):
            table.add_row(line(label, "dim", 40), *cells)
        table.move_cursor(column=min(column, len(every)))

    def _fill_calls(self, rows: dict[str, dict[str, JSON]]) -> None:
        table = self.query_one("#calls", DataTable)
        table.clear(columns=True)
        table.add_columns("call", *(self._name_of(each) for each in self._shown()))
        every = self._found["rollouts"]
        base = next(each for each in every if each["id"] == self._reference)
        for place in range(min(_MOST_CALLS, max((len(each["calls"]) for each in every), default=0))):
            table.add_row(Text(str(place + 1), style="dim"), *(_call(each, base, place) for each in every))

    def _name_of(self, rollout_id: str) -> Text:
        name = line(f"#{rollout_id.rpartition('/')[2]}", "bold", 12)
        return name.append(" reference", "dim") if rollout_id == self._reference else name

    def _column(self) -> int | None:
        tables = [each for each in self.query(DataTable) if each.has_focus] or [self.query_one("#facts", DataTable)]
        column = tables[0].cursor_column - 1
        return column if 0 <= column < len(self._shown()) else None

    async def on_data_table_column_selected(self, event: DataTable.ColumnSelected) -> None:
        """Open the rollout of a column."""
        self._open()

    async def on_data_table_cell_selected(self, event: DataTable.CellSelected) -> None:
        """Open the rollout of a call."""
        self._open()

    def _open(self) -> None:
        if (column := self._column()) is not None:
            self._show(self._shown()[column])

    def action_reference(self) -> None:
        """Compare with the rollout of the column."""
        if (column := self._column()) is not None:
            self._reference = self._shown()[column]
            self.reload()

    async def action_token(self) -> None:
        """Show the differing token of the rollout of the column."""
        column = self._column()
        await self._show_token("" if column is None else self._shown()[column])

    async def _show_token(self, chosen: str) -> None:
        part = self.query_one(".part", Static)
        parting = [each for each in self._found["rollouts"] if each["token"]]
        each = next((one for one in parting if one["id"] == chosen), parting[0] if parting else None)
        if each is None:
            part.update(line("no tokens were recorded that differ", "dim"))
            return
        part.update(await asyncio.to_thread(self._tokens, str(each["id"]), int(each["token"]["index"])))

    def _tokens(self, other: str, index: int) -> Text:
        number = other.rpartition("/")[2], self._reference.rpartition("/")[2]
        text = line(f"token {index:,}: #{number[0]} parts from #{number[1]}", "bold")
        for rollout_id in (self._reference, other):
            record = token_record(self._runs[self._run], rollout_id, 0, self._texts(self._run))
            text.append("\n").append_text(line(f"#{rollout_id.rpartition('/')[2]} ", "bold")).append_text(
                _around(record, index)
            )
        text.no_wrap, text.overflow = False, "fold"
        return text


def _rows(index: RunIndex, members: Sequence[str]) -> dict[str, dict[str, JSON]]:
    rows = [row for member in members for row in index.rows([("id", "=", member)], limit=1)[1]]
    return {str(row["id"]): row for row in rows}


def _facts(found: dict[str, JSON], every: Sequence[tuple[JSON, dict[str, JSON]]]) -> list[tuple[str, list[Text]]]:
    tools = dict.fromkeys(name for each, _ in every for name in each["tools"])
    lines = [
        ("reward", [reward_text(row["reward"], row["outcome"]) for _, row in every]),
        ("outcome", [line(row["outcome"], most=20) for _, row in every]),
        ("labels", [line(", ".join(row["labels"]), "yellow", 30) for _, row in every]),
        ("first other token", [_place(each["token"]) for each, _ in every]),
        ("first other call", [Text("" if each["call"] is None else str(each["call"] + 1)) for each, _ in every]),
        ("turns", [Text(str(row["turns"])) for _, row in every]),
        *((name, [Text(str(each["tools"].get(name, 0))) for each, _ in every]) for name in tools),
        *((name, [Text(figure(value)) for value in values]) for name, values in found["criteria"].items()),
    ]
    for name, values in list(found["tests"].items())[:_MOST_TESTS]:
        lines.append((name, [line(str(value or ""), "green" if value == "passed" else "red", 20) for value in values]))
    return [each for each in lines if any(cell.plain for cell in each[1])]


def _place(token: JSON) -> Text:
    return Text("" if token is None else f"{token['index']:,}" + (f", turn {token['turn']}" if token["turn"] else ""))


def _call(each: JSON, base: JSON, place: int) -> Text:
    mark = "▶ " if each["call"] == place else ""
    if place >= len(each["calls"]):
        return Text(f"{mark}ended" if place == len(each["calls"]) else "", style="bold yellow" if mark else "dim")
    _, name, given, _ = each["calls"][place]
    same = place < len(base["calls"]) and base["calls"][place][1:3] == [name, given]
    style = "bold yellow" if mark else "dim" if same and each is not base else ""
    return line(f"{mark}{name} {arguments(given)}", style, 48)


def _around(record: dict[str, JSON], index: int) -> Text:
    """Return the tokens around a place, the one there marked."""
    ids = array("i", base64.b64decode(record["ids"]))
    names = dict(zip(sorted(set(ids)), record["texts"], strict=True)) if record["texts"] else {}
    text = Text()
    for place in range(max(0, index - _BEFORE), min(len(ids), index + _AFTER)):
        shown = names.get(ids[place], f"{ids[place]} ").replace("\n", "↵").replace("\t", "→")
        style = "bold reverse yellow" if place == index else "" if place > index else "dim"
        text.append_text(Text(printable(shown), style=style))
    return text if index < len(ids) else text.append(" (ends here)", "bold yellow")
