"""Makes text from models, commands and data sets safe to show on a page or a terminal.

The result contains no escape sequence, no control character except tab and newline, no character that reorders its
neighbours, and nothing that UTF-8 cannot encode. HTML escaping is left to the template engine. Sources of the
sequences: ECMA-48, and xterm's control sequences for OSC.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC and similar: titles, links, the clipboard
    r"|[ -/]*[0-~])"  # two-character and character-set sequences
)

_BIDI = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
    **{code: f"\u27e8U+{code:04X}\u27e9" for code in _BIDI},
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
}


def printable(text: str) -> str:
    """Return the text without escape sequences and with its control characters made visible."""
    return _visible(_ESCAPE.sub("", text))


def escaped(text: str) -> str:
    """Return the text with each unprintable character except tabs as a Python escape, a newline as `\\n`. Unlike
    `printable`, this drops nothing of a text that a person reads before agreeing to it."""
    return "".join(
        each if each.isprintable() or each == "\t" else each.encode("unicode_escape").decode() for each in text
    )


def without_middle(text: str, most: int, note: str = " … ") -> str:
    """Return at most `most` characters of a text: its beginning and its end, with `note` between them, in which `{}` is
    the number of characters that were left out. A message starts with what failed and often ends with the cause."""
    missing = len(text) - most
    if missing <= 0:
        return text
    head = most // 2
    return text[:head] + note.format(missing) + text[head + missing :]


def one_line(text: str, most: int) -> str:
    """Return a text as one `printable` line, without its middle if it is longer than `most` characters."""
    # Cut first, because the text may be megabytes, and splitting it would copy all of it.
    return without_middle(printable(" ".join(without_middle(text, 20 * most).split())), most)


def quoted(text: str) -> str:
    """Return the `escaped` lines of a text, each with a mark in front, so that none can imitate a question."""
    return "\n".join(f"  | {escaped(line)}" for line in text.split("\n"))


class TerminalText:
    """Wraps a terminal's stream and makes every text `printable`. `raw` is the wrapped stream, to which Palaestra
    writes its own colours."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw
        self.buffer = _TerminalBytes(self)

    def write(self, text: str) -> int:
        """Write the text as `printable` returns it."""
        self.raw.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """Write each text as `printable` returns it."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


class _TerminalBytes:
    """The binary stream below a `TerminalText`. It decodes the bytes as UTF-8."""

    def __init__(self, text: TerminalText) -> None:
        self._text = text
        # Two writes may have the halves of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> int:
        """Decode the bytes and write the text as `printable` returns it."""
        self._text.write(self._decoder.decode(data))
        return len(data)

    def flush(self) -> None:
        """Flush the terminal's stream."""
        self._text.raw.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text.raw.buffer, name)


def guard_terminals() -> None:
    """Keep escape sequences out of standard output and standard error if they are terminals. Idempotent."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty() and not isinstance(stream, TerminalText):
            setattr(sys, name, TerminalText(stream))


def _visible(text: str) -> str:
    # A carriage return alone stays and becomes visible, because it could overwrite the line before it.
    return text.replace("\r\n", "\n").translate(_SHOWN)


def reason(error: OSError) -> str:
    """Return the operating system's message in one line."""
    return error.strerror or str(error) or type(error).__name__
