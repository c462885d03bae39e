"""Computes from a stack of layers the files that overlayfs would show, and the changes in one layer.

The format has two marks (kernel documentation, filesystems/overlayfs). A whiteout is a character device 0:0 and hides
the entry below. An opaque directory has the `overlay.opaque` attribute and hides the directory below. The names of
the attributes start with `trusted.`, or with `user.` if the server is not root.

Layers hold names that an agent chose, so no symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from ..files import UNFINISHED, kind_of
from ..protocol.frames import Fields

MAX_DEPTH = 400  # deeper directories are not entered; ordinary programs do not make them
_PAUSE_EVERY = 256


class OverlayMarks:
    """Reads and writes the marks of one of the two attribute families."""

    def __init__(self, user_xattrs: bool) -> None:
        self._opaque = f"{'user' if user_xattrs else 'trusted'}.overlay.opaque"

    def is_opaque(self, directory: int | str) -> bool:
        """Return whether a directory of a layer hides the one below it."""
        try:
            return os.getxattr(directory, self._opaque) == b"y"
        except OSError:
            return False

    def set_opaque(self, directory: str, opaque: bool) -> None:
        """Mark or unmark a directory."""
        if opaque:
            os.setxattr(directory, self._opaque, b"y", follow_symlinks=False)
        else:
            with contextlib.suppress(OSError):
                os.removexattr(directory, self._opaque, follow_symlinks=False)

    @staticmethod
    def is_whiteout(status: os.stat_result) -> bool:
        """Return whether an entry of a layer is a whiteout."""
        return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0

    @staticmethod
    def whiteout(path: str) -> None:
        """Make a whiteout. This needs no privilege, because the kernel lets every user make this device."""
        os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))


@dataclass(frozen=True, slots=True)
class StackEntry:
    """The visible entry at a path. If it is a directory, `directories` are the directories merged into it, topmost
    first; otherwise `directories` is empty."""

    status: os.stat_result
    path: str
    directories: tuple[str, ...] = ()


class Stack:
    """Layers of one tree, topmost first, as read-only directories."""

    def __init__(self, directories: Sequence[str], marks: OverlayMarks) -> None:
        self._marks = marks
        self._root = StackEntry(os.stat(directories[0]), directories[0], tuple(directories))

    def find(self, path: str) -> StackEntry | None:
        """Return the entry at a relative path, or None. A link in the last component is not followed; the other
        components must be directories."""
        entry: StackEntry | None = self._root
        for name in path.split("/") if path else ():
            entry = self._step(entry.directories, name) if entry is not None else None
        return entry

    def names(self, path: str) -> set[str]:
        """Return the names in a directory; empty if there is no directory at the path."""
        entry = self.find(path)
        seen: set[str] = set()
        hidden: set[str] = set()
        for directory in entry.directories if entry is not None else ():
            for child in os.scandir(directory):
                if child.name not in hidden | seen:
                    whiteout = OverlayMarks.is_whiteout(child.stat(follow_symlinks=False))
                    (hidden if whiteout else seen).add(child.name)
        return seen

    def _step(self, directories: Sequence[str], name: str) -> StackEntry | None:
        first: StackEntry | None = None
        merged: list[str] = []
        for directory in directories:
            path = f"{directory}/{name}"
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if OverlayMarks.is_whiteout(status):
                break
            if not stat.S_ISDIR(status.st_mode):
                first = first or StackEntry(status, path)
                break
            first = first or StackEntry(status, path)
            merged.append(path)
            if self._marks.is_opaque(path):
                break
        return StackEntry(first.status, first.path, tuple(merged)) if first is not None else None


class StackedRoot:
    """Finds paths in the stacks of all trees of a root. Paths have no leading slash."""

    def __init__(self, trees: Sequence[tuple[str, Stack]]) -> None:
        self.trees = sorted(((target.strip("/"), stack) for target, stack in trees), reverse=True)

    def find(self, path: str) -> StackEntry | None:
        """Return the entry at a path; links are not followed."""
        for target, stack in self.trees:
            if not target or path == target or path.startswith(f"{target}/"):
                return stack.find(path[len(target) :].lstrip("/"))
        return None


def differences(layer: str, below: Stack, marks: OverlayMarks) -> Iterator[Fields | None]:
    """Yield how a layer changes the stack below it, as objects with path, kind and opaque; None stands for a pause. The
    layer may belong to a running slot."""
    root = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield from _walk(root, "", below, marks, hidden=False, depth=0)
    finally:
        os.close(root)


def scan(directory: int) -> Generator[None, None, list[tuple[str, os.stat_result]]]:
    """Return the entries of a directory, as a job, without unfinished files. Links are not followed."""
    children: list[tuple[str, os.stat_result]] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name in UNFINISHED:
                continue
            with contextlib.suppress(FileNotFoundError):
                children.append((entry.name, entry.stat(follow_symlinks=False)))
            if len(children) % _PAUSE_EVERY == 0:
                yield None
    return children


def _walk(
    directory: int, path: str, below: Stack, marks: OverlayMarks, *, hidden: bool, depth: int
) -> Iterator[Fields | None]:
    children = yield from scan(directory)
    yield None
    for name, status in sorted(children):
        child = f"{path}/{name}" if path else name
        base = None if hidden else below.find(child)
        if OverlayMarks.is_whiteout(status):
            if base is not None:
                yield _change(child, "deleted")
        elif stat.S_ISDIR(status.st_mode):
            yield from _walk_directory(directory, name, child, status, base, below, marks, depth)
        else:
            yield _change(child, kind_of(status.st_mode))


def _walk_directory(
    parent: int,
    name: str,
    path: str,
    status: os.stat_result,
    base: StackEntry | None,
    below: Stack,
    marks: OverlayMarks,
    depth: int,
) -> Iterator[Fields | None]:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError:
        return  # a running slot has just removed it
    try:
        replaced = base is not None and (not base.directories or marks.is_opaque(fd))
        if base is None or replaced or _attributes(status) != _attributes(base.status):
            yield _change(path, "dir", replaced)
        if depth < MAX_DEPTH:
            yield from _walk(fd, path, below, marks, hidden=base is None or replaced, depth=depth + 1)
    finally:
        os.close(fd)


def _change(path: str, kind: str, opaque: bool = False) -> Fields:
    return {"path": path, "kind": kind, "opaque": opaque}


def _attributes(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mode, status.st_uid, status.st_gid
