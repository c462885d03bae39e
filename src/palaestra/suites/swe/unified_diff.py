"""Parse, render and reverse unified diffs. `apply_diff.py` applies them to texts.

The module is for diffs that must match exactly: the bug of a task, its reference solution and its tests. Hunks are not
matched with fuzz or at an offset. Copies and binary changes without their data ("Binary files differ") are rejected.

Format: the output of `git diff --binary`, git-diff(1) "Generating patch text"; the data of binary files is described in
git's `apply.c` and gitformat-pack(5) "Deltified representation". Lines keep their own ends, so CRLF files and files
without a last newline are preserved. Bytes that are not UTF-8 become surrogate escapes.
"""

from __future__ import annotations

import re
import zlib
from base64 import b85decode
from collections.abc import Iterator
from dataclasses import dataclass, replace

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\"
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "r": "\r"}


class DiffError(ValueError):
    """A text that is not a unified diff, or a diff that does not match its file."""


@dataclass(frozen=True, slots=True)
class DiffHunk:
    """One changed region. `lines` are (sign, text) with sign one of " -+"; text keeps its line end.

    Line numbers are 1-based. If a side has no lines, its number is that of the line before, as in the format.
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

    def reversed(self) -> DiffHunk:
        """Return the hunk that undoes this hunk."""
        swapped = [({"+": "-", "-": "+"}.get(sign, sign), text) for sign, text in self.lines]
        return DiffHunk(self.new_start, self.old_start, tuple(_removals_first(swapped)))


@dataclass(frozen=True, slots=True)
class BinaryChange:
    """The new content of a binary file, whole or as a delta to the old content. `lines` are the lines of the diff that
    encode it."""

    lines: tuple[str, ...]

    def apply(self, path: str, before: bytes) -> bytes:
        """Return the new content. Raises `DiffError` if the data is damaged or is a delta to other content."""
        method, _, size = self.lines[0].strip().partition(" ")
        try:
            data = zlib.decompress(b"".join(map(_line_bytes, self.lines[1:])))
            after = data if method == "literal" else _with_delta(before, data)
        except (zlib.error, ValueError, IndexError) as error:
            raise DiffError(f"{path}: its binary change cannot be read or does not match the file: {error}") from None
        if method == "literal" and len(after) != int(size):
            raise DiffError(f"{path}: its binary change is incomplete")
        return after


@dataclass(frozen=True, slots=True)
class FileDiff:
    """The change of one file. `old_path` is None for a new file, `new_path` for a deleted one. Modes are octal text
    ("100755"), None if the diff has none."""

    old_path: str | None
    new_path: str | None
    hunks: tuple[DiffHunk, ...] = ()
    old_mode: str | None = None
    new_mode: str | None = None
    binary: tuple[BinaryChange, ...] = ()
    """The change of a binary file, and its reverse if the diff has it."""

    @property
    def path(self) -> str:
        """The path after the change, or before it if the file is deleted."""
        path = self.new_path if self.new_path is not None else self.old_path
        assert path is not None
        return path

    @property
    def renamed(self) -> bool:
        return None not in (self.old_path, self.new_path) and self.old_path != self.new_path

    def reversed(self) -> FileDiff:
        """Return the change that undoes this change. Raises `DiffError` for a binary change without its reverse."""
        hunks = tuple(hunk.reversed() for hunk in self.hunks)
        if len(self.binary) == 1:
            raise DiffError(f"{self.path}: its binary change cannot be undone without the old content")
        return FileDiff(self.new_path, self.old_path, hunks, self.new_mode, self.old_mode, self.binary[::-1])


def parse(text: str) -> tuple[FileDiff, ...]:
    """Parse a diff. Raises `DiffError` if the diff has no file header, is incomplete, or changes a binary file without
    its data."""
    files = tuple(_files(split_lines(text)))
    if not files:
        raise DiffError("not a unified diff: no file header found")
    return files


def render(files: tuple[FileDiff, ...]) -> str:
    """Render a diff that `parse` accepts. `git apply` rejects binary changes in it, because they lack object names."""
    return "".join(part for file in files for part in _render_file(file))


def reverse(text: str) -> str:
    """Return the diff that undoes `text`. Raises `DiffError`."""
    return render(tuple(file.reversed() for file in parse(text)))


def split_lines(text: str) -> list[str]:
    """Return lines with their line ends, split only at newlines. A form feed or a single CR is part of its line."""
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
            old, new = _path_field(lines[index][4:]), _path_field(lines[index + 1][4:])
            hunks, index = _hunks(lines, index + 2)
            yield FileDiff(old, new, hunks)
        else:
            index += 1


def _git_file(lines: list[str], index: int) -> tuple[FileDiff, int]:
    old, new = _header_paths(lines[index])
    file = FileDiff(old, new)
    index += 1
    while index < len(lines) and not lines[index].startswith(("diff --git ", "@@ ")):
        if lines[index].startswith("GIT binary patch"):
            binary, index = _binary(lines, index + 1)
            return replace(file, binary=binary), index
        file = _extended(file, lines[index])
        index += 1
        if lines[index - 1].startswith("+++ "):
            break
    hunks, index = _hunks(lines, index)
    return replace(file, hunks=hunks), index


def _extended(file: FileDiff, line: str) -> FileDiff:
    """Return the file's diff, extended by one of the header lines between `diff --git` and the first hunk."""
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
        file = replace(file, old_path=_unquote(line[len("rename from ") :].rstrip("\r\n")))
    if line.startswith("rename to "):
        file = replace(file, new_path=_unquote(line[len("rename to ") :].rstrip("\r\n")))
    if line.startswith("--- ") and not file.renamed:
        file = replace(file, old_path=_path_field(line[4:]))
    if line.startswith("+++ ") and not file.renamed:
        file = replace(file, new_path=_path_field(line[4:]))
    if line.startswith("Binary files "):
        raise DiffError(f"{file.path}: the patch of this binary file has no data; make it with git diff --binary")
    if line.startswith("copy from "):
        raise DiffError(f"{file.path}: copies are not supported")
    return file


