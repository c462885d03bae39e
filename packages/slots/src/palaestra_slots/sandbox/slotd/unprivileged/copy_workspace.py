"""Works with complete copies of workspaces: copies a layer into a new slot, finds a slot's changes, and cuts a layer to
a view.

A layer here holds complete trees, not differences. Layers are never written to, so they share files by hard links; a
slot gets copies. An agent chose the names and modes in a layer, so links are never followed, and a server without root
may lack the permission to read a tree.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence

from ..files import kind_of
from ..layers.copy_tree import copy_data
from ..layers.layer_store import copy_attributes
from ..layers.overlay import MAX_DEPTH, change, content_differs
from ..protocol.frames import Fields

_Copy = Callable[[str, str], None]

_MAX_DIRECTORY_BYTES = 3600  # directories with longer paths are left out, because their copies could not be named


def duplicate(source: str, target: str) -> None:
    """Make a second tree of the same files in the new directory `target`. Both trees share the files, so neither may be
    written to afterwards."""
    _copy_tree(source, target, lambda old, new: os.link(old, new, follow_symlinks=False), owner=-1)


def copy_for(uid: int, source: str, target: str) -> None:
    """Copy a tree into the directory `target` and give the copy to a user; -1 means the caller."""
    first: dict[int, str] = {}

    def copy_one(old: str, new: str) -> None:
        status = os.lstat(old)
        known = first.setdefault(status.st_ino, new)
        if known == new:
            _copy_file(old, status, new)
        else:  # another name of the same file
            os.link(known, new, follow_symlinks=False)

    _copy_tree(source, target, copy_one, uid)


def open_up(tree: str) -> None:
    """Make the files in a tree readable to this process's user, who owns them, because an agent may have removed the
    permissions. Does nothing for root."""
    # `os.walk` lists a directory before it enters those below, so they are readable by then.
    for folder, names, files in os.walk(tree) if os.geteuid() else ():
        for name in (*names, *files):
            with contextlib.suppress(OSError):  # the entry is too deep for a path
                path = f"{folder}/{name}"
                mode = os.lstat(path).st_mode
                wanted = 0o500 if stat.S_ISDIR(mode) else 0o400
                if mode & wanted != wanted and not stat.S_ISLNK(mode):
                    os.chmod(path, stat.S_IMODE(mode) | wanted)


def move(source: str, target: str) -> None:
    """Rename an entry, even if the entry is a read-only directory, or a parent on either side is read-only."""
    mode = os.lstat(source).st_mode
    with _writable(os.path.dirname(source)), _writable(os.path.dirname(target)):
        # A move to another parent changes the entry `..`, so it needs the right to write to the directory itself.
        closed = stat.S_ISDIR(mode) and not mode & stat.S_IWUSR
        if closed:
            os.chmod(source, stat.S_IMODE(mode) | stat.S_IWUSR)
        os.rename(source, target)
        if closed:
            os.chmod(target, stat.S_IMODE(mode))


@contextlib.contextmanager
def _writable(directory: str) -> Iterator[None]:
    mode = stat.S_IMODE(os.stat(directory).st_mode)
    os.chmod(directory, mode | stat.S_IRWXU)
    try:
        yield
    finally:
        os.chmod(directory, mode)


def _copy_tree(source: str, target: str, copy_one: _Copy, owner: int) -> None:
    pending = [(source, target, 0)]
    done: list[tuple[str, str]] = []
    while pending:
        old, new, depth = pending.pop()
        os.makedirs(new, mode=0o700, exist_ok=True)
        done.append((old, new))
        with os.scandir(old) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if depth < MAX_DEPTH and len(os.fsencode(entry.path)) < _MAX_DIRECTORY_BYTES:
                        pending.append((entry.path, f"{new}/{entry.name}", depth + 1))
                elif entry.is_symlink() or entry.is_file(follow_symlinks=False):
                    copy_one(entry.path, f"{new}/{entry.name}")
                    if owner >= 0:
                        os.chown(f"{new}/{entry.name}", owner, owner, follow_symlinks=False)
    # Last and innermost first: a copied mode may forbid its owner to add entries, and each entry changes the times.
    for old, new in reversed(done):
        status = os.stat(old)
        copy_attributes(status, new)
        if owner >= 0:
            os.chown(new, owner, owner)
        os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_file(old: str, status: os.stat_result, new: str) -> None:
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(old), new)
        return
    source = os.open(old, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for _ in copy_data(source, new):
            pass
    finally:
        os.close(source)
    # Without the set-user and set-group bits, because the copy may belong to another user than the file.
    os.chmod(new, stat.S_IMODE(status.st_mode) & 0o1777)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))


def differences(tree: str, base: str, path: str = "", depth: int = 0) -> Iterator[Fields | None]:
    """Yield the changes from `base` to `tree` as objects with the fields of `Change`; None stands for a pause."""
    yield None
    old, new = _entries(f"{base}/{path}"), _entries(f"{tree}/{path}")
    for name in sorted(old.keys() | new.keys()):
        child = f"{path}/{name}".lstrip("/")
        before, now = old.get(name), new.get(name)
        if now is None:
            yield change(child, "deleted")
            continue
        is_directory = stat.S_ISDIR(now.st_mode)
        # A directory with another mode is a change of its own, but its entries are still compared one by one.
        if before is None or (is_directory and before.st_mode != now.st_mode):
            replaced = before is not None and not stat.S_ISDIR(before.st_mode)
            yield change(child, kind_of(now.st_mode), replaced)
        elif not is_directory:
            differs = yield from content_differs(None, f"{tree}/{child}", now, f"{base}/{child}", before)
            if differs is not None:
                yield change(child, kind_of(now.st_mode), content=differs)
        if is_directory and depth < MAX_DEPTH:
            yield from differences(tree, base, child, depth + 1)


def _entries(directory: str) -> dict[str, os.stat_result]:
    """Return the entries of a directory; empty for a link or any other kind of entry."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return {}
    found = {}
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError, PermissionError):  # a running slot has changed it
                    found[entry.name] = entry.stat(follow_symlinks=False)
    finally:
        os.close(fd)
    return found


