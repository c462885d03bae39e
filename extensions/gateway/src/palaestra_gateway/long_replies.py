"""Splits a long reply into messages that a platform accepts.

Invariants: no message is longer than the limit, and none ends inside a character. Apart from blank parts, and from the
lines that close and reopen a code block, the joined messages equal the reply.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator

from palaestra_gateway.platform import PlatformLimits

_FENCE = re.compile(r" {0,3}(`{3,10}|~{3,10})([^\n]*)")
_LONGEST_OPENING = 40
_CLOSING_ROOM = 11
"""The length that is reserved for the line end and the longest marker that close a code block."""
_BREAKS = ("\n\n", "\n", ". ", " ")
_JOINER, _VARIATIONS = "\u200d", range(0xFE00, 0xFE10)


def platform_length(text: str, limits: PlatformLimits) -> int:
    """Return the length of `text` in the platform's unit."""
    if limits.unit == "utf8":
        return len(text.encode("utf-8", "surrogatepass"))
    if limits.unit == "utf16":
        return len(text) + sum(1 for character in text if ord(character) > 0xFFFF)
    return len(text)


def split_reply(text: str, limits: PlatformLimits) -> list[str]:
    """Return the messages for `text`, in order. For a blank text, the list is empty. `limits.max_text` must be at least
    100."""
    if platform_length(text, limits) <= limits.max_text:
        return [text] if text.strip() else []
    ends, openings = _code_blocks(text)
    pieces, start, opening = [], 0, ""
    while start < len(text):
        head = f"{opening}\n" if opening else ""
        room = limits.max_text - platform_length(head, limits) - _CLOSING_ROOM
        end = _piece_end(text, start, room, limits)
        place = bisect_right(ends, end)
        opening = openings[place - 1] if place else ""
        body = text[start:end]
        tail = _closing(body, opening) if opening and end < len(text) else ""
        if body.strip():
            pieces.append(head + body + tail)
        start = end
    return pieces


def _closing(body: str, opening: str) -> str:
    marker = opening.lstrip()[0]
    length = len(opening.lstrip()) - len(opening.lstrip().lstrip(marker))
    return ("" if body.endswith("\n") else "\n") + marker * length


def _code_blocks(text: str) -> tuple[list[int], list[str]]:
    """Return the line ends at which the open code block changes, and the opening line of the block that is open after
    each ("" for none)."""
    ends, openings, opening, end = [0], [""], "", 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        found = _FENCE.match(line)
        if found is None:
            continue
        marker, rest = found[1], found[2].strip()
        if not opening and not (marker[0] == "`" and "`" in rest):
            opening = f"{marker}{rest}"[:_LONGEST_OPENING]
        elif opening and marker[0] == opening[0] and len(marker) >= _length(opening) and not rest:
            opening = ""
        else:
            continue
        ends.append(end)
        openings.append(opening)
    return ends, openings


def _length(opening: str) -> int:
    return len(opening) - len(opening.lstrip(opening[0]))


def _piece_end(text: str, start: int, room: int, limits: PlatformLimits) -> int:
    """Return the end of the next piece: after the last paragraph, line, sentence or word that fits."""
    end = _fitting(text, start, room, limits)
    if end >= len(text):
        return len(text)
    least = start + (end - start) // 2
    for text_break in _BREAKS:
        place = text.rfind(text_break, least, end)
        if place >= 0:
            return place + len(text_break)
    for candidate in _whole_characters(text, end, start):
        return candidate
    return end


def _fitting(text: str, start: int, room: int, limits: PlatformLimits) -> int:
    """Return the largest `end` for which `text[start:end]` has at most `room` units."""
    if limits.unit == "characters":
        return start + room
    end, used = start, 0
    while end < len(text):
        code = ord(text[end])
        used += (
            (1 + (code > 0xFFFF)) if limits.unit == "utf16" else 1 + (code > 0x7F) + (code > 0x7FF) + (code > 0xFFFF)
        )
        if used > room:
            break
        end += 1
    return end


def _whole_characters(text: str, end: int, start: int) -> Iterator[int]:
    """Yield ends at or shortly before `end` that do not separate an accent or a joined part from its character."""
    for candidate in range(end, max(start, end - 16), -1):
        following, before = text[candidate], text[candidate - 1]
        joined = unicodedata.combining(following) or _JOINER in (following, before) or ord(following) in _VARIATIONS
        if not joined:
            yield candidate
