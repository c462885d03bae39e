"""Makes the unified diff of an edit, bounded in length and in computing time."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator
from typing import Literal, TypeAlias

Opcode: TypeAlias = tuple[Literal["replace", "delete", "insert", "equal"], int, int, int, int]

MAX_DIFF_CHARS = 20_000
"""The maximum number of characters of a diff in a reply."""
_MAX_EXACT_LINES, _MAX_COMPARED_LINES = 1_000, 50_000
"""Limits on the number of lines of both texts in a changed part. Up to the first limit, the part is compared exactly;
beyond the second, it is not compared at all."""
_MAX_LOOKED_AT = 5_000_000
"""The maximum number of pairs of equal lines that the comparison examines. Lines that were not examined count as
replaced."""
_MOSTLY_SAME = 0.75
_CONTEXT = 3


def unified_diff(before: str | None, after: str | None, path: str) -> str:
    """Return what `whole_diff` does, for a reply: a diff of more than `MAX_DIFF_CHARS` characters is cut, and a note
    marks the cut."""
    diff = whole_diff(before, after, path)
    if len(diff) <= MAX_DIFF_CHARS:
        return diff
    kept = diff[:MAX_DIFF_CHARS].rpartition("\n")[0]
    return f"{kept}\n... [diff cut: {len(diff) - len(kept)} more characters] ...\n"


def whole_diff(before: str | None, after: str | None, path: str) -> str:
    """Return the change of `path` as a unified diff with git's file names, or an empty string if nothing changed. None
    stands for a missing file."""
    if before == after:
        return ""
    old_name = "/dev/null" if before is None else f"a/{path.lstrip('/')}"
    new_name = "/dev/null" if after is None else f"b/{path.lstrip('/')}"
    hunks = "".join(_hunks(_split_lines(before), _split_lines(after)))
    return f"--- {old_name}\n+++ {new_name}\n{hunks}"


def _split_lines(text: str | None) -> list[str]:
    """Return the lines with their ends, split only at line feeds, as other tools count them."""
    if not text:
        return []
    lines = [line + "\n" for line in text.split("\n")]
    if lines[-1] == "\n":
        return lines[:-1]
    lines[-1] += "\\ No newline at end of file\n"
    return lines


def _hunks(old: list[str], new: list[str]) -> Iterator[str]:
    for group in BoundedMatcher(old, new).get_grouped_opcodes(_CONTEXT):
        first, last = group[0], group[-1]
        yield f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@\n"
        for kind, old_start, old_end, new_start, new_end in group:
            if kind == "equal":
                yield from (" " + line for line in old[old_start:old_end])
                continue
            yield from ("-" + line for line in old[old_start:old_end])
            yield from ("+" + line for line in new[new_start:new_end])


class BoundedMatcher(difflib.SequenceMatcher[str]):
    """A comparison of only the changed part, without the equal head and tail of both texts. Its time has a bound."""

    b2j: dict[str, list[int]]
    """The indices of each line that is not too frequent; documented, but not in the type stubs."""

    def __init__(self, old: list[str], new: list[str]) -> None:
        self._head = _common(old, new)
        self._tail = _common(old[self._head :][::-1], new[self._head :][::-1])
        self._sizes = len(old), len(new)
        inner_old, inner_new = (lines[self._head : len(lines) - self._tail] for lines in (old, new))
        size = len(inner_old) + len(inner_new)
        self._too_large = size > _MAX_COMPARED_LINES
        # `autojunk` ignores frequent lines. That keeps long comparisons short,
        # but makes the diffs of short files worse.
        super().__init__(None, inner_old, inner_new, autojunk=size > _MAX_EXACT_LINES)
        self._inner = inner_old, inner_new
        pairs = (1 + len(self.b2j.get(line, ())) for line in inner_old)
        self._pairs = list(itertools.accumulate(pairs, initial=0))
        self._left = _MAX_LOOKED_AT

    def _line_by_line(self) -> list[Opcode]:
        """Return the edit script of a large part if it has the same number of lines as before and most lines are
        unchanged. For other edits, return an empty list."""
        old, new = self._inner
        if len(old) != len(new) or len(old) + len(new) <= _MAX_EXACT_LINES:
            return []
        same = [x == y for x, y in zip(old, new, strict=True)]
        if sum(same) < _MOSTLY_SAME * len(same):
            return []
        opcodes: list[Opcode] = []
        at = 0
        for equal, lines in itertools.groupby(same):
            end = at + sum(1 for _ in lines)
            opcodes.append(("equal" if equal else "replace", at, end, at, end))
            at = end
        return opcodes

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> difflib.Match:
        """Find the longest match. After `_MAX_LOOKED_AT` pairs the search stops, because frequent lines would take
        hours."""
        self._left -= self._pairs[-1 if ahi is None else ahi] - self._pairs[alo]
        if self._left < 0:
            return difflib.Match(alo, blo, 0)
        return super().find_longest_match(alo, ahi, blo, bhi)

    def get_opcodes(self) -> list[Opcode]:
        """Return the edit script of the whole texts. A changed part that is too large to compare becomes one
        replacement."""
        old_end, new_end = (size - self._tail for size in self._sizes)
        if self._too_large:
            inner: list[Opcode] = [("replace", self._head, old_end, self._head, new_end)]
        else:
            shift = self._head
            opcodes = self._line_by_line() or super().get_opcodes()
            inner = [(kind, a + shift, b + shift, c + shift, d + shift) for kind, a, b, c, d in opcodes]
        head: list[Opcode] = [("equal", 0, self._head, 0, self._head)] if self._head else []
        tail: list[Opcode] = [("equal", old_end, self._sizes[0], new_end, self._sizes[1])] if self._tail else []
        return head + inner + tail


def _common(a: list[str], b: list[str]) -> int:
    pairs = zip(a, b, strict=False)
    return next((index for index, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _range(start: int, end: int) -> str:
    """Return a hunk range in the form of `diff -u`: an empty range names the line before it."""
    if end - start == 1:
        return str(start + 1)
    return f"{start + 1 if end > start else start},{end - start}"
