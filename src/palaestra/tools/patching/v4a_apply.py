"""Apply a V4A patch to the texts of its files, in memory.

Not for writing files: the caller writes all results or none.

Invariant: `apply_patch` gives all new contents or raises `PatchError`. A change whose place is not certain is an error,
never the first hit; context lines stay exactly as the file has them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from palaestra.tools.patching.suggest import places
from palaestra.tools.patching.v4a_parse import FileChange, Hunk, PatchError

_MAX_LINES_LOOKED_AT = 20_000_000
"""Lines of the file times changes of the patch: so much is looked through at most."""


def apply_patch(changes: Sequence[FileChange], contents: Mapping[str, str | None]) -> dict[str, str | None]:
    """What each touched path holds afterwards; None means that it is gone.

    `contents` has the present text of every path the patch names (line ends are \\n), None where there is no file.
    Raises `PatchError` for the first change that does not fit.
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
        results[change.path] = None
        if change.action != "delete":
            results[change.target or change.path] = _updated(change, before)
    return results


def _refuse_existing(path: str, contents: Mapping[str, str | None]) -> None:
    if contents.get(path) is not None:
        raise PatchError(f"{path} exists already; update it instead, or delete it first")


def _updated(change: FileChange, before: str) -> str:
    ends_line = before.endswith("\n") or not before
    lines = before.removesuffix("\n").split("\n") if before else []
    if len(lines) * len(change.hunks) > _MAX_LINES_LOOKED_AT:
        raise PatchError(f"{len(change.hunks)} changes of {change.path}, of {len(lines)} lines, are too many at once")
    done: list[str] = []
    at = 0
    for number, hunk in enumerate(change.hunks, start=1):
        try:
            start = _locate(lines, at, hunk)
        except PatchError as error:
            raise PatchError(f"Change {number} of {change.path}: {error}") from None
        end = start + len(hunk.old)
        done += lines[at:start] + hunk.result(lines[start:end])
        at = end
    done += lines[at:]
    return "\n".join(done) + ("\n" if ends_line and done else "")


def _locate(lines: list[str], at: int, hunk: Hunk) -> int:
    """The line index where the hunk goes, not before `at`. Raises `PatchError` unless it is certain."""
    below = _below_anchors(lines, at, hunk.anchors)
    if not hunk.old:
        return _insertion(lines, below, hunk)
    found = _places(lines, at, hunk)
    if hunk.anchors:
        # the line an anchor names may itself be the first line of the change
        nexts = {_first(found, start - 1) for start in below}
        found = sorted(place for place in nexts if place is not None)
    if not found:
        raise PatchError(_not_found(lines, hunk))
    if len(found) > 1:
        raise PatchError(f"its lines occur more than once ({_at(found)}); add context, or an @@ line that is unique")
    return found[0]


def _insertion(lines: list[str], below: list[int], hunk: Hunk) -> int:
    """Where lines go that come without any context."""
    if hunk.at_end or not lines:
        return len(lines)
    if not hunk.anchors:
        raise PatchError("added lines need context lines or an @@ line that says where they go")
    if len(below) > 1:
        raise PatchError(f"the @@ line occurs more than once ({_at([start - 1 for start in below])}); add context")
    return below[0]


def _below_anchors(lines: list[str], at: int, anchors: Sequence[str]) -> list[int]:
    """The indices just below every place where the anchors occur one after the other."""
    starts: list[int] | None = None
    for anchor in anchors:
        found = _anchor_places(lines, at, anchor)
        if starts is None:
            nexts: set[int | None] = set(found)
        else:
            nexts = {_first(found, start) for start in starts}
        starts = sorted(place + 1 for place in nexts if place is not None)
        if not starts:
            raise PatchError(f"the @@ line {anchor!r} is not in the file, or not below what comes before it")
    return [at] if starts is None else starts


def _first(found: Sequence[int], start: int) -> int | None:
    """The first of places in order that is not before `start`."""
    index = bisect_left(found, start)
    return found[index] if index < len(found) else None


def _anchor_places(lines: list[str], at: int, anchor: str) -> list[int]:
    """Lines that the anchor names: equal, equal but for white space, or beginning with it, the first that hits."""
    bare = anchor.strip()
    tests: tuple[Callable[[str], bool], ...] = (
        lambda line: line == anchor,
        lambda line: line.strip() == bare,
        lambda line: line.strip().startswith(bare),
    )
    hits = ([index for index in range(at, len(lines)) if test(lines[index])] for test in tests)
    return next((found for found in hits if found), [])


def _places(lines: list[str], at: int, hunk: Hunk) -> list[int]:
    """Where the old lines are, by the strictest comparison that finds them anywhere."""
    old = hunk.old
    for same in _SAME:
        found = places([same(line) for line in lines], [same(line) for line in old], at)
        if hunk.at_end:
            found = [index for index in found if index + len(old) == len(lines)]
        if found:
            return found
    return []


def _not_found(lines: list[str], hunk: Hunk) -> str:
    shown = "\n".join(hunk.old[:5])
    where = " at its end" if hunk.at_end else ""
    return f"these lines are not in the file{where} in this order ({len(lines)} lines; read it again):\n{shown}"


def _at(indices: Sequence[int]) -> str:
    more = ", …" if len(indices) > 10 else ""
    return f"at lines {', '.join(str(index + 1) for index in indices[:10])}{more}"


_SAME: tuple[Callable[[str], str], ...] = (str, str.rstrip, str.strip)
