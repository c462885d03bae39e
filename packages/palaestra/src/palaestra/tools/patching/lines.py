"""Functions on lines of text: where lines occur, how they are indented, and which lines are most similar to another
text."""

from __future__ import annotations

import difflib
import heapq
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WORD = re.compile(r"\w+")
_COMPARED_LINES, _COMPARED_CHARS = 50, 200
"""The maximum number of lines, and of characters of each, that are compared by character, because that is costly."""
_MAX_LINES = 20_000
_SHOWN_LINES = 5


def places(lines: Sequence[str], wanted: Sequence[str], start: int = 0) -> list[int]:
    """Return every index from `start` on where `wanted` begins in `lines`; places may overlap.

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
    """Return, for each prefix of `wanted`, the length of its longest proper prefix that is also its suffix."""
    falls, matched = [0] * len(wanted), 0
    for index in range(1, len(wanted)):
        while matched and wanted[index] != wanted[matched]:
            matched = falls[matched - 1]
        matched += wanted[index] == wanted[matched]
        falls[index] = matched
    return falls


def nearest(text: str, old: str) -> str:
    """Return a message that shows how the lines of `text` most similar to `old` differ from it, or advice if none are
    similar."""
    wanted = old.strip("\n").split("\n")
    first = wanted[0].strip()[:_COMPARED_CHARS]
    lines = text.split("\n")[:_MAX_LINES]
    if not first or not any(lines):
        return "The file is empty." if not text.strip() else "Read the file and copy the text exactly."
    # difflib takes quadratic time in the length of a line.
    stripped = [line.strip()[:_COMPARED_CHARS] for line in lines]
    close = difflib.get_close_matches(first, _sharing_words(first, set(stripped)), n=1, cutoff=0.6)
    if not close:
        return "The file contains nothing similar: read it again and copy the text exactly."
    starts = [at for at, line in enumerate(stripped) if line == close[0]][:_COMPARED_LINES]
    # A line such as `return` occurs often; the lines that follow decide which one was meant.
    at = max(starts, key=lambda start: sum(map(_same_words, wanted[:_COMPARED_LINES], lines[start:])))
    pairs = [
        (number, theirs, ours)
        for number, (theirs, ours) in enumerate(itertools.zip_longest(lines[at : at + len(wanted)], wanted), at + 1)
        if theirs is None or not _same_words(theirs, ours)
    ]
    shown = "\n".join(
        f"{number}|{(theirs or '')[:_COMPARED_CHARS]}\n   old_string: {ours[:_COMPARED_CHARS]}"
        for number, theirs, ours in pairs[:_SHOWN_LINES]
    )
    if not shown:  # only the white space differs, such as a line end or half a line
        return f"The most similar lines begin at line {at + 1}:\n{at + 1}|{lines[at][:_COMPARED_CHARS]}"
    more = f"\n({len(pairs) - _SHOWN_LINES} more lines differ)" if len(pairs) > _SHOWN_LINES else ""
    return f"The most similar lines begin at line {at + 1} and differ here:\n{shown}{more}"


def _same_words(one: str, other: str) -> bool:
    return one.split() == other.split()


def _sharing_words(line: str, others: set[str]) -> list[str]:
    """Return the few lines that share the most words with `line`: a cheap filter before the costly comparison."""
    words = set(_WORD.findall(line))
    shared = {other: len(words.intersection(_WORD.findall(other))) for other in others}
    # Sorted, because the order of a set differs between processes and would decide between equal lines.
    return heapq.nlargest(_COMPARED_LINES, sorted(other for other in others if shared[other]), key=shared.__getitem__)


@dataclass(frozen=True, slots=True)
class Reindent:
    """Maps each indentation that a model wrote to the file's indentation in the corresponding lines."""

    mapping: Mapping[str, str]

    @classmethod
    def between(cls, written: Sequence[str], real: Sequence[str]) -> Reindent:
        """Build the map from pairs of corresponding lines. For each indentation, the first pair that has it decides."""
        mapping: dict[str, str] = {}
        for model_line, file_line in zip(written, real, strict=True):
            if model_line.strip() and file_line.strip():
                mapping.setdefault(indent_of(model_line), indent_of(file_line))
        return cls(mapping)

    def apply(self, text: str) -> str:
        """Return the text with every line's indentation translated. An indentation that is deeper than a known one
        keeps the difference."""
        return "\n".join(self._reindented(line) for line in text.split("\n"))

    def _reindented(self, line: str) -> str:
        indent = indent_of(line)
        if not line.strip():
            return line
        known = max((seen for seen in self.mapping if indent.startswith(seen)), key=len, default=None)
        if known is not None:
            return self.mapping[known] + line[len(known) :]
        return self._shallower(indent) + line[len(indent) :]

    def _shallower(self, indent: str) -> str:
        """Translate an indentation that is shallower than a known one: the file's indentation is shallower by the same
        amount."""
        nearest = min((seen for seen in self.mapping if seen.startswith(indent)), key=len, default=None)
        if nearest is None:
            return indent
        missing = nearest[len(indent) :]
        return self.mapping[nearest].removesuffix(missing) if self.mapping[nearest].endswith(missing) else indent


def indent_of(line: str) -> str:
    """Return the leading white space of a line."""
    return line[: len(line) - len(line.lstrip())]


def carriage_return(real: Sequence[str]) -> str:
    """Return a carriage return if all of these lines end with one, otherwise an empty string. In a file with mixed line
    ends, the lines around a change decide."""
    return "\r" if real and all(line.endswith("\r") for line in real) else ""
