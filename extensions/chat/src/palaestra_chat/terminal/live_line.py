"""The live line: what a running turn does, for how long, and how full the window is. It is drawn above the prompt."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from prompt_toolkit.utils import get_cwidth

from palaestra_chat.terminal.styles import CYAN, DIM, PLAIN, YELLOW
from palaestra_slots.core.printable import printable

TAIL_LINES = 6
"""The number of lines of running output that are shown above the live line."""
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CHARS_PER_TOKEN = 4


class LiveLine:
    """The running turn as a person sees it. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self._doing, self._doing_s = "", 0.0
        self._chars = 0
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._half = ""

    @property
    def running(self) -> bool:
        """Whether a turn runs."""
        return self._began_s is not None

    def begin(self) -> None:
        """A turn begins."""
        self._began_s, self._chars = self._clock(), 0
        self.do("waiting for the model")

    def end(self) -> None:
        """The turn has ended."""
        self._began_s = None
        self.clear_tail()

    def do(self, what: str) -> None:
        """Show that the turn does this now."""
        if what != self._doing:
            self._doing, self._doing_s = what, self._clock()

    def count(self, text: str) -> None:
        """Count text of the model towards the tokens, until the server reports its count."""
        self._chars += len(text)

    def counted(self) -> None:
        """The server has counted the model's text."""
        self._chars = 0

    def output(self, text: str) -> None:
        """Add output to the moving tail."""
        *lines, self._half = (self._half + text).split("\n")
        self._half = self._half[-1000:]
        self._tail.extend(lines[-TAIL_LINES:])

    def clear_tail(self) -> None:
        """Show no output."""
        self._tail.clear()
        self._half = ""

    def lines(self, columns: int, pending: str, tokens: int, window: int | None, queued: Sequence[str]) -> list[str]:
        """Return the lines above the prompt while a turn runs. `pending` is the text of the answer that is not in the
        scrollback yet, and `queued` are the messages that wait."""
        if self._began_s is None:
            return []
        now = self._clock()
        last = [line for line in printable(pending).rstrip("\n").split("\n")[-TAIL_LINES:] if line.strip()]
        tail = [f"{DIM}  │ {printable(line)}" for line in (*self._tail, *([self._half] if self._half else ()))]
        spinner = _SPINNER[int(now * 8) % len(_SPINNER)]
        doing = self._doing if now - self._doing_s < 2 else f"{self._doing} {_seconds(now - self._doing_s)}"
        used = tokens + self._chars // _CHARS_PER_TOKEN
        filled = f"{used} tokens" if window is None else f"{used}/{window} tokens ({100 * used // window} %)"
        parts = [f"{spinner} {doing}", _seconds(now - self._began_s), filled]
        parts += [f"{len(queued)} queued"] if queued else []
        shown = [*last, *tail[-TAIL_LINES:], f"{CYAN}{' · '.join([*parts, 'Esc stops'])}"]
        shown += [f"{YELLOW}  queued: {printable(' '.join(text.split()))}" for text in queued]
        return [f"{fitted(line, columns)}{PLAIN}" for line in shown]


def _seconds(seconds: float) -> str:
    return f"{int(seconds)} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def fitted(line: str, columns: int) -> str:
    """Cut a line to the width of the terminal. Escape sequences have no width."""
    room, shown, at = columns - 1, [], 0
    while at < len(line):
        if line[at] == "\x1b":
            end = line.find("m", at) + 1 or len(line)
            shown.append(line[at:end])
            at = end
            continue
        room -= get_cwidth(line[at])
        if room < 1:
            return "".join([*shown, "…"])
        shown.append(line[at])
        at += 1
    return "".join(shown)
