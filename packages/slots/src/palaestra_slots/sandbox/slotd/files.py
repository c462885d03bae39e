"""Reads and writes files of a slot from outside, through the slot's root and without a shell or program of the slot.

Every path is opened with openat2(RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS) from a descriptor of the slot's root, so no
link, `..` or race leads out of it. Only regular files are read or replaced, so a fifo or device cannot hold up the
server. Files of /proc are refused; only a command in the slot can read them.

New files belong to the slot's root user or, in a slot without namespaces, to the slot's only user. Writing fills a new
file next to the old one, gives it the old file's owner and, unless the request sets a mode, the old file's mode, and
renames it over the old file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
from collections.abc import Generator, Iterator
from typing import Any

from . import syscalls

WORKSPACE = "/workspace"
MAX_ENTRIES = 200_000
MAX_NESTED = 1000  # the maximum depth of a tree that `remove` can remove
_HANDLE = os.O_PATH | os.O_DIRECTORY
_IN_ROOT = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
PROC = 0x9FA0  # the file system type of /proc
UNFINISHED: set[str] = set()  # random names of files that are being written from outside; listings omit these names

_MAX_LINKS = 40
_PAUSE_EVERY = 256
_MAPPED, _NOBODY = 1 << 16, 65534  # users of a slot, and the number of all others, as user_namespaces(7) has it


def absolute(path: str) -> str:
    """Return an absolute path in the slot; a relative `path` starts at the workspace. Raises OSError for a path that no
    file can have."""
    if not path:
        raise FileNotFoundError(errno.ENOENT, "the path is empty", path)
    if not path.isascii():
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise OSError(errno.EINVAL, "the path cannot be encoded", ascii(path)) from None
    if "\0" in path:
        raise OSError(errno.EINVAL, "a path cannot contain a NUL character", ascii(path))
    return path if path.startswith("/") else f"{WORKSPACE}/{path}"


def open_at(root: int, path: str, flags: int) -> int:
    """Open a path inside the root. Errors name the path as the slot sees it."""
    try:
        return syscalls.openat2(root, path, flags, _IN_ROOT)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def open_for_reading(root: int, path: str, offset: int, max_bytes: int) -> tuple[int, int]:
    """Open a regular file. Returns a descriptor at `offset`, and the number of bytes from there to the end of the file.
    Raises OSError, for example EFBIG if there are more than `max_bytes`."""
    # A handle opens neither a fifo nor a device, so the kind of file is known before anything can wait. Through /proc,
    # the same file is opened, whatever the path means by then.
    handle = open_at(root, path, os.O_PATH)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(status, path)
        _refuse_proc(handle, path)
        size = max(0, status.st_size - offset)
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"{size} bytes is more than the limit of {max_bytes} bytes for one call", path)
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(handle)
    try:
        if offset and size:  # an offset past the end of the file may be too large for a seek
            os.lseek(fd, offset, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd, size


class Writing:
    """One file that is being written. `finish` or `put` puts the file in place, and must be followed by `close`, for
    example after the answer has been sent. `discard` drops the file. Raises OSError, for example FileNotFoundError if
    the directory is missing and `make_folders` is false."""

    def __init__(self, root: int, path: str, mode: int | None, owner: int, *, make_folders: bool = True) -> None:
        wanted = None if mode is None else mode & 0o7777
        self._folder, self._status, path = _at_end_of_links(root, path, owner, make_folders)
        self._path, self._name = path, path.rpartition("/")[2]
        if self._status is not None and not stat.S_ISREG(self._status.st_mode):
            os.close(self._folder)
            raise _not_regular(self._status, path)
        old_mode = 0o644 if self._status is None else stat.S_IMODE(self._status.st_mode)
        self._mode = old_mode if wanted is None else wanted
        self._owner = owner
        self._temporary = f".{os.urandom(12).hex()}"  # does not contain the name, which may have the maximum length
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(self._temporary, flags, 0o600, dir_fd=self._folder)
        except OSError as error:
            os.close(self._folder)
            raise OSError(error.errno, error.strerror, path) from None
        UNFINISHED.add(self._temporary)

    def add(self, data: bytes) -> None:
        """Write the next piece."""
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from None

    def put(self, data: bytes) -> None:
        """Write the last piece, and put the file in place. If the piece cannot be written, the file is dropped."""
        try:
            self.add(data)
        except OSError:
            self.discard()
            raise
        self.finish()

    def finish(self) -> None:
        """Put the file in place."""
        uid, gid = (self._owner, self._owner) if self._status is None else (self._status.st_uid, self._status.st_gid)
        try:
            # Before the mode, because a change of owner clears the set-user and set-group bits (chown(2)).
            os.fchown(self._fd, uid, gid)
            os.fchmod(self._fd, self._mode)
            os.rename(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as error:
            self.discard()
            raise OSError(error.errno, error.strerror, self._path) from None
        UNFINISHED.discard(self._temporary)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._fd)
        os.close(self._folder)

    def discard(self) -> None:
        """Remove the unfinished file."""
        try:
            os.unlink(self._temporary, dir_fd=self._folder)
        except OSError:
            pass  # the slot, and the file with it, may be gone
        finally:
            UNFINISHED.discard(self._temporary)
            self.close()


def create(root: int, path: str, owner: int) -> int:
    """Make a file and its parent directories; returns a descriptor for writing to the file. Raises OSError if the path
    exists."""
    folder = _make_folders(root, posixpath.dirname(path), owner)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(posixpath.basename(path), flags, 0o644, dir_fd=folder)
    finally:
        os.close(folder)
    os.fchown(fd, owner, owner)
    return fd


def make_directory(root: int, path: str, owner: int) -> None:
    """Make a directory and its parents if they do not exist."""
    os.close(_make_folders(root, absolute(path), owner))


def make_link(root: int, path: str, target: str, owner: int) -> None:
    """Make a symbolic link and its parent directories, replacing a file or link. The target may be any path."""
    folder, name = posixpath.split(_normalized(absolute(path)))
    parent = _make_folders(root, folder, owner)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        os.symlink(target, name, dir_fd=parent)
        os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(parent)


def describe(root: int, path: str, owner: int) -> dict[str, Any] | None:
    """Return the entry at a path, without following links; None if it does not exist. `owner` is the slot's root user
    as this process sees it."""
    path = absolute(path)
    try:
        fd = open_at(root, path, os.O_PATH | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _entry(_normalized(path), os.fstat(fd), fd, "", owner)
    finally:
        os.close(fd)


def list_directory(root: int, path: str, owner: int) -> Generator[None, None, list[dict[str, Any]]]:
    """Return the entries of a directory, as a job. `owner` is the slot's root user as this process sees it."""
    path = absolute(path)
    fd = open_at(root, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)
    found: list[dict[str, Any]] = []
    try:
        _refuse_proc(fd, path)
        with os.scandir(fd) as entries:
            for entry in entries:
                if len(found) == MAX_ENTRIES:
                    raise OSError(errno.EFBIG, f"more than {MAX_ENTRIES} entries", path)
                if len(found) % _PAUSE_EVERY == _PAUSE_EVERY - 1:
                    yield
                if entry.name in UNFINISHED:
                    continue
                with contextlib.suppress(FileNotFoundError):  # a program of the slot removed it in the meantime
                    status = entry.stat(follow_symlinks=False)
                    found.append(_entry(_normalized(f"{path}/{entry.name}"), status, fd, entry.name, owner))
    finally:
        os.close(fd)
    return found


