"""Apply a diff to texts, make a diff, or convert one to the tool calls of a reference solution.

A hunk applies where its old lines are in the file, next to its line number, as `git apply` finds it: some published
patches have numbers that are a few lines off. A hunk whose old lines are not in the file is a `DiffError`.
"""

from __future__ import annotations

import difflib
import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palaestra.core.types import ToolStep
from palaestra.suites.swe.unified_diff import DiffError, DiffHunk, FileDiff, parse, render, split_lines

_PIECE = 60_000
"""The maximum number of base64 characters per command, a multiple of 4; the kernel allows 128 KiB per argument."""

MOST_STEPS = 20
"""The maximum number of tool calls for a diff with a call per hunk. A longer diff is packed into few commands, because
an agent has a maximum number of turns (by default 30)."""


def apply_to_text(file: FileDiff, before: str) -> str:
    """Return the text of one file after the change. Raises `DiffError` if a hunk does not match."""
    if file.binary:
        return file.binary[0].apply(file.path, _bytes(before)).decode("utf-8", "surrogateescape")
    lines = split_lines(before)
    result: list[str] = []
    position = 0
    for hunk, start in _placed(file, lines):
        result += [*lines[position:start], *hunk.new]
        position = start + len(hunk.old)
    return "".join([*result, *lines[position:]])


def _placed(file: FileDiff, lines: Sequence[str]) -> list[tuple[DiffHunk, int]]:
    """Return the hunks of a file with the indices of the lines at which they apply. Raises `DiffError`."""
    found: list[tuple[DiffHunk, int]] = []
    least = 0
    for hunk in file.hunks:
        start = _place(hunk, lines, least)
        if start is None:
            raise DiffError(f"{file.path}: the hunk at line {hunk.old_start} does not match the file")
        found.append((hunk, start))
        least = start + len(hunk.old)
    return found


def _place(hunk: DiffHunk, lines: Sequence[str], least: int) -> int | None:
    """Return the place of a hunk from `least` on, the nearest to its line number, or None. As in `git apply`, a hunk at
    line 1 applies only at the beginning, and one that ends without context only at the end."""
    old, size = hunk.old, len(hunk.old)
    named = hunk.old_start - 1 if old else hunk.old_start
    if named >= least and tuple(lines[named : named + size]) == old:
        return named
    if not old or hunk.old_start <= 1:
        return None
    last = len(lines) - size
    at_end = hunk.lines[-1][0] != " "
    starts = (last,) if at_end else range(least, last + 1)
    places = (at for at in starts if at >= least and lines[at] == old[0] and tuple(lines[at : at + size]) == old)
    return min(places, key=lambda at: (abs(at - named), -at), default=None)


def apply(files: tuple[FileDiff, ...], tree: Mapping[str, str]) -> dict[str, str | None]:
    """Return the new text of each changed path, or None if the file is deleted. `tree` holds the old texts. Raises
    `DiffError`."""
    changed: dict[str, str | None] = {}
    for file in files:
        if file.old_path is not None and file.old_path not in tree:
            raise DiffError(f"{file.old_path}: the file to change does not exist")
        if file.old_path is None and file.path in tree:
            raise DiffError(f"{file.path}: the new file already exists")
        before = tree[file.old_path] if file.old_path is not None else ""
        after = apply_to_text(file, before)
        if file.old_path is not None and file.old_path != file.new_path:
            changed[file.old_path] = None
        if file.new_path is not None:
            changed[file.new_path] = after
    return changed


def between(path: str, before: str, after: str) -> str:
    """Return the diff of one file, with three lines of context around each change. If nothing changes, return an empty
    string."""
    old, new = split_lines(before), split_lines(after)
    hunks = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(3):
        lines: list[tuple[str, str]] = []
        for tag, i1, i2, j1, j2 in group:
            lines += [(" " if tag == "equal" else "-", line) for line in old[i1:i2]]
            lines += [("+", line) for line in new[j1:j2] if tag != "equal"]
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        hunks.append(DiffHunk(i1 + (i2 > i1), j1 + (j2 > j1), tuple(lines)))
    return render((FileDiff(path, path, tuple(hunks)),)) if hunks else ""


@dataclass(frozen=True, slots=True)
class TextReplacement:
    """Replace the only occurrence of `old_text` with `new_text`."""

    old_text: str
    new_text: str


