"""The unified diff of an edit, bounded in length and in the time it takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

MAX_DIFF_CHARS = 20_000
"""How much of a diff a reply carries."""
_MAX_COMPARED_LINES = 3_000
_CONTEXT = 3


def unified_diff(before: str | None, after: str | None, path: str) -> str:
    """How `path` changed, in git's notation; None stands for no file. Cut beyond `MAX_DIFF_CHARS`, visibly."""
    old_name = "/dev/null" if before is None else f"a/{path}"
    new_name = "/dev/null" if after is None else f"b/{path}"
    old, new = _lines(before), _lines(after)
    hunks = "".join(_hunks(old, new))
    if before == after:
        return ""
    diff = f"--- {old_name}\n+++ {new_name}\n{hunks}"
    if len(diff) <= MAX_DIFF_CHARS:
        return diff
    kept = diff[:MAX_DIFF_CHARS].rpartition("\n")[0]
    return f"{kept}\n... [diff cut: {len(diff) - len(kept)} more characters] ...\n"


def _lines(text: str | None) -> list[str]:
    """Lines with their ends; split at line feeds alone, as every other tool counts them."""
    if not text:
        return []
    lines = [line + "\n" for line in text.split("\n")]
    if lines[-1] == "\n":
        return lines[:-1]
    lines[-1] += "\\ No newline at end of file\n"
    return lines


def _hunks(old: list[str], new: list[str]) -> Iterator[str]:
    """Hunks of the part that changed; equal head and tail are never compared in depth."""
    head = _common(old, new)
    tail = _common(old[head:][::-1], new[head:][::-1])
    head, tail = max(0, head - _CONTEXT), max(0, tail - _CONTEXT)
    inner_old, inner_new = old[head : len(old) - tail], new[head : len(new) - tail]
    if len(inner_old) + len(inner_new) > _MAX_COMPARED_LINES:
        groups = [[("replace", 0, len(inner_old), 0, len(inner_new))]]
    else:
        groups = list(difflib.SequenceMatcher(None, inner_old, inner_new, autojunk=False).get_grouped_opcodes(_CONTEXT))
    for group in groups:
        first, last = group[0], group[-1]
        old_range = _range(head + first[1], last[2] - first[1])
        new_range = _range(head + first[3], last[4] - first[3])
        yield f"@@ -{old_range} +{new_range} @@\n"
        for kind, old_start, old_end, new_start, new_end in group:
            if kind == "equal":
                yield from (" " + line for line in inner_old[old_start:old_end])
                continue
            yield from ("-" + line for line in inner_old[old_start:old_end])
            yield from ("+" + line for line in inner_new[new_start:new_end])


def _common(a: list[str], b: list[str]) -> int:
    pairs = zip(a, b, strict=False)
    return next((index for index, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _range(start: int, length: int) -> str:
    """A hunk range as `diff -u` writes it: an empty one names the line before it."""
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"
