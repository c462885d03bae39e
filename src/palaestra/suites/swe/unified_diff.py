"""Unified diffs: read, write, reverse. Applying them to texts is in `edits.py`.

This is for diffs that must mean one thing: the bug of a task, its reference solution, the tests it brings. There is no
fuzz and no offset search; a diff that does not fit is an error. Binary patches are refused.

Format: the output of `git diff`, as in git-diff(1) "Generating patch text". Lines keep their own ends, so CRLF files
and files without a last newline come out as they went in. Bytes are carried as text by `surrogateescape`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from palaestra.suites.swe.diff_names import DiffError, header_paths, label, path_field, quote, unquote

__all__ = ["DiffError", "FileDiff", "Hunk", "parse", "render", "reverse", "split_lines"]

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\"


@dataclass(frozen=True, slots=True)
class Hunk:
    """One changed region. `lines` are (sign, text) with sign one of " -+"; text keeps its line end, if it has one.

    Line numbers are 1-based; for an empty side they name the line before, as the format has it.
    """

    old_start: int
    new_start: int
    lines: tuple[tuple[str, str], ...]

    @property
    def old(self) -> tuple[str, ...]:
        return tuple(text for sign, text in self.lines if sign != "+")

    @property
    def new(self) -> tuple[str, ...]:
        return tuple(text for sign, text in self.lines if sign != "-")

    def reversed(self) -> Hunk:
        """The hunk that undoes this one, removed lines before added ones."""
        swapped = [({"+": "-", "-": "+"}.get(sign, sign), text) for sign, text in self.lines]
        return Hunk(self.new_start, self.old_start, tuple(_removals_first(swapped)))


@dataclass(frozen=True, slots=True)
class FileDiff:
    """What happens to one file. `old_path` is None for a new file, `new_path` None for a deleted one. Modes are octal
    text ("100755") where the diff says them."""

    old_path: str | None
    new_path: str | None
    hunks: tuple[Hunk, ...] = ()
    old_mode: str | None = None
    new_mode: str | None = None

    @property
    def path(self) -> str:
        """Where the file is afterwards, or was if it is deleted."""
        path = self.new_path if self.new_path is not None else self.old_path
        assert path is not None
        return path

    @property
    def renamed(self) -> bool:
        return None not in (self.old_path, self.new_path) and self.old_path != self.new_path

    def reversed(self) -> FileDiff:
        """The change that undoes this one."""
        hunks = tuple(hunk.reversed() for hunk in self.hunks)
        return FileDiff(self.new_path, self.old_path, hunks, self.new_mode, self.old_mode)


def parse(text: str) -> tuple[FileDiff, ...]:
    """Read a diff. Raises `DiffError` when there is no change in it, or it is torn or binary."""
    files = tuple(_files(split_lines(text)))
    if not files:
        raise DiffError("not a unified diff: no file header found")
    return files


def render(files: tuple[FileDiff, ...]) -> str:
    """Write a diff in git's form, so that `git apply` and `parse` read it."""
    return "".join(part for file in files for part in _render_file(file))


def reverse(text: str) -> str:
    """The diff that undoes this one."""
    return render(tuple(file.reversed() for file in parse(text)))


def split_lines(text: str) -> list[str]:
    """Lines with their ends, split at newlines alone: a form feed or a lone CR is part of its line."""
    lines = text.split("\n")
    whole = [line + "\n" for line in lines[:-1]]
    return [*whole, lines[-1]] if lines[-1] else whole


def _files(lines: list[str]) -> Iterator[FileDiff]:
    index = 0
    while index < len(lines):
        if lines[index].startswith("diff --git "):
            file, index = _git_file(lines, index)
            yield file
        elif lines[index].startswith("--- ") and lines[index + 1 : index + 2] and lines[index + 1].startswith("+++ "):
            old, new = path_field(lines[index][4:]), path_field(lines[index + 1][4:])
            hunks, index = _hunks(lines, index + 2)
            yield FileDiff(old, new, hunks)
        else:
            index += 1


def _git_file(lines: list[str], index: int) -> tuple[FileDiff, int]:
    old, new = header_paths(lines[index])
    file = FileDiff(old, new)
    index += 1
    while index < len(lines) and not lines[index].startswith(("diff --git ", "@@ ")):
        file = _extended(file, lines[index])
        index += 1
        if lines[index - 1].startswith("+++ "):
            break
    hunks, index = _hunks(lines, index)
    return replace(file, hunks=hunks), index


