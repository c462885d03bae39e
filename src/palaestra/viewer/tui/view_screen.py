"""What the screens of the terminal viewer share: their path, how they load, how figures look, and the list of keys."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Static

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.viewer.tui.safe_text import line

Table = DataTable[Text]


class ViewScreen(Screen[None]):
    """A screen with a path, whose data are read by `load` in the background and again whenever they change."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,u,backspace", "back", "back", key_display="esc"),
        Binding("j", "down", "down", show=False),
        Binding("k", "up", "up", show=False),
        Binding("g", "first", "first", show=False),
        Binding("G", "last", "last", show=False, key_display="G"),
    ]

    HELP_LINES: ClassVar[tuple[str, ...]] = ()
    """Further lines of the help, after the keys."""

    def reload(self) -> None:
        """Read the data again, in the background."""
        self.run_worker(self._loaded(), exclusive=True, group="load")

    async def _loaded(self) -> None:
        try:
            await self.load()
        except ConfigError as error:
            self.show_note(str(error))

    async def load(self) -> None:
        """Read the data and show them."""
        raise NotImplementedError

    def follows(self, changed: Set[str]) -> bool:
        """Return whether the screen is out of date when these runs have changed."""
        return False

    def show_path(self, *names: str) -> None:
        """Show where the reader is."""
        self.query_one(".path", Static).update(line(" › ".join(names), "bold"))

    def show_note(self, text: str) -> None:
        """Show a line below the path."""
        self.query_one(".note", Static).update(line(text, "yellow", most=400))

    def action_back(self) -> None:
        """Go one level up."""
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    def action_down(self) -> None:
        """Go to the next row."""
        self._move(1)

    def action_up(self) -> None:
        """Go to the row before."""
        self._move(-1)

    def action_first(self) -> None:
        """Go to the first row."""
        self._move(-(10**9))

    def action_last(self) -> None:
        """Go to the last row."""
        self._move(10**9)

    def _move(self, by: int) -> None:
        for table in self.query(DataTable).results(DataTable):
            if table.has_focus:
                table.move_cursor(row=max(0, min(table.row_count - 1, table.cursor_row + by)))


class Help(ModalScreen[None]):
    """The keys of a screen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "app.pop_screen", "close")]

    def __init__(self, screen: ViewScreen) -> None:
        super().__init__()
        self._of = screen

    def compose(self) -> ComposeResult:
        """Yield the list of keys."""
        found: dict[str, str] = {}
        for binding in [*_bindings(type(self._of)), *_bindings(type(self.app))]:
            keys = binding.key_display or " ".join(binding.key.split(","))
            found.setdefault(binding.description, keys)
        text = Text("Keys\n", style="bold")
        for description, keys in found.items():
            text.append(f"  {keys:<14}", style="bold").append(f"{description}\n", style="not bold")
        text.append("  arrows, tab    move; enter opens\n", style="not bold")
        for each in self._of.HELP_LINES:
            text.append(f"\n{each}", style="not bold")
        with VerticalScroll():
            yield Static(text)


def _bindings(owner: type[Any]) -> Iterable[Binding]:
    for each in reversed(owner.__mro__):
        for binding in vars(each).get("BINDINGS", []) if each.__module__.startswith("palaestra") else []:
            if isinstance(binding, Binding):
                yield binding


def reward_text(reward: JSON, outcome: JSON = "") -> Text:
    """Return a reward as a cell."""
    if reward is None:
        return Text("running" if outcome is None else "unscored", style="dim italic")
    style = "bold green" if reward >= 1 else "bold yellow" if reward > 0 else "bold red"
    return Text(figure(reward), style=style)


def figure(value: JSON, digits: int = 2) -> str:
    """Return a number in few characters; a dash for none."""
    if value is None:
        return "–"
    whole = isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15)
    return f"{int(value):,}" if whole else f"{value:.{digits}f}"


def interval(found: JSON) -> str:
    """Return a mean with its 95% interval."""
    if not found or found["mean"] is None:
        return "–"
    bounds = found.get("interval")
    return figure(found["mean"], 3) + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")
