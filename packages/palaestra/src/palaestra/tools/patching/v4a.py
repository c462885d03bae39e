"""Reads V4A patches, the `*** Begin Patch` format that several models are trained to write, and applies them in memory.

    *** Begin Patch
    *** Add File: path            every following line starts with +
    *** Delete File: path
    *** Move File: old -> new
    *** Update File: path         optionally followed by: *** Move to: new path
    @@ a line above the change    (optional; where to look, may be repeated to narrow down)
     context
    -removed
    +added
    *** End of File               (optional: the change is at the end of the file)
    *** End Patch

The position of a change is found by its text; line numbers are ignored. The caller writes the files.

Invariant: a patch is applied completely, or it raises `PatchError`, for example if it was cut off before its end. A
change that could apply at several places is an error; context lines stay exactly as the file has them.
Source: the apply_patch format of OpenAI's published prompting guide for GPT-4.1; `Move File` is a common dialect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from palaestra.tools.patching.lines import Reindent, carriage_return, places

BEGIN, END, END_OF_FILE = "*** Begin Patch", "*** End Patch", "*** End of File"
_ADD, _UPDATE, _DELETE = "*** Add File: ", "*** Update File: ", "*** Delete File: "
_MOVE_FILE, _MOVE_TO = "*** Move File: ", "*** Move to: "


class PatchError(ValueError):
    """The patch cannot be read or does not fit the files. No part of the patch was applied."""


@dataclass(slots=True)
class PatchHunk:
    """One change, somewhere below its `anchors`. `lines` are pairs of a mark (' ', '-' or '+') and a line."""

    anchors: list[str] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    at_end: bool = False

    @property
    def old(self) -> list[str]:
        """The lines that must be in the file: context and removed lines."""
        return [line for mark, line in self.lines if mark != "+"]

    def replacement(self, real: Sequence[str]) -> list[str]:
        """Return the lines that replace `real`, the lines found for `old`. Context stays exactly as the file has it."""
        reindent, end = Reindent.between(self.old, real), carriage_return(real)
        rest = iter(real)
        done = []
        for mark, line in self.lines:
            kept = reindent.apply(line) + end if mark == "+" else next(rest)
            if mark != "-":
                done.append(kept)
        return done


@dataclass(slots=True)
class FileChange:
    """The change of one file. `action` is add, update, delete or move; `target` is the new path of a moved file."""

    action: str
    path: str
    target: str | None = None
    added: list[str] = field(default_factory=list)
    hunks: list[PatchHunk] = field(default_factory=list)


def parse_patch(patch: str) -> list[FileChange]:
    """Return the file changes of a patch, in order. Raises `PatchError`."""
    lines = patch.replace("\r\n", "\n").strip("\n").split("\n")
    if lines[0].strip() != BEGIN:
        raise PatchError(f"A patch must start with the line '{BEGIN}', got {lines[0][:80]!r}")
    if lines[-1].strip() != END:
        raise PatchError(f"A patch must end with the line '{END}': this one is incomplete and was not applied")
    changes: list[FileChange] = []
    for number, line in enumerate(lines[1:-1], start=2):
        if not line and lines[number].startswith("*** "):
            continue  # an empty line before the next header
        try:
            _take_line(changes, line)
        except PatchError as error:
            raise PatchError(f"Patch line {number}: {error}") from None
    _check_changes(changes)
    return changes


def _take_line(changes: list[FileChange], line: str) -> None:
    if line.startswith("*** ") and line.strip() != END_OF_FILE:
        _take_header(changes, line)
    # Models often begin a patch with an empty line.
    elif not changes:
        if line.strip():
            raise PatchError(f"expected a '*** … File: ' line, got {line[:80]!r}")
    elif changes[-1].action == "add":
        if not line.startswith("+"):
            raise PatchError("every line of an added file must start with '+'")
        changes[-1].added.append(line[1:])
    elif changes[-1].action == "update":
        _take_hunk_line(changes[-1].hunks, line)
    elif line.strip():
        raise PatchError(f"only the next file may follow '{changes[-1].action}', got {line[:80]!r}")


def _take_header(changes: list[FileChange], line: str) -> None:
    if line.startswith(_MOVE_TO):
        if not changes or changes[-1].action != "update" or changes[-1].hunks:
            raise PatchError("'*** Move to: ' belongs directly below '*** Update File: '")
        changes[-1].target = line.removeprefix(_MOVE_TO).strip()
        return
    if line.startswith(_MOVE_FILE):
        old, arrow, new = line.removeprefix(_MOVE_FILE).partition(" -> ")
        if not arrow:
            raise PatchError("write '*** Move File: old path -> new path'")
        changes.append(FileChange("move", old.strip(), new.strip()))
        return
    for prefix, action in ((_ADD, "add"), (_UPDATE, "update"), (_DELETE, "delete")):
        if line.startswith(prefix):
            changes.append(FileChange(action, line.removeprefix(prefix).strip()))
            return
    raise PatchError(f"unknown header {line[:80]!r}; use Add, Update, Delete or Move File")


def _take_hunk_line(hunks: list[PatchHunk], line: str) -> None:
    if line.startswith("@@"):
        # Several @@ lines in a row narrow one place down: a class, then one of its methods.
        if not hunks or hunks[-1].lines:
            hunks.append(PatchHunk())
        anchor = _anchor(line)
        if anchor:
            hunks[-1].anchors.append(anchor)
        return
    if not hunks or hunks[-1].at_end:
        hunks.append(PatchHunk())
    if line.strip() == END_OF_FILE:
        hunks[-1].at_end = True
    elif line[:1] in ("-", "+", " "):
        hunks[-1].lines.append((line[0], line[1:]))
    elif not line:  # editors strip the space of an empty context line
        hunks[-1].lines.append((" ", ""))
    else:
        raise PatchError(f"a line of a change must start with ' ', '-' or '+', got {line[:80]!r}")


def _anchor(line: str) -> str:
    """Return the text after `@@`; the ranges of a unified diff (`@@ -1,2 +1,3 @@ text`) are dropped."""
    text = line[2:].strip()
    if text.startswith("-") and "@@" in text:
        text = text.partition("@@")[2].strip()
    return text.removesuffix("@@").strip()


def _check_changes(changes: Sequence[FileChange]) -> None:
    if not changes:
        raise PatchError("The patch changes no file")
    touched: set[str] = set()
    for change in changes:
        # A set, because a move onto itself touches one path.
        for path in {change.path, change.target or change.path}:
            if not path:
                raise PatchError("A file header of the patch has no path")
            if path in touched:
                raise PatchError(f"{path} appears twice; put all changes of a file under one header")
            touched.add(path)
        if change.action == "update" and not change.hunks and change.target is None:
            raise PatchError(f"The update of {change.path} has no changes")


_MAX_LINES_LOOKED_AT = 20_000_000
"""A file is searched only if the product of its number of lines and its number of changes is at most this limit."""


def apply_patch(changes: Sequence[FileChange], contents: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the new text of each touched path; None if the file is removed.

    `contents` has the current text of every path that the patch names, with \\n as line ends, or None for a missing
    file. Raises `PatchError` for the first change that does not fit.
    """
    results: dict[str, str | None] = {}
    for change in changes:
        before = contents.get(change.path)
        if change.action == "add":
            _refuse_existing(change.path, contents)
            results[change.path] = "".join(line + "\n" for line in change.added)
            continue
        if before is None:
            raise PatchError(f"{change.path} does not exist")
        if change.target is not None:
            _refuse_existing(change.target, contents)
        # An update in place replaces this value below.
        results[change.path] = None
        if change.action != "delete":
            results[change.target or change.path] = _updated(change, before)
    return results