def _extended(file: FileDiff, line: str) -> FileDiff:
    """Take in one line between `diff --git` and the first hunk."""
    key, _, value = line.rstrip("\r\n").partition(" mode ")
    if key in ("old", "deleted file"):
        file = replace(file, old_mode=value)
    if key in ("new", "new file"):
        file = replace(file, new_mode=value)
    if key == "new file":
        file = replace(file, old_path=None)
    if key == "deleted file":
        file = replace(file, new_path=None)
    if line.startswith("rename from "):
        file = replace(file, old_path=unquote(line[len("rename from ") :].rstrip("\r\n")))
    if line.startswith("rename to "):
        file = replace(file, new_path=unquote(line[len("rename to ") :].rstrip("\r\n")))
    if line.startswith("--- ") and not file.renamed:
        file = replace(file, old_path=path_field(line[4:]))
    if line.startswith("+++ ") and not file.renamed:
        file = replace(file, new_path=path_field(line[4:]))
    if line.startswith(("GIT binary patch", "Binary files ", "copy from ")):
        raise DiffError(f"{file.path}: binary patches and copies are not supported")
    return file


def _hunks(lines: list[str], index: int) -> tuple[tuple[Hunk, ...], int]:
    hunks = []
    while index < len(lines) and (header := _HUNK.match(lines[index])):
        old_left, new_left = (int(header[group] if header[group] is not None else 1) for group in (2, 4))
        body: list[tuple[str, str]] = []
        index += 1
        while old_left or new_left:
            if index >= len(lines):
                raise DiffError(f"torn hunk: {old_left} old and {new_left} new lines are missing at the end")
            sign, text = _body_line(lines[index])
            if sign == _NO_NEWLINE:
                _strip_newline(body)
            else:
                body.append((sign, text))
                old_left -= sign != "+"
                new_left -= sign != "-"
            index += 1
        if index < len(lines) and lines[index].startswith(_NO_NEWLINE):
            _strip_newline(body)
            index += 1
        hunks.append(Hunk(int(header[1]), int(header[3]), tuple(body)))
    return tuple(hunks), index


def _body_line(line: str) -> tuple[str, str]:
    if line in ("\n", "\r\n"):  # mailers strip the space of an empty context line
        return " ", line
    if line[0] not in " -+\\":
        raise DiffError(f"unexpected line in a hunk: {line[:60]!r}")
    text = line[1:]
    return line[0], text if text.endswith("\n") else text + "\n"


def _strip_newline(body: list[tuple[str, str]]) -> None:
    if not body:
        raise DiffError("a no-newline mark before any line")
    sign, text = body[-1]
    body[-1] = (sign, text.removesuffix("\n"))


def _render_file(file: FileDiff) -> Iterator[str]:
    old = file.old_path if file.old_path is not None else file.path
    new = file.new_path if file.new_path is not None else file.path
    yield f"diff --git {quote('a/' + old)} {quote('b/' + new)}\n"
    if file.old_path is None:
        yield f"new file mode {file.new_mode or '100644'}\n"
    elif file.new_path is None:
        yield f"deleted file mode {file.old_mode or '100644'}\n"
    elif file.old_mode and file.new_mode and file.old_mode != file.new_mode:
        yield f"old mode {file.old_mode}\nnew mode {file.new_mode}\n"
    if file.renamed:
        yield f"rename from {quote(old)}\nrename to {quote(new)}\n"
    if file.hunks:
        yield f"--- {label('a/', file.old_path)}\n+++ {label('b/', file.new_path)}\n"
    for hunk in file.hunks:
        yield f"@@ -{hunk.old_start},{len(hunk.old)} +{hunk.new_start},{len(hunk.new)} @@\n"
        for sign, text in hunk.lines:
            yield sign + text if text.endswith("\n") else f"{sign}{text}\n\\ No newline at end of file\n"


def _removals_first(lines: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Within each changed run, minus lines before plus lines, as tools write them."""
    run: list[tuple[str, str]] = []
    for line in lines:
        if line[0] != " ":
            run.append(line)
            continue
        yield from sorted(run, key=lambda item: item[0] == "+")
        run = []
        yield line
    yield from sorted(run, key=lambda item: item[0] == "+")