def replacements(file: FileDiff, before: str) -> tuple[TextReplacement, ...]:
    """Return the hunks of a changed file as replacements to make in this order.

    Each `old_text` is extended by lines around it until it occurs exactly once in the text that it changes.
    """
    found = []
    text = before
    for hunk, start in reversed(_placed(file, split_lines(before))):  # from the end: earlier places stay valid
        lines = split_lines(text)
        end = start + len(hunk.old)
        low, high = start, end
        while _occurrences(text, "".join(lines[low:high])) != 1:
            low, high = max(0, low - 1), min(len(lines), high + 1)
            if (low, high) == (0, len(lines)):
                break
        old_text = "".join(lines[low:high])
        new_text = "".join([*lines[low:start], *hunk.new, *lines[end:high]])
        found.append(TextReplacement(old_text, new_text))
        text = "".join([*lines[:low], new_text, *lines[high:]])
    return tuple(found)


def solution_steps(patch: str, texts: Mapping[str, str], repo_dir: str) -> tuple[ToolStep, ...]:
    """Return the tool calls that apply a reference solution, in order: one `patch` call per hunk or, if these would be
    more than `MOST_STEPS`, terminal commands that write whole files.

    `patch` is a diff against the agent's tree; `texts` holds the files that it changes, as the agent gets them. New
    files are written whole. Terminal commands delete and rename files, and write binary files. Raises `DiffError` if
    the diff does not match.
    """
    root, files = repo_dir.rstrip("/"), parse(patch)
    steps = tuple(step for file in files for step in _file_steps(file, texts, root))
    if len(steps) <= MOST_STEPS:
        return steps
    commands = [command for file in files for command in _commands(file, texts, root)]
    packed: list[str] = []
    for command in commands:
        if packed and len(packed[-1]) + len(command) <= _PIECE:
            packed[-1] += f" &&\n{command}"
        else:
            packed.append(command)
    return tuple(map(_shell, packed))


def _file_steps(file: FileDiff, texts: Mapping[str, str], repo_dir: str) -> list[ToolStep]:
    path = f"{repo_dir}/{file.path}"
    before, after = _before_and_after(file, texts)
    is_text = not file.binary and _is_unicode(before) and _is_unicode(after)
    if file.old_path is None and is_text:
        return [ToolStep("write_file", {"path": path, "content": after})]
    if file.new_path is None or not is_text:
        return list(map(_shell, _commands(file, texts, repo_dir)))
    steps = list(map(_shell, _renaming(file, repo_dir)))
    for each in replacements(file, before):
        arguments = {"mode": "replace", "path": path, "old_string": each.old_text, "new_string": each.new_text}
        steps.append(ToolStep("patch", arguments))
    return steps


def _before_and_after(file: FileDiff, texts: Mapping[str, str]) -> tuple[str, str]:
    """Return the text of a file before and after the change. Raises `DiffError`."""
    if file.new_path is None:
        return "", ""
    if file.old_path is not None and file.old_path not in texts:
        raise DiffError(f"{file.old_path}: the file to change does not exist")
    before = texts[file.old_path] if file.old_path is not None else ""
    return before, apply_to_text(file, before)


def _commands(file: FileDiff, texts: Mapping[str, str], repo_dir: str) -> list[str]:
    """Return the commands that make the change to a file, whatever its bytes."""
    path = f"{repo_dir}/{file.path}"
    if file.new_path is None:
        return [shlex.join(("rm", "--", path))]
    before, after = _before_and_after(file, texts)
    if file.renamed and before == after:
        return _renaming(file, repo_dir)
    folder, quoted, encoded = shlex.quote(path.rpartition("/")[0]), shlex.quote(path), b64encode(_bytes(after)).decode()
    pieces = [encoded[start : start + _PIECE] for start in range(0, len(encoded), _PIECE)]
    appending = [f"printf %s {piece} | base64 -d >> {quoted}" for piece in pieces]
    return [*_renaming(file, repo_dir), f"mkdir -p -- {folder} && : > {quoted}", *appending]


def _renaming(file: FileDiff, repo_dir: str) -> list[str]:
    if not file.renamed:
        return []
    path = f"{repo_dir}/{file.path}"
    return [
        shlex.join(("mkdir", "-p", "--", path.rpartition("/")[0])),
        shlex.join(("mv", "--", f"{repo_dir}/{file.old_path}", path)),
    ]


def _is_unicode(text: str) -> bool:
    """Return whether the text has no surrogate escapes, which a tool call cannot contain."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _shell(command: str) -> ToolStep:
    return ToolStep("terminal", {"command": command})


def _occurrences(text: str, part: str) -> int:
    """Return how often `part` occurs, overlaps included; 0 for an empty part."""
    if not part:
        return 0
    count, index = 0, text.find(part)
    while index >= 0:
        count, index = count + 1, text.find(part, index + 1)
    return count