def _refuse_existing(path: str, contents: Mapping[str, str | None]) -> None:
    if contents.get(path) is not None:
        raise PatchError(f"{path} already exists; update it instead, or delete it first")


def _updated(change: FileChange, before: str) -> str:
    ends_line = before.endswith("\n") or not before
    lines = before.removesuffix("\n").split("\n") if before else []
    if len(lines) * len(change.hunks) > _MAX_LINES_LOOKED_AT:
        raise PatchError(f"{len(change.hunks)} changes are too many for {change.path}, which has {len(lines)} lines")
    done: list[str] = []
    at = 0
    for number, hunk in enumerate(change.hunks, start=1):
        try:
            start = _locate(lines, at, hunk)
        except PatchError as error:
            raise PatchError(f"Change {number} of {change.path}: {error}") from None
        end = start + len(hunk.old)
        done += lines[at:start] + hunk.replacement(lines[start:end])
        at = end
    done += lines[at:]
    return "\n".join(done) + ("\n" if ends_line and done else "")


def _locate(lines: list[str], at: int, hunk: PatchHunk) -> int:
    """Return the only line index, at or after `at`, where the hunk fits. Raises `PatchError` if there is none or more
    than one."""
    below = _below_anchors(lines, at, hunk.anchors)
    if not hunk.old:
        return _insertion(lines, below, hunk)
    found = _matching_lines(lines, at, hunk)
    if hunk.anchors:
        # the anchor's line may itself be the first line of the change
        nexts = {_first_from(found, start - 1) for start in below}
        found = sorted(place for place in nexts if place is not None)
    if not found:
        raise PatchError(_not_found(lines, hunk))
    if len(found) > 1:
        raise PatchError(f"its lines occur more than once ({_at(found)}); add context, or an @@ line that is unique")
    return found[0]