class CopyCut:
    """Cuts one tree of a layer to a view over `base`, the tree from which the slot started. Paths are relative to the
    tree. Removed entries go to `trash`, an empty directory on the same file system."""

    def __init__(self, tree: str, base: str, trash: str) -> None:
        self._tree, self._base, self._trash = tree, base, trash
        self._dropped = 0

    def keep_only(self, paths: Sequence[str]) -> None:
        """Show the base, and from the tree only these paths with everything under them."""
        if "" in paths:
            return
        old = self._move_to_trash("")
        duplicate(self._base, self._tree)
        for path in paths:
            self._move_to_trash(path)
            if _is_there(old, path):
                self._make_parents(path, old)
                move(f"{old}/{path}", f"{self._tree}/{path}")

    def leave_out(self, path: str) -> None:
        """Show the base at `path`. If a parent is a link or a file in the tree, the base is shown at the parent as
        well; a parent that was deleted is made again with only the path in it."""
        for parent in _parents(path):
            if os.path.lexists(f"{self._tree}/{parent}"):
                if not _is_directory(f"{self._tree}/{parent}"):
                    self._restore(parent)
                    return
            elif not _is_directory(f"{self._base}/{parent}"):
                return
            else:
                self._make_directory(parent, self._base)
        self._restore(path)

    def _make_parents(self, path: str, like: str) -> None:
        for parent in _parents(path):
            if not _is_directory(f"{self._tree}/{parent}"):
                self._move_to_trash(parent)
                self._make_directory(parent, like)

    def _make_directory(self, path: str, like: str) -> None:
        place = f"{self._tree}/{path}"
        with _writable(os.path.dirname(place)):
            os.mkdir(place)
        copy_attributes(os.stat(f"{like}/{path}"), place)

    def _restore(self, path: str) -> None:
        self._move_to_trash(path)
        source, target = f"{self._base}/{path}", f"{self._tree}/{path}"
        if not _is_there(self._base, path):
            return
        with _writable(os.path.dirname(target)):
            if _is_directory(source):
                duplicate(source, target)
            else:
                os.link(source, target, follow_symlinks=False)

    def _move_to_trash(self, path: str) -> str:
        """Move the entry at a path to the trash; returns its new path. Does nothing if there is no such entry, or a
        parent is a link."""
        self._dropped += 1
        place = f"{self._trash}/{self._dropped}"
        if not path or _is_there(self._tree, path):
            move(f"{self._tree}/{path}".rstrip("/"), place)
        return place


def _is_there(root: str, path: str) -> bool:
    """Return whether a path exists and all its parents are directories, not links."""
    return all(_is_directory(f"{root}/{parent}") for parent in _parents(path)) and os.path.lexists(f"{root}/{path}")


def _parents(path: str) -> list[str]:
    """Return the directories above a path, outermost first."""
    names = path.split("/")
    return ["/".join(names[:index]) for index in range(1, len(names))]


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
