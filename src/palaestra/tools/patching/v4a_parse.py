"""V4A patches: reading the `*** Begin Patch` format that several models are trained to write.

    *** Begin Patch
    *** Add File: path            every following line starts with +
    *** Delete File: path
    *** Move File: old -> new
    *** Update File: path         optionally followed by: *** Move to: new path
    @@ a line above the change    (optional; says where to look, may be repeated to narrow down)
     context
    -removed
    +added
    *** End of File               (optional: the change is at the end of the file)
    *** End Patch

Not for unified diffs: line numbers mean nothing here, places are found by their text (`v4a_apply.py`).

Invariant: a patch is read whole or refused; one that was cut off before its end never applies in part.
Source: the apply_patch format of OpenAI's published prompting guide for GPT-4.1; `Move File` is a common dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from palaestra.tools.patching.reindent import Reindent, carriage_return

BEGIN, END, END_OF_FILE = "*** Begin Patch", "*** End Patch", "*** End of File"
_ADD, _UPDATE, _DELETE = "*** Add File: ", "*** Update File: ", "*** Delete File: "
_MOVE_FILE, _MOVE_TO = "*** Move File: ", "*** Move to: "


class PatchError(ValueError):
    """The patch cannot be read or does not fit; nothing of it was applied."""


@dataclass(slots=True)
class Hunk:
    """One change, somewhere below its `anchors`. `lines` are pairs of a mark (' ', '-' or '+') and a line."""

    anchors: list[str] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    at_end: bool = False

    @property
    def old(self) -> list[str]:
        """What must be in the file: context and removed lines."""
        return [line for mark, line in self.lines if mark != "+"]

    def result(self, real: Sequence[str]) -> list[str]:
        """What replaces the `real` lines that were found for `old`: context stays exactly as the file has it."""
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
    """What a patch does to one file. `action` is add, update, delete or move; `target` the new path of a moved file."""

    action: str
    path: str
    target: str | None = None
    added: list[str] = field(default_factory=list)
    hunks: list[Hunk] = field(default_factory=list)


def parse_patch(patch: str) -> list[FileChange]:
    """The file changes of a patch, in order. Raises `PatchError`."""
    lines = patch.replace("\r\n", "\n").strip("\n").split("\n")
    if lines[0].strip() != BEGIN:
        raise PatchError(f"A patch must start with the line '{BEGIN}', got {lines[0][:80]!r}")
    if lines[-1].strip() != END:
        raise PatchError(f"A patch must end with the line '{END}': this one is incomplete and was not applied")
    changes: list[FileChange] = []
    for number, line in enumerate(lines[1:-1], start=2):
        if not line and lines[number].startswith("*** "):
            continue  # an empty line that only sets off the next header
        try:
            _take_line(changes, line)
        except PatchError as error:
            raise PatchError(f"Patch line {number}: {error}") from None
    _check(changes)
    return changes


def _take_line(changes: list[FileChange], line: str) -> None:
    if line.startswith("*** ") and line.strip() != END_OF_FILE:
        _take_header(changes, line)
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
        raise PatchError(f"nothing may follow '{changes[-1].action}' but another file, got {line[:80]!r}")


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


def _take_hunk_line(hunks: list[Hunk], line: str) -> None:
    if line.startswith("@@"):
        if not hunks or hunks[-1].lines:
            hunks.append(Hunk())
        anchor = _anchor(line)
        if anchor:
            hunks[-1].anchors.append(anchor)
        return
    if not hunks or hunks[-1].at_end:
        hunks.append(Hunk())
    if line.strip() == END_OF_FILE:
        hunks[-1].at_end = True
    elif line[:1] in ("-", "+", " "):
        hunks[-1].lines.append((line[0], line[1:]))
    elif not line:  # editors strip the one space of an empty context line
        hunks[-1].lines.append((" ", ""))
    else:
        raise PatchError(f"a line of a change must start with ' ', '-' or '+', got {line[:80]!r}")


def _anchor(line: str) -> str:
    """The text after `@@`; the ranges of a unified diff (`@@ -1,2 +1,3 @@ text`) are dropped."""
    text = line[2:].strip()
    if text.startswith("-") and "@@" in text:
        text = text.partition("@@")[2].strip()
    return text.removesuffix("@@").strip()


def _check(changes: Sequence[FileChange]) -> None:
    if not changes:
        raise PatchError("The patch changes no file")
    touched: set[str] = set()
    for change in changes:
        for path in {change.path, change.target or change.path}:
            if not path:
                raise PatchError("A file header of the patch has no path")
            if path in touched:
                raise PatchError(f"{path} appears twice; put all changes of a file under one header")
            touched.add(path)
        if change.action == "update" and not change.hunks and change.target is None:
            raise PatchError(f"The update of {change.path} has no changes")
