"""Copies the tree of a layer as a job, for example for a checkpoint of a running slot or a layer on disk. The copy
keeps owners, modes, times, marks, hard links and holes.

An agent chose the names and contents, so every entry is opened relative to its directory, and no link is followed. A
file that has not changed since an earlier copy on the same file system is linked to that copy instead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .overlay import MAX_DEPTH, scan

_PIECE, _PAUSE_EVERY = 1 << 20, 32
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Earlier = Callable[[os.stat_result], str | None]  # from a file's status, finds an earlier identical copy
Index = dict[int, tuple[int, int, str]]  # for each inode: its time of change (ns), its size, and the path of the copy


@dataclass
class TreeCopy:
    """One copy in progress."""

    earlier: Earlier | None = None
    index: Index = field(default_factory=dict)
    copied_bytes: int = 0
    entries: int = 0

    def tree(self, source: str, target: str) -> Iterator[None]:
        """Copy the directory `source` to the new directory `target`. Raises OSError."""
        fd = os.open(source, _DIRECTORY)
        try:
            yield from self._directory(fd, target, 0)
        finally:
            os.close(fd)

    def _directory(self, source: int, target: str, depth: int) -> Iterator[None]:
        if depth > MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, f"directories are nested more than {MAX_DEPTH} deep", target[-80:])
        os.mkdir(target, 0o700)
        for name, status in (yield from scan(source)):
            self.entries += 1
            if self.entries % _PAUSE_EVERY == 0:
                yield None
            path = f"{target}/{name}"
            if stat.S_ISDIR(status.st_mode):
                child = os.open(name, _DIRECTORY, dir_fd=source)
                try:
                    yield from self._directory(child, path, depth + 1)
                finally:
                    os.close(child)
            elif stat.S_ISREG(status.st_mode):
                yield from self._regular(source, name, status, path)
            else:
                _copy_special(source, name, status, path)
        # Last, because each entry that is made in the directory changes the directory's times.
        _copy_attributes(source, target, os.fstat(source))

    def _regular(self, folder: int, name: str, status: os.stat_result, target: str) -> Iterator[None]:
        if self._link(status, target):
            return
        # The entry may have become a fifo since it was listed, and opening that would wait for a writer.
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            for sent in copy_data(source, target):
                self.copied_bytes += sent
                if sent == _PIECE:
                    yield None
            _copy_attributes(source, target, status)
        finally:
            os.close(source)
        self.index[status.st_ino] = (status.st_ctime_ns, status.st_size, target)

    def _link(self, status: os.stat_result, target: str) -> bool:
        """Link to an existing copy of the same file. Returns False if there is none that can be linked to."""
        same = self.index.get(status.st_ino)
        path = same[2] if same is not None else self.earlier and self.earlier(status)
        if path is None:
            return False
        try:
            os.link(path, target, follow_symlinks=False)
        except OSError as error:
            # The earlier copy can have as many names as the file system allows, or be gone.
            if error.errno not in (errno.EMLINK, errno.ENOENT):
                raise
            return False
        self.index[status.st_ino] = (status.st_ctime_ns, status.st_size, path)
        return True


def copy_data(source: int, target: str) -> Iterator[int]:
    """Copy an open file's data and holes to a new file, so that a sparse file stays small. Yields the size of each
    piece. Raises OSError."""
    sink = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        size, position = os.fstat(source).st_size, 0
        # The size comes first, so that a hole at the end needs no write.
        os.ftruncate(sink, size)
        while position < size:
            try:
                position = os.lseek(source, position, os.SEEK_DATA)
            except OSError:
                return  # the rest is a hole
            end = os.lseek(source, position, os.SEEK_HOLE)
            os.lseek(sink, position, os.SEEK_SET)
            while position < end:
                sent = os.sendfile(sink, source, position, min(_PIECE, end - position))
                if not sent:
                    return  # the file has shrunk
                position += sent
                yield sent
    finally:
        os.close(sink)


def _copy_special(folder: int, name: str, status: os.stat_result, target: str) -> None:
    """Copy a link, whiteout, fifo or socket. Other devices cannot occur in a layer and are left out."""
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=folder), target)
    elif stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or status.st_rdev == 0:
        os.mknod(target, status.st_mode, 0)
    else:
        return
    os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def _copy_attributes(source: int, target: str, status: os.stat_result) -> None:
    os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    # After the owner, because a change of owner clears the set-user and set-group bits (chown(2)).
    os.chmod(target, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source):
        try:
            os.setxattr(target, name, os.getxattr(source, name), follow_symlinks=False)
        except OSError as error:
            # Without its mark, a directory would show the entries below it that it hides. Other attributes may be lost.
            if ".overlay." in name:
                raise OSError(error.errno, f"cannot keep the mark {name}", target) from None
    with contextlib.suppress(FileNotFoundError):
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
