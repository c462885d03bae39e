"""Derives the screen of a terminal from the bytes that a program has sent to it.

`GhosttyScreen` is a real emulator (libghostty, in the extra `screen`). It handles full-screen programs, the alternate
screen and wide characters, and answers a program's queries. `PlainScreen` drops control sequences and keeps the last
lines. That is correct for scrolling output, but not for full-screen programs such as editors. The attribute `emulated`
is true only for `GhosttyScreen`.

`cursor` is row and column, counted from 0. `application_cursor` is true if the program has requested the alternative
codes of the cursor keys. `feed` adds output of the program and returns the terminal's answers.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.sandbox.slot import TerminalSize

_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC, DCS and similar
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x07\x0b-\x0c\x0e-\x1a\x1c-\x1f\x7f]"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07]*|[ -/]*)?\Z")
_MAX_UNFINISHED = 4096
_CURSOR_KEYS = 1


def open_screen(size: TerminalSize, emulator: str = "best") -> Screen:
    """Return a screen with the emulator `ghostty` or `plain`, or the best one that is installed. Raises `ConfigError`,
    naming the extra, if `ghostty` is not installed."""
    if emulator not in ("best", "ghostty", "plain"):
        raise ConfigError(f"{emulator!r} is not a terminal emulator; use best, ghostty or plain")
    if emulator != "plain":
        try:
            return GhosttyScreen(size)
        except ImportError:
            if emulator == "ghostty":
                raise ConfigError(
                    f"the terminal emulator needs the extra `screen`: {install_command('screen', 'palaestra-slots')}"
                ) from None
    return PlainScreen(size)


class GhosttyScreen:
    """A screen that libghostty emulates."""

    emulated = True

    def __init__(self, size: TerminalSize) -> None:
        import pyghostty

        self._terminal = pyghostty.Terminal(cols=size.columns, rows=size.rows, scrollback=0)
        self._answers = bytearray()
        self._terminal.on_reply(self._answers.extend)

    @property
    def cursor(self) -> tuple[int, int]:
        column, row = self._terminal.cursor
        return int(row), int(column)

    @property
    def application_cursor(self) -> bool:
        return bool(self._terminal.mode(_CURSOR_KEYS))

    def feed(self, data: bytes) -> bytes:
        self._terminal.feed(data)
        answers = bytes(self._answers)
        self._answers.clear()
        return answers

    def resize(self, size: TerminalSize) -> None:
        self._terminal.resize(size.columns, size.rows)

    def text(self) -> str:
        return str(self._terminal.text())


class PlainScreen:
    """A screen without emulation."""

    emulated = False
    application_cursor = False

    def __init__(self, size: TerminalSize) -> None:
        self._rows = size.rows
        self._lines = [""]
        self._column = 0
        self._rest = b""

    @property
    def cursor(self) -> tuple[int, int]:
        return len(self._lines) - 1, self._column

    def feed(self, data: bytes) -> bytes:
        text, self._rest = plain(self._rest + data)
        self._write_text(text)
        return b""

    def resize(self, size: TerminalSize) -> None:
        self._rows = size.rows
        del self._lines[: -self._rows]

    def text(self) -> str:
        lines = [line.encode(errors="surrogateescape").decode(errors="replace").rstrip() for line in self._lines]
        return "\n".join(lines).rstrip("\n")

    def _write_text(self, text: str) -> None:
        for part in re.split(r"([\r\n\b])", text):
            if part == "\n":
                self._lines.append("")
                self._column = 0
                del self._lines[: -self._rows]
            elif part == "\r":
                self._column = 0
            elif part == "\b":
                self._column = max(0, self._column - 1)
            elif part:
                line, start = self._lines[-1].ljust(self._column), self._column
                self._column += len(part)
                self._lines[-1] = line[:start] + part + line[self._column :]


Screen: TypeAlias = GhosttyScreen | PlainScreen


def plain(data: bytes) -> tuple[str, bytes]:
    """Return the output of a program without control sequences, and the incomplete sequence or character at its end.
    Bytes that are not UTF-8 become surrogates (`errors="surrogateescape"`)."""
    text = data.decode(errors="surrogateescape")
    # A sequence that never ends may hold back only so much of the output.
    unfinished = _UNFINISHED.search(text[-_MAX_UNFINISHED:])
    held = unfinished.group() if unfinished else _broken_character(text)
    return _SEQUENCE.sub("", text[: len(text) - len(held)]), held.encode(errors="surrogateescape")


def _broken_character(text: str) -> str:
    """Return the bytes of an incomplete character at the end of the text, at most three, as surrogates."""
    tail = re.search(r"[\udcc2-\udcf4][\udc80-\udcbf]{0,2}\Z", text)
    return tail.group() if tail else ""
