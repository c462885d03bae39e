"""The size of a tool's reply as it is sent to the model: JSON, in which some characters become two or six.

Replies are bounded by this size, because sixty thousand NULs of a command's output become 360,000 characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from palaestra_slots.core.types import JSON

MAX_REPLY_CHARS = 100_000
"""The maximum size of the largest part of a reply."""

MAX_OUTPUT_CHARS = 200_000
"""The maximum number of bytes at the end of a background process's output that `log` shows. Slots keep at least this
many."""

_TWO = re.compile(r'["\\\b\t\n\f\r]')
_SIX = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")


def sent_chars(text: str) -> int:
    """Return the number of characters that `text` has as a JSON string, without its quotes."""
    return len(text) + len(_TWO.findall(text)) + 5 * len(_SIX.findall(text))


def head_within(text: str, most: int) -> str:
    """Return the longest beginning of `text` with at most `most` sent characters."""
    if len(text) <= most and sent_chars(text) <= most:
        return text
    low, high = 0, min(len(text), most)
    # A longer beginning never has a smaller size, so the longest one can be found by halving.
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sent_chars(text[:middle]) <= most else (low, middle - 1)
    return text[:low]


def tail_within(text: str, most: int) -> str:
    """Return the longest end of `text` with at most `most` sent characters."""
    return head_within(text[-most:][::-1], most)[::-1] if most > 0 else ""


def items_within(items: Sequence[JSON], most: int = MAX_REPLY_CHARS) -> int:
    """Return how many of the first items have at most `most` sent characters together, but at least one."""
    size = 0
    for count, item in enumerate(items):
        size += len(json.dumps(item, ensure_ascii=False)) + 2
        if count and size > most:
            return count
    return len(items)