def _insertion(lines: list[str], below: list[int], hunk: PatchHunk) -> int:
    """Return the line index at which to insert added lines that have no context."""
    if hunk.at_end or not lines:
        return len(lines)
    if not hunk.anchors:
        raise PatchError("added lines need context lines or an @@ line that shows where they go")
    if len(below) > 1:
        raise PatchError(f"the @@ line occurs more than once ({_at([start - 1 for start in below])}); add context")
    return below[0]


def _below_anchors(lines: list[str], at: int, anchors: Sequence[str]) -> list[int]:
    """Return the index of the line below every place where the anchors occur in sequence."""
    starts: list[int] | None = None
    for anchor in anchors:
        found = _anchor_places(lines, at, anchor)
        if starts is None:
            nexts: set[int | None] = set(found)
        else:
            nexts = {_first_from(found, start) for start in starts}
        starts = sorted(place + 1 for place in nexts if place is not None)
        if not starts:
            raise PatchError(f"the @@ line {anchor!r} is not in the file below the previous change or @@ line")
    return [at] if starts is None else starts


def _first_from(found: Sequence[int], start: int) -> int | None:
    """Return the first of these sorted indices that is not less than `start`, or None."""
    index = bisect_left(found, start)
    return found[index] if index < len(found) else None


def _anchor_places(lines: list[str], at: int, anchor: str) -> list[int]:
    """Return the indices of the lines that match the anchor by the strictest of three tests that finds any. The line
    equals the anchor, equals it apart from white space at the ends, or begins with it apart from this white space."""
    bare = anchor.strip()
    tests: tuple[Callable[[str], bool], ...] = (
        lambda line: line == anchor,
        lambda line: line.strip() == bare,
        lambda line: line.strip().startswith(bare),
    )
    hits = ([index for index in range(at, len(lines)) if test(lines[index])] for test in tests)
    return next((found for found in hits if found), [])


def _matching_lines(lines: list[str], at: int, hunk: PatchHunk) -> list[int]:
    """Return the line indices where the old lines occur, by the strictest comparison that finds any."""
    old = hunk.old
    for same in _SAME:
        found = places([same(line) for line in lines], [same(line) for line in old], at)
        if hunk.at_end:
            found = [index for index in found if index + len(old) == len(lines)]
        if found:
            return found
    return []


def _not_found(lines: list[str], hunk: PatchHunk) -> str:
    shown = "\n".join(hunk.old[:5])
    where = " at its end" if hunk.at_end else ""
    return f"these lines are not in the file{where} in this order ({len(lines)} lines; read it again):\n{shown}"


def _at(indices: Sequence[int]) -> str:
    more = ", …" if len(indices) > 10 else ""
    return f"at lines {', '.join(str(index + 1) for index in indices[:10])}{more}"


_SAME: tuple[Callable[[str], str], ...] = (str, str.rstrip, str.strip)
