"""Reads a process's output as text, starting at a cursor.

A cursor is an offset in bytes. A reader that continues at the cursor of the last reply gets each byte at most once, and
the number of bytes that were dropped in between. An incomplete character or control sequence is left for the next read.
"""

from __future__ import annotations

from dataclasses import dataclass

from palaestra_slots.sandbox.slot import OutputPiece, Process
from palaestra_slots.sandbox.terminal.screen import plain

LONGEST_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class OutputText:
    """Output between two cursors. `lost` counts the requested bytes before `start` that were dropped; `more` is true if
    the read reached its size limit, so that more output may follow."""

    text: str
    start: int
    end: int
    lost: int = 0
    more: bool = False


async def read_output_text(process: Process, cursor: int, *, max_bytes: int, running: bool) -> OutputText:
    """Return the text of at most `max_bytes` bytes of output, starting at `cursor`. `running` is true if the process
    was running before this call, so that more output may follow."""
    piece = await process.read(cursor, max_bytes=max_bytes)
    data, skipped = _from_a_character_on(piece) if piece.lost else (piece.data, 0)
    more = len(piece.data) == max_bytes
    text, held = readable(data, running or more)
    return OutputText(text, piece.start + skipped, piece.end - held, piece.lost + skipped, more)


async def tail(process: Process, max_bytes: int, *, running: bool) -> OutputText:
    """Return the text of the last `max_bytes` bytes of the output."""
    piece = await process.read(-max_bytes, max_bytes=max_bytes)
    data, skipped = _from_a_character_on(piece)
    text, held = readable(data, running)
    return OutputText(text, piece.start + skipped, piece.end - held)


def readable(data: bytes, more: bool) -> tuple[str, int]:
    """Return `data` as text, without control sequences and with plain line ends. Also return the number of bytes at the
    end of `data` that form an incomplete character, control sequence or line end.

    If `more` is false, no more output can come; the number is then 0, and an incomplete character becomes the
    replacement character.
    """
    text, rest = plain(data)
    held = len(rest) if more else 0
    if more and data[: len(data) - held].endswith(b"\r"):  # perhaps the first half of a line end
        text, held = text[:-1], held + 1
    if not more and not rest.startswith(b"\x1b"):
        text += rest.decode(errors="surrogateescape")
    text = text.encode(errors="surrogateescape").decode(errors="replace")
    return text.replace("\r\n", "\n"), held


def _from_a_character_on(piece: OutputPiece) -> tuple[bytes, int]:
    """Return the piece without a partial character at its beginning, and the number of bytes removed."""
    skipped = 0
    # At the very start of the output, nothing was cut off, so a stray byte is the program's own.
    while piece.start and skipped < min(len(piece.data), LONGEST_CHARACTER - 1) and piece.data[skipped] >> 6 == 0b10:
        skipped += 1
    return piece.data[skipped:], skipped
