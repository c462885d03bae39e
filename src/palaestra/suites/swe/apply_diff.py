"""Diffs against texts: apply one exactly, make one, or turn one into text replacements.

A diff is never bent to fit: where its old lines are not what is there, that is a `DiffError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from palaestra.suites.swe.unified_diff import DiffError, FileDiff, Hunk, render, split_lines


def apply_to_text(file: FileDiff, before: str) -> str:
    """The text of one file after the change. Raises `DiffError` where a hunk's old lines are not what is there."""
    lines = split_lines(before)
    result: list[str] = []
    position = 0
    for hunk in file.hunks:
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        if start < position or tuple(lines[start : start + len(hunk.old)]) != hunk.old:
            raise DiffError(f"{file.path}: the hunk at line {hunk.old_start} does not fit")
        result += [*lines[position:start], *hunk.new]
        position = start + len(hunk.old)
    return "".join([*result, *lines[position:]])


def apply(files: tuple[FileDiff, ...], tree: Mapping[str, str]) -> dict[str, str | None]:
    """The files that change, with their text afterwards; None for those that go. `tree` holds the texts before."""
    changed: dict[str, str | None] = {}
    for file in files:
        if file.old_path is not None and file.old_path not in tree:
            raise DiffError(f"{file.old_path}: there is no such file to change")
        if file.old_path is None and file.path in tree:
            raise DiffError(f"{file.path}: the file is there already")
        before = tree[file.old_path] if file.old_path is not None else ""
        after = apply_to_text(file, before)
        if file.old_path is not None and file.old_path != file.new_path:
            changed[file.old_path] = None
        if file.new_path is not None:
            changed[file.new_path] = after
    return changed


def between(path: str, before: str, after: str) -> str:
    """The diff of one file from `before` to `after`, three lines of context around each change."""
    old, new = split_lines(before), split_lines(after)
    hunks = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(3):
        lines: list[tuple[str, str]] = []
        for tag, i1, i2, j1, j2 in group:
            lines += [(" " if tag == "equal" else "-", line) for line in old[i1:i2]]
            lines += [("+", line) for line in new[j1:j2] if tag != "equal"]
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        hunks.append(Hunk(i1 + (i2 > i1), j1 + (j2 > j1), tuple(lines)))
    return render((FileDiff(path, path, tuple(hunks)),)) if hunks else ""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the one occurrence of `old_text` in the file at `path` by `new_text`."""

    path: str
    old_text: str
    new_text: str


def edits(file: FileDiff, before: str) -> tuple[Edit, ...]:
    """The hunks of a changed file as replacements to be made one after the other.

    Each `old_text` occurs exactly once in the file at its turn: lines around it are added until it does.
    """
    found = []
    text = before
    for hunk in reversed(file.hunks):  # from the end, so that line numbers above stay true
        lines = split_lines(text)
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        end = start + len(hunk.old)
        if tuple(lines[start:end]) != hunk.old:
            raise DiffError(f"{file.path}: the hunk at line {hunk.old_start} does not fit")
        low, high = start, end
        while _occurrences(text, "".join(lines[low:high])) != 1:
            low, high = max(0, low - 1), min(len(lines), high + 1)
            if (low, high) == (0, len(lines)):
                break
        old_text = "".join(lines[low:high])
        new_text = "".join([*lines[low:start], *hunk.new, *lines[end:high]])
        found.append(Edit(file.path, old_text, new_text))
        text = "".join([*lines[:low], new_text, *lines[high:]])
    return tuple(found)


def _occurrences(text: str, part: str) -> int:
    """How often `part` occurs, overlapping ones counted. An empty part never identifies a place."""
    if not part:
        return 0
    count, index = 0, text.find(part)
    while index >= 0:
        count, index = count + 1, text.find(part, index + 1)
    return count