def remove(root: int, path: str) -> Iterator[None]:
    """Remove, as a job, the entry at a path if it exists. Raises OSError, for example if it is nested too deeply."""
    path = _normalized(absolute(path))
    folder, name = posixpath.split(path)
    if not name:
        raise OSError(errno.EBUSY, "the root cannot be removed", path)
    try:
        parent = open_at(root, folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        yield from _remove_tree(parent, name)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(parent)


def unlink(root: int, path: str) -> None:
    """Remove one file. Raises OSError if there is no file, or the entry is a directory."""
    folder, name = posixpath.split(path)
    parent = open_at(root, folder, _HANDLE)
    try:
        os.unlink(name, dir_fd=parent)
    finally:
        os.close(parent)


def _remove_tree(parent: int, name: str) -> Iterator[None]:
    """Remove a tree depth first, without recursion; only the directories from the top to the current one are open.
    Ignores entries that another process removes meanwhile."""
    try:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    # For a directory, Linux answers EISDIR and POSIX EPERM. Source: unlink(2).
    except (IsADirectoryError, PermissionError):
        trail: list[tuple[str, int, list[str]]] = []
        yield from _remove_files_in(parent, name, trail)
    try:
        while trail:
            own, fd, folders = trail[-1]
            if folders:
                if len(trail) == MAX_NESTED:  # each open directory takes one of the server's descriptors
                    raise OSError(errno.ENAMETOOLONG, f"directories are nested more than {MAX_NESTED} deep")
                yield from _remove_files_in(fd, folders.pop(), trail)
            else:
                os.close(trail.pop()[1])
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(own, dir_fd=trail[-1][1] if trail else parent)
            yield None
    finally:
        for _, fd, _ in trail:
            os.close(fd)


def _remove_files_in(parent: int, name: str, trail: list[tuple[str, int, list[str]]]) -> Iterator[None]:
    """Remove all entries of a directory except subdirectories; append the open directory and the names of its
    subdirectories to `trail`."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return
    try:
        with os.scandir(fd) as entries:
            # Listed completely before anything is removed, because removals during a scan may make it skip entries.
            children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for number, (child, is_directory) in enumerate(children, 1):
            if not is_directory:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(child, dir_fd=fd)
            if number % _PAUSE_EVERY == 0:
                yield
    except BaseException:
        os.close(fd)
        raise
    trail.append((name, fd, [child for child, is_directory in children if is_directory]))


def _at_end_of_links(root: int, path: str, owner: int, make_folders: bool) -> tuple[int, os.stat_result | None, str]:
    """Follow links in the last component of a path that is to be written, inside the root. Returns a descriptor of the
    directory to which the links lead, the status of the entry there (None if it does not exist), and the entry's path.
    If `make_folders` is true, missing directories are made."""
    # A rename replaces the link itself. So that the link stays, the file is made in the directory where it leads.
    for _ in range(_MAX_LINKS):
        folder, _, name = path.rpartition("/")
        if name in ("", ".", ".."):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        parent = _make_folders(root, folder or "/", owner) if make_folders else _open_folder(root, folder or "/")
        try:
            status = _stat_or_none(parent, name)
            is_link = status is not None and stat.S_ISLNK(status.st_mode)
            target = os.readlink(name, dir_fd=parent) if is_link else ""
        except OSError as error:
            os.close(parent)
            raise OSError(error.errno, error.strerror, path) from None
        if not is_link:
            return parent, status, path
        os.close(parent)
        path = target if target.startswith("/") else f"{folder}/{target}"
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _make_folders(root: int, path: str, owner: int) -> int:
    """Open a directory and return its descriptor. Makes the directory and its parents if they are missing."""
    try:
        return _open_folder(root, path)
    except FileNotFoundError:
        folder, name = posixpath.split(path.rstrip("/"))
        parent = _make_folders(root, folder, owner)
    if name in (".", ".."):  # not made, and there now
        os.close(parent)
        return _open_folder(root, path)
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
        os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(parent)
    return _open_folder(root, path)


def _open_folder(root: int, path: str) -> int:
    """Return a handle of a directory. A directory directly below the root, like the workspace, is opened without path
    resolution."""
    name = path[1:]
    if "/" not in name and name != "..":
        try:
            return os.open(name or ".", _HANDLE | os.O_NOFOLLOW, dir_fd=root)
        except OSError:
            pass  # it is a link, or does not exist
    return open_at(root, path, _HANDLE)


def _not_regular(status: os.stat_result, path: str) -> OSError:
    if stat.S_ISDIR(status.st_mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return PermissionError(errno.EPERM, "not a regular file", path)


def _refuse_proc(fd: int, path: str) -> None:
    if syscalls.filesystem_type(fd) == PROC:
        raise PermissionError(errno.EPERM, "files of /proc can be read only by a command in the slot", path)


def _stat_or_none(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _normalized(path: str) -> str:
    """Return a path without `.`, `..` and double slashes, even at the start, where POSIX would keep two."""
    return posixpath.normpath(f"/{path.lstrip('/')}")


def kind_of(mode: int) -> str:
    """Return the name of a file type: file, dir, symlink or other."""
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "dir"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def _entry(path: str, status: os.stat_result, folder: int, name: str, owner: int) -> dict[str, Any]:
    kind, mode = kind_of(status.st_mode), stat.S_IMODE(status.st_mode)
    target = os.readlink(name, dir_fd=folder) if kind == "symlink" else ""
    return {
        "path": path,
        "kind": kind,
        "size": status.st_size,
        "mode": mode,
        "mtime": status.st_mtime,
        "target": target,
        "uid": _id_in_slot(status.st_uid, owner),
        "gid": _id_in_slot(status.st_gid, owner),
    }


def _id_in_slot(number: int, owner: int) -> int:
    """Return the user or group in the slot that this process sees under a number."""
    return number - owner if 0 <= number - owner < _MAPPED else _NOBODY
