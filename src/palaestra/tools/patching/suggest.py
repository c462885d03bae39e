"""Where some lines stand among others, in time that grows with their number alone, whatever they are.

Show a model the lines it may have meant when its text is not in the file.

Not for editing: what is found here is only ever shown.
"""

from __future__ import annotations

import difflib
import heapq
import re
from collections.abc import Sequence


def places(lines: Sequence[str], wanted: Sequence[str], start: int = 0) -> list[int]:
    """Every index from `start` on where `wanted` begins in `lines`; places may overlap.

    Source: Knuth, Morris, Pratt: Fast pattern matching in strings (1977).
    """
    falls, matched, found = _falls(wanted), 0, []
    for index in range(start, len(lines)):
        while matched and (matched == len(wanted) or lines[index] != wanted[matched]):
            matched = falls[matched - 1]
        matched += lines[index] == wanted[matched]
        if matched == len(wanted):
            found.append(index - matched + 1)
    return found


def _falls(wanted: Sequence[str]) -> list[int]:
    """For each beginning of `wanted`, how long its longest shorter beginning is that also ends it."""
    falls, matched = [0] * len(wanted), 0
    for index in range(1, len(wanted)):
        while matched and wanted[index] != wanted[matched]:
            matched = falls[matched - 1]
        matched += wanted[index] == wanted[matched]
        falls[index] = matched
    return falls


_WORD = re.compile(r"\w+")
_COMPARED_LINES, _COMPARED_CHARS = 50, 200
"""How many lines are compared letter by letter, and how much of each: the comparison is costly."""
_MAX_LINES = 20_000


def nearest(text: str, old: str) -> str:
    """A sentence that shows the lines of `text` most like `old`, for a model to try again with."""
    wanted = [line.strip() for line in old.split("\n") if line.strip()]
    lines = text.split("\n")[:_MAX_LINES]
    if not wanted or not any(lines):
        return "The file is empty." if not text.strip() else "Read the file and copy the text exactly."
    stripped = [line.strip()[:_COMPARED_CHARS] for line in lines]
    likely = _sharing_words(wanted[0][:_COMPARED_CHARS], set(stripped))
    close = difflib.get_close_matches(wanted[0][:_COMPARED_CHARS], likely, n=1, cutoff=0.6)
    if not close:
        return "Nothing similar is in the file: read it again and copy the text exactly."
    at = stripped.index(close[0])
    shown = "\n".join(
        f"{n + 1}|{lines[n][:_COMPARED_CHARS]}" for n in range(at, min(len(lines), at + min(len(wanted), 5)))
    )
    return f"The most similar lines are:\n{shown}"


def _sharing_words(line: str, others: set[str]) -> list[str]:
    """The few lines that have most words in common with `line`: a cheap choice before the costly comparison."""
    words = set(_WORD.findall(line))
    shared = {other: len(words.intersection(_WORD.findall(other))) for other in others}
    return heapq.nlargest(_COMPARED_LINES, sorted(other for other in others if shared[other]), key=shared.__getitem__)
