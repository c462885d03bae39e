"""Cuts a layer down to a view: keeps only some of its paths, and leaves out some paths below these. Everywhere else,
the stack below shows.

Grading depends on the view, so the layer must not decide where a path leads:

- Paths are resolved in the stack *below* (the snapshot the agent started from), whose links are trusted. If the layer
changes a link on the way, that change is left out too; otherwise the layer could lead the path elsewhere.

- If the layer turned a parent of a left-out path into a link or a file, the change of that parent is left out as a
whole.

- If the layer replaced (opaque) or deleted a parent of a left-out path, the parent's entries in the stack below stay
hidden, except for the left-out path.

Cutting renames entries, removes marks and adds whiteouts. The cost grows with the number of named paths and the size of
the directories on the way to them, not with the number of files in the layer.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .layer_store import copy_attributes
from .overlay import MAX_DEPTH, OverlayMarks, Stack, StackedRoot

_MAX_LINKS = 40

_MAX_PATH_BYTES = 4096  # the longest path that the kernel accepts, including the final NUL


@dataclass(frozen=True, slots=True)
class Selection:
    """The paths of a root that a view shows: everything under `only` except `without`. The paths are resolved and have
    no leading slash."""

    only: tuple[str, ...]
    without: tuple[str, ...]

    @staticmethod
    def resolved(only: Iterable[str], without: Iterable[str], below: StackedRoot) -> Selection:
        """Return the selection for these paths, resolved in the root below."""
        left_out: list[str] = []
        for path in without:
            target, links = resolve(path, below)
            left_out += [*links, target]
        return Selection(tuple(resolve(path, below)[0] for path in only), tuple(dict.fromkeys(left_out)))

    def within(self, tree: str) -> Selection:
        """Return the part of the selection in one tree, relative to the tree. A path above the tree means the whole
        tree."""
        return Selection(_relative_to(tree, self.only), _relative_to(tree, self.without))


def _relative_to(tree: str, paths: Iterable[str]) -> tuple[str, ...]:
    found = []
    for path in paths:
        if not path or tree == path or tree.startswith(f"{path}/"):
            found.append("")
        elif not tree or path.startswith(f"{tree}/"):
            found.append(path[len(tree) :].lstrip("/"))
    return tuple(dict.fromkeys(found))


def resolve(path: str, below: StackedRoot) -> tuple[str, list[str]]:
    """Return a path with the root's links followed, and these links. A link in the last component is not followed. At
    most `_MAX_LINKS` links are followed, so that a loop of links ends."""
    links: list[str] = []
    done: list[str] = []
    pending = _path_names(path)
    while pending:
        name = pending.pop(0)
        if name == "..":
            done = done[:-1]
            continue
        done.append(name)
        entry = below.find("/".join(done)) if pending else None
        if entry is not None and stat.S_ISLNK(entry.status.st_mode) and len(links) < _MAX_LINKS:
            links.append("/".join(done))
            target = os.readlink(entry.path)
            done = [] if target.startswith("/") else done[:-1]
            pending = _path_names(target) + pending
    return "/".join(done), links


def _path_names(path: str) -> list[str]:
    return [name for name in path.split("/") if name and name != "."]


class OverlayCut:
    """Cuts one tree of a layer. Removed entries go to `trash`, an empty directory on the same file system."""

    def __init__(self, layer: str, below: Stack, marks: OverlayMarks, trash: str) -> None:
        self._layer, self._below, self._marks, self._trash = layer, below, marks, trash
        self._dropped = 0

    def keep_only(self, paths: Sequence[str]) -> None:
        """Keep only these paths of the layer, with everything under them."""
        if "" in paths:
            return
        old = self._drop_all()
        kept: list[str] = []
        for path in sorted(paths):
            if not any(path == other or path.startswith(f"{other}/") for other in kept):
                kept.append(path)
                self._graft(old, path)

    def leave_out(self, path: str) -> None:
        """Make the layer show the entry of the stack below at `path`."""
        if not path:
            self._drop_all()
            return
        names = path.split("/")
        wanted = self._below.find(path) is not None
        for index in range(1, len(names)):
            parent = "/".join(names[:index])
            if not self._open_up(f"{self._layer}/{parent}", parent, names[index], wanted):
                return
        if _lstat(f"{self._layer}/{path}") is not None:
            self._move_to_trash(path)

    def _drop_all(self) -> str:
        """Replace the layer by an empty directory like the one in the stack below; returns the path of the old
        layer."""
        old = f"{self._trash}/{self._dropped}"
        self._dropped += 1
        os.rename(self._layer, old)
        os.mkdir(self._layer)
        self._like_below(self._layer, "", old)
        return old

    def _graft(self, old: str, path: str) -> None:
        names = path.split("/")
        source, hidden = old, False
        for index, name in enumerate(names):
            hidden = hidden or self._marks.is_opaque(source)
            source = f"{source}/{name}"
            status = _lstat(source)
            last = index == len(names) - 1
            if status is None or (not last and not stat.S_ISDIR(status.st_mode)):
                if (hidden or status is not None) and self._below.find(path) is not None:
                    self._make_parents(path, old)
                    OverlayMarks.whiteout(f"{self._layer}/{path}")
                return
        self._make_parents(path, old)
        target = f"{self._layer}/{path}"
        os.rename(source, target)
        # A parent that hid this directory's counterpart below is gone now, so the directory must hide it by itself.
        if hidden and stat.S_ISDIR(os.lstat(target).st_mode):
            self._marks.set_opaque(target, True)

    def _make_parents(self, path: str, old: str) -> None:
        names = path.split("/")
        for count in range(1, len(names)):
            parent = "/".join(names[:count])
            if _lstat(f"{self._layer}/{parent}") is None:
                os.mkdir(f"{self._layer}/{parent}")
                self._like_below(f"{self._layer}/{parent}", parent, f"{old}/{parent}")

    def _open_up(self, directory: str, path: str, passage: str, wanted: bool) -> bool:
        """Make the name `passage` in a directory show the entry below, if that is `wanted`. Returns False if no further
        change is needed for the path."""
        status = _lstat(directory)
        if status is None:
            return False
        if OverlayMarks.is_whiteout(status):
            if not wanted:
                return False
            os.unlink(directory)
            os.mkdir(directory)
            self._like_below(directory, path, directory)
            self._hide_below(directory, path, passage)
        elif not stat.S_ISDIR(status.st_mode):
            self._move_to_trash(path)
            return False
        elif wanted and self._marks.is_opaque(directory):
            self._hide_below(directory, path, passage)
            self._marks.set_opaque(directory, False)
        return True

    def _hide_below(self, directory: str, path: str, passage: str) -> None:
        """Hide each entry of the stack below with a separate mark, instead of all entries with one opaque mark. The
        entry `passage` is not hidden."""
        for name in self._below.names(path):
            child = f"{directory}/{name}"
            status = _lstat(child)
            if status is None:
                if name != passage:
                    OverlayMarks.whiteout(child)
            elif stat.S_ISDIR(status.st_mode):
                self._marks.set_opaque(child, True)

    def _move_to_trash(self, path: str) -> None:
        os.rename(f"{self._layer}/{path}", f"{self._trash}/{self._dropped}")
        self._dropped += 1

    def _like_below(self, directory: str, path: str, otherwise: str) -> None:
        entry = self._below.find(path)
        status = entry.status if entry is not None else _lstat(otherwise)
        if status is not None and stat.S_ISDIR(status.st_mode):
            copy_attributes(status, directory)


def duplicate_tree(source: str, target: str, depth: int = 0) -> None:
    """Make a second tree of the same files (hard links), which can be cut while the first one is in use. Entries that
    are nested more deeply than `MAX_DEPTH`, or too deeply for a path, are left out, so that an agent's work can still
    be graded."""
    os.mkdir(target)
    for entry in os.scandir(source):
        other = f"{target}/{entry.name}"
        if max(len(os.fsencode(entry.path)), len(os.fsencode(other))) >= _MAX_PATH_BYTES:
            continue
        if not entry.is_dir(follow_symlinks=False):
            os.link(entry.path, other, follow_symlinks=False)
        elif depth < MAX_DEPTH:
            duplicate_tree(entry.path, other, depth + 1)
    status = os.lstat(source)
    for name in os.listxattr(source, follow_symlinks=False):
        os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    copy_attributes(status, target)
    # Last, because every entry that is made changes the time of its directory.
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