def _binary(lines: list[str], index: int) -> tuple[tuple[BinaryChange, ...], int]:
    """Return the changes after "GIT binary patch": one or two, each of a header and lines up to an empty one."""
    found: list[BinaryChange] = []
    while len(found) < 2 and index < len(lines) and lines[index].startswith(("literal ", "delta ")):
        start = index
        while index < len(lines) and lines[index].strip():
            index += 1
        found.append(BinaryChange(tuple(lines[start:index])))
        index += 1
    if not found:
        raise DiffError("a binary patch without data")
    return tuple(found), index


def _line_bytes(line: str) -> bytes:
    """Return the bytes that one line encodes: a letter for their number, then base 85."""
    letter, text = line[0], line.strip()[1:]
    count = ord(letter) - (ord("A") - 1 if letter.isupper() else ord("a") - 27)
    return b85decode(text)[:count]


def _with_delta(before: bytes, delta: bytes) -> bytes:
    """Return `before`, changed by a delta: two sizes, then commands that copy a part of `before` or insert bytes."""
    position, sizes = 0, []
    for _ in range(2):
        size = shift = 0
        while True:
            byte = delta[position]
            size, shift, position = size | (byte & 0x7F) << shift, shift + 7, position + 1
            if not byte & 0x80:
                break
        sizes.append(size)
    if sizes[0] != len(before):
        raise ValueError(f"the old file has {len(before)} bytes, not {sizes[0]}")
    after = bytearray()
    while position < len(delta):
        command, position = delta[position], position + 1
        if not command & 0x80:
            after += delta[position : position + command]
            position += command
            continue
        numbers = []
        for bits in (range(4), range(4, 7)):
            number = 0
            for place, bit in enumerate(bits):
                if command & 1 << bit:
                    number, position = number | delta[position] << 8 * place, position + 1
            numbers.append(number)
        start, size = numbers[0], numbers[1] or 0x10000
        after += before[start : start + size]
    if len(after) != sizes[1]:
        raise ValueError(f"the delta makes {len(after)} bytes, not {sizes[1]}")
    return bytes(after)


def _hunks(lines: list[str], index: int) -> tuple[tuple[DiffHunk, ...], int]:
    hunks = []
    while index < len(lines) and (header := _HUNK.match(lines[index])):
        old_left, new_left = (int(header[group] if header[group] is not None else 1) for group in (2, 4))
        body: list[tuple[str, str]] = []
        index += 1
        while old_left or new_left:
            if index >= len(lines):
                raise DiffError(f"incomplete hunk: {old_left} old and {new_left} new lines are missing at the end")
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
        hunks.append(DiffHunk(int(header[1]), int(header[3]), tuple(body)))
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
        raise DiffError("a no-newline marker before any line")
    sign, text = body[-1]
    body[-1] = (sign, text.removesuffix("\n"))


def _render_file(file: FileDiff) -> Iterator[str]:
    old = file.old_path if file.old_path is not None else file.path
    new = file.new_path if file.new_path is not None else file.path
    yield f"diff --git {_quote('a/' + old)} {_quote('b/' + new)}\n"
    if file.old_path is None:
        yield f"new file mode {file.new_mode or '100644'}\n"
    elif file.new_path is None:
        yield f"deleted file mode {file.old_mode or '100644'}\n"
    elif file.old_mode and file.new_mode and file.old_mode != file.new_mode:
        yield f"old mode {file.old_mode}\nnew mode {file.new_mode}\n"
    if file.renamed:
        yield f"rename from {_quote(old)}\nrename to {_quote(new)}\n"
    if file.binary:
        yield "GIT binary patch\n"
        yield from ("".join([*change.lines, "\n"]) for change in file.binary)
    if file.hunks:
        yield f"--- {_label('a/', file.old_path)}\n+++ {_label('b/', file.new_path)}\n"
    for hunk in file.hunks:
        yield f"@@ -{hunk.old_start},{len(hunk.old)} +{hunk.new_start},{len(hunk.new)} @@\n"
        for sign, text in hunk.lines:
            yield sign + text if text.endswith("\n") else f"{sign}{text}\n\\ No newline at end of file\n"


def _removals_first(lines: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Order each changed run as tools do: removed lines before added ones."""
    run: list[tuple[str, str]] = []
    for line in lines:
        if line[0] != " ":
            run.append(line)
            continue
        yield from sorted(run, key=lambda item: item[0] == "+")
        run = []
        yield line
    yield from sorted(run, key=lambda item: item[0] == "+")


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


def _quote(name: str) -> str:
    """Return a name in Git's C-style quoting, for names with a control character, a quote, a backslash or a non-ASCII
    byte."""
    data = name.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in data):
        return name
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03o}" for b in data) + '"'


def _label(side: str, path: str | None) -> str:
    if path is None:
        return "/dev/null"
    quoted = _quote(side + path)
    return quoted + "\t" if " " in quoted and not quoted.startswith('"') else quoted
