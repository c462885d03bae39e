"""`palaestra view --tui`: runs, rollouts and siblings in the terminal.

The screens read the indexes and records that the page reads. Texts of a run become `Text` of `safe_text` and nothing
else. A thread indexes what the runs gain, and the screen that is open is read again when its run has changed.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from palaestra.core.errors import ConfigError

try:
    from textual.app import App
    from textual.binding import Binding, BindingType
except ImportError:
    raise ConfigError("palaestra view --tui needs textual: pip install 'palaestra[tui]'") from None

from palaestra.viewer.runs import OpenRuns
from palaestra.viewer.token_texts import TokenTexts
from palaestra.viewer.tui.run_screens import RunScreen, RunsScreen
from palaestra.viewer.tui.view_screen import Help, ViewScreen

_POLL_S = 0.5
_DISCOVER = 6
"""New runs are looked for every so many polls."""


class TerminalViewer(App[None]):
    """The program. If the user named a run, it opens that run."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "palaestra"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("question_mark", "help", "keys", key_display="?"),
    ]
    CSS = """
    .path { height: 1; background: $panel; color: $text; padding: 0 1; }
    .head { height: auto; max-height: 50%; padding: 0 1; }
    .note { height: auto; color: $text-muted; padding: 0 1; }
    DataTable { height: 1fr; }
    #filter { display: none; height: 3; }
    #filter.on { display: block; }
    StepView { height: auto; padding: 0 1; border-left: wide transparent; margin-bottom: 1; }
    StepView:focus { border-left: wide $accent; }
    #steps { height: 1fr; }
    .part { height: auto; padding: 0 1; }
    .siblings DataTable { height: auto; max-height: 60%; }
    Help { align: center middle; }
    Help > VerticalScroll { width: 64; max-width: 100%; height: auto; max-height: 90%; border: round $accent; padding: 0 1; background: $surface; }
    """  # noqa: E501

    def __init__(self, runs: OpenRuns, texts: TokenTexts) -> None:
        super().__init__()
        self.runs = runs
        self.texts = texts

    def on_mount(self) -> None:
        """Open the first screen and follow the runs."""
        self.push_screen(RunsScreen(self.runs, self.texts))
        if self.runs.named:
            self.push_screen(RunScreen(self.runs, self.texts, self.runs.named))
        self.run_worker(self._follow(), exit_on_error=True)

    def action_help(self) -> None:
        """Show the keys of the screen, or leave them."""
        if isinstance(self.screen, Help):
            self.pop_screen()
        elif isinstance(self.screen, ViewScreen):
            self.push_screen(Help(self.screen))

    async def _follow(self) -> None:
        """Index the runs until the program ends."""
        turn = 0
        while True:
            changed = {name for name in self.runs if await asyncio.to_thread(self.runs.update, name)}
            turn += 1
            fresh = turn % _DISCOVER == 0 and await asyncio.to_thread(self.runs.discover)
            screen = next((each for each in reversed(self.screen_stack) if isinstance(each, ViewScreen)), None)
            if screen is not None and (fresh or changed) and screen.follows(changed):
                screen.reload()
            await asyncio.sleep(0.05 if changed else _POLL_S)
