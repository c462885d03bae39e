"""Computes from a stack of layers the files that overlayfs would show, and the changes in one layer.

The format has two marks (kernel documentation, filesystems/overlayfs). A whiteout is a character device 0:0 and hides
the entry below. An opaque directory has the `overlay.opaque` attribute and hides the directory below. The names of
the attributes start with `trusted.`, or with `user.` if the server is not root.

Layers hold names that an agent chose, so no symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from ..files import UNFINISHED, kind_of
from ..protocol.frames import Fields

MAX_DEPTH = 400  # deeper directories are not entered; ordinary programs do not make them
_PAUSE_EVERY = 256
_PIECE = 1 << 20
_RUNS = 0o7111  # the bits of a mode that decide whether and as whom a file runs


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
            entry = self.step(entry.directories, name) if entry is not None else None
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

    def step(self, directories: Sequence[str], name: str) -> StackEntry | None:
        """Return the entry of a name in directories that are merged, or None."""
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
            # An entry that is not a directory ends the merge: what is below it is hidden, and it cannot be merged
            # itself.
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
        # A target sorts after its parents, so in reverse order the innermost tree is found first.
        self.trees = sorted(((target.strip("/"), stack) for target, stack in trees), reverse=True)

    def find(self, path: str) -> StackEntry | None:
        """Return the entry at a path; links are not followed."""
        for target, stack in self.trees:
            if not target or path == target or path.startswith(f"{target}/"):
                return stack.find(path[len(target) :].lstrip("/"))
        return None


def differences(layer: str, below: Stack, marks: OverlayMarks) -> Iterator[Fields | None]:
    """Yield how a layer changes the stack below it, as objects with the fields of `Change`; None stands for a pause. An
    entry of the layer with the same content as the entry below is no change. The layer may belong to a running slot."""
    root = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield from _walk(root, "", below.find(""), below, marks, hidden=False, depth=0)
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


def content_differs(
    folder: int | None, name: str, status: os.stat_result, old_path: str, old: os.stat_result
) -> Generator[None, None, bool | None]:
    """Return, as a job, whether an entry has another kind, content or target than an older one: None if it is the same,
    and False if only its permission to run or its set-user or set-group bit differs. Owners, times and the permissions
    to read and write do not count. An entry that cannot be read counts as different.
    """
    if stat.S_IFMT(status.st_mode) != stat.S_IFMT(old.st_mode):
        return True
    try:
        if stat.S_ISLNK(status.st_mode):
            return True if os.readlink(name, dir_fd=folder) != os.readlink(old_path) else None
        if not stat.S_ISREG(status.st_mode) or status.st_size != old.st_size:
            return True
        with _reader(name, folder) as new, _reader(old_path, None) as before:
            while piece := new.read(_PIECE):
                if piece != before.read(_PIECE):
                    return True
                # A pause for each piece, because the server handles all slots in one thread.
                yield None
    except OSError:
        return True
    # Git, and the checks that read its status, see only these bits of a mode.
    return False if (status.st_mode ^ old.st_mode) & _RUNS else None


def _reader(name: str, folder: int | None) -> io.FileIO:
    return io.FileIO(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder))


def _walk(
    directory: int, path: str, base: StackEntry | None, below: Stack, marks: OverlayMarks, *, hidden: bool, depth: int
) -> Iterator[Fields | None]:
    """Yield the changes in a directory of the layer. `base` is the entry below it; if `hidden`, the directory hides the
    entries of `base`, so that one without an entry of the same name here is deleted."""
    children = dict((yield from scan(directory)))
    yield None
    # An opaque directory has no whiteouts for the entries that it hides, so these are compared by name.
    gone = below.names(path) - children.keys() if hidden and base is not None else set()
    for name in sorted(children.keys() | gone):
        child = f"{path}/{name}" if path else name
        old = below.step(base.directories, name) if base is not None else None
        # `old` is None if no layer below has the name: then a whiteout deletes nothing, and an entry is new.
        status = children.get(name)
        if status is None or OverlayMarks.is_whiteout(status):
            if old is not None:
                yield change(child, "deleted")
        elif stat.S_ISDIR(status.st_mode):
            yield from _walk_directory(directory, name, child, status, old, below, marks, hidden, depth)
        elif old is None:
            yield _change_of(child, status)
        else:
            differs = yield from content_differs(directory, name, status, old.path, old.status)
            if differs is None and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                differs = False  # what writes to its other name changes it
            if differs is not None:
                yield _change_of(child, status, content=differs)


def _walk_directory(
    parent: int,
    name: str,
    path: str,
    status: os.stat_result,
    base: StackEntry | None,
    below: Stack,
    marks: OverlayMarks,
    hidden: bool,
    depth: int,
) -> Iterator[Fields | None]:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError:
        return  # a running slot has just removed it
    try:
        replaced = base is not None and not base.directories
        if base is None or replaced or _attributes(status) != _attributes(base.status):
            yield change(path, "dir", replaced)
        if depth < MAX_DEPTH:
            hidden = hidden or marks.is_opaque(fd)
            yield from _walk(fd, path, base, below, marks, hidden=hidden, depth=depth + 1)
    finally:
        os.close(fd)


def change(path: str, kind: str, opaque: bool = False, content: bool = True) -> Fields:
    """Return a change as an object with the fields of `Change` of `sandbox/slot.py`."""
    return {"path": path, "kind": kind, "opaque": opaque, **({} if content else {"content": False})}


def _change_of(path: str, status: os.stat_result, content: bool = True) -> Fields:
    """Return the change to an entry of the layer that is not a directory."""
    found = change(path, kind_of(status.st_mode), content=content)
    # A hard link to an entry below is one within the layer, because the first link copies the entry up.
    return {**found, "single": True} if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 else found


def _attributes(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mode, status.st_uid, status.st_gid
