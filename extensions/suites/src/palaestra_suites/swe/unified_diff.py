"""Read which files a diff changes, and make the diff of one file. `repository.py` applies diffs, with git.

Format: the output of `git diff --binary`, git-diff(1) "Generating patch text", with or without git's own header lines.
Bytes that are not UTF-8 are surrogate escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "r": "\r"}


class DiffError(ValueError):
    """A text that is not a unified diff, or a diff that does not match its files."""


@dataclass(frozen=True, slots=True)
class FileDiff:
    """The paths of one changed file. `old_path` is None for a new file, `new_path` for a deleted one."""

    old_path: str | None
    new_path: str | None

    @property
    def path(self) -> str:
        """The path after the change, or before it if the file is deleted."""
        path = self.new_path if self.new_path is not None else self.old_path
        assert path is not None
        return path


def parse(text: str) -> tuple[FileDiff, ...]:
    """Return the changed files. Raises `DiffError` if the diff has no file header, is incomplete, or changes a binary
    file without its data."""
    files = tuple(_file_diffs(split_lines(text)))
    if not files:
        raise DiffError("not a unified diff: no file header found")
    return files


def between(path: str, before: str, after: str) -> str:
    """Return the diff of one file, with three lines of context around each change. If nothing changes, return an empty
    string."""
    old, new = split_lines(before), split_lines(after)
    lines: list[str] = []
    for group in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(3):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        lines.append(f"@@ -{i1 + (i2 > i1)},{i2 - i1} +{j1 + (j2 > j1)},{j2 - j1} @@\n")
        for tag, i1, i2, j1, j2 in group:
            lines += [f"{' ' if tag == 'equal' else '-'}{line}" for line in old[i1:i2]]
            lines += [f"+{line}" for line in new[j1:j2] if tag != "equal"]
    body = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n{body}" if lines else ""


def split_lines(text: str) -> list[str]:
    """Return lines with their line ends, split only at newlines. A form feed or a single CR is part of its line."""
    lines = text.split("\n")
    whole = [line + "\n" for line in lines[:-1]]
    return [*whole, lines[-1]] if lines[-1] else whole


def _file_diffs(lines: list[str]) -> Iterator[FileDiff]:
    index = 0
    while index < len(lines):
        if lines[index].startswith("diff --git "):
            file, index = _git_file(lines, index)
            yield file
        elif lines[index].startswith("--- ") and lines[index + 1 : index + 2] and lines[index + 1].startswith("+++ "):
            yield FileDiff(_path_field(lines[index][4:]), _path_field(lines[index + 1][4:]))
            index = _after_hunks(lines, index + 2)
        else:
            index += 1


def _git_file(lines: list[str], index: int) -> tuple[FileDiff, int]:
    old, new = _header_paths(lines[index])
    file = FileDiff(old, new)
    index += 1
    while index < len(lines) and not lines[index].startswith(("diff --git ", "@@ ", "GIT binary patch")):
        file = _extended(file, lines[index].rstrip("\r\n"))
        index += 1
        if lines[index - 1].startswith("+++ "):
            break
    return file, _after_hunks(lines, index)


def _extended(file: FileDiff, line: str) -> FileDiff:
    """Return the file's diff, extended by one of the header lines between `diff --git` and the first hunk."""
    if line.startswith("new file mode "):
        return replace(file, old_path=None)
    if line.startswith("deleted file mode "):
        return replace(file, new_path=None)
    if line.startswith(("rename from ", "copy from ")):
        return replace(file, old_path=_unquote(line.partition(" from ")[2]))
    if line.startswith(("rename to ", "copy to ")):
        return replace(file, new_path=_unquote(line.partition(" to ")[2]))
    if line.startswith("--- "):
        return replace(file, old_path=_path_field(line[4:]))
    if line.startswith("+++ "):
        return replace(file, new_path=_path_field(line[4:]))
    if line.startswith("Binary files "):
        raise DiffError(f"{file.path}: the patch of this binary file has no data; make it with git diff --binary")
    return file


def _after_hunks(lines: list[str], index: int) -> int:
    while index < len(lines) and (header := _HUNK.match(lines[index])):
        old_left, new_left = (1 if number is None else int(number) for number in header.groups())
        index += 1
        while old_left or new_left:
            if index >= len(lines):
                raise DiffError(f"incomplete hunk: {old_left} old and {new_left} new lines are missing at the end")
            sign = " " if lines[index] in ("\n", "\r\n") else lines[index][0]  # mailers strip the space
            if sign not in " -+\\":
                raise DiffError(f"unexpected line in a hunk: {lines[index][:60]!r}")
            old_left -= sign in " -"
            new_left -= sign in " +"
            index += 1
    return index


def _header_paths(line: str) -> tuple[str, str]:
    """Return the two paths of a `diff --git` line. Unquoted names with spaces are found because both halves are
    equal."""
    rest = line[len("diff --git ") :].rstrip("\r\n")
    if '"' in rest:
        match = re.fullmatch(r'("(?:[^"\\]|\\.)*"|.+?) ("(?:[^"\\]|\\.)*"|.+)', rest)
        if match:
            return _drop_side(_unquote(match[1])), _drop_side(_unquote(match[2]))
    half = len(rest) // 2
    if rest[half : half + 1] == " " and rest[2:half] == rest[half + 3 :]:
        return _drop_side(rest[:half]), _drop_side(rest[half + 1 :])
    old, separator, new = rest.rpartition(" b/")
    if not separator:
        raise DiffError(f"unreadable file header: {line[:80]!r}")
    return _drop_side(old), new


def _path_field(field: str) -> str | None:
    """Return the path of a `---` or `+++` line, or None if it is /dev/null. A tab and a time stamp after the path are
    ignored."""
    name = _unquote(field.rstrip("\r\n").split("\t")[0])
    return None if name == "/dev/null" else _drop_side(name)


def _drop_side(name: str) -> str:
    return name[2:] if name[:2] in ("a/", "b/") else name


def _unquote(name: str) -> str:
    """Undo git's C-style quoting of unusual names."""
    if not (len(name) > 1 and name[0] == name[-1] == '"'):
        return name
    raw = re.sub(r"\\([0-7]{3}|.)", lambda m: chr(int(m[1], 8)) if len(m[1]) == 3 else _ESCAPES.get(m[1], m[1]), name)
    try:
        return raw[1:-1].encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return raw[1:-1]
