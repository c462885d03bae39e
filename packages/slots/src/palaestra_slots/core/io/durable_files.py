"""Files that survive a crash: files that only grow, line by line (journals and stores), and files that are replaced as
a whole.

An appended line survives the death of this process; `commit` returns once all appended lines are on the disk, and
concurrent commits share one fsync. Invariant: a line that could be written only in part (the disk is full) is removed.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from palaestra_slots.core.errors import ConfigError, DiskError
from palaestra_slots.core.types import JSON

KEPT = ". Earlier data is kept"
"""The end of the message about a failed write."""


UNREADABLE: Final = (msgspec.MsgspecError, RecursionError)
"""What decoding a damaged line or file raises: also values that are nested too deeply."""

_MOST_BYTES = 256 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an `OSError` in the block into a `DiskError` that names this file."""
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> DiskError:
    """Return the error for a file that cannot be written."""
    return DiskError(f"cannot write {path}: {error.strerror or error}{KEPT}")


def private(path: str, flags: int) -> int:
    """Open a file for the built-in `open`, which takes this function as `opener`. Only the owner can read and write a
    file that is created this way."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a file that somebody else may have made for reading. Raises `OSError` for a link, a FIFO and a device."""
    # A FIFO is opened before its kind is known, and must not wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return open(fd, "rb")
    os.close(fd)
    raise OSError(errno.EINVAL, "is not a file", str(path))


def read_regular(path: Path, max_bytes: int = _MOST_BYTES) -> bytes:
    """Return the bytes of a file that somebody else may have made. Raises `OSError` for a link, a FIFO, a device, and a
    file of more than `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"is larger than {max_bytes >> 20} MiB", str(path))
    return data


def lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file that somebody else may have made. Raises `ConfigError` for a line that would take too
    much memory, such as a hole in the file."""
    while line := file.readline(_MOST_BYTES):
        if len(line) == _MOST_BYTES:
            raise ConfigError(f"{file.name} has a line of more than {_MOST_BYTES >> 20} MiB, so no run wrote it")
        yield line


class AppendedFile:
    """A file that only grows. It owns `fd`, which is open for appending to `path`. One event loop uses it."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        self._appended = self._committed = 0
        self._committing = asyncio.Lock()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix=path.stem)

    def append(self, line: bytes) -> None:
        """Pass one line to the kernel. Raises `DiskError`, after removing a partly written line."""
        try:
            written = os.write(self.fd, line)
            if written < len(line):
                self._append_rest(line, written)
        except OSError as error:
            raise not_written(self.path, error) from error
        self._appended += 1

    def _append_rest(self, line: bytes, written: int) -> None:
        start = os.fstat(self.fd).st_size - written
        try:
            while written < len(line):
                written += os.write(self.fd, line[written:])
        except OSError:
            # The next line must not continue this one.
            os.ftruncate(self.fd, start)
            raise

    async def commit(self) -> None:
        """Return once everything appended is on the disk. Raises `DiskError`."""
        wanted = self._appended
        async with self._committing:
            if self._committed < wanted:
                # A line that is appended while the disk syncs may not be on it afterwards.
                covered = self._appended
                with writing(self.path):
                    await asyncio.get_running_loop().run_in_executor(self._disk, os.fsync, self.fd)
                self._committed = covered

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines on disk after the first, with their numbers (from 2)."""
        with self.path.open("rb") as file:
            file.readline()
            yield from enumerate(file, 2)

    def close(self) -> None:
        """Flush and close the file. Idempotent. Raises `DiskError`."""
        if self.fd < 0:
            return
        self._disk.shutdown()
        fd, self.fd = self.fd, -1
        try:
            with writing(self.path):
                os.fsync(fd)
        finally:
            os.close(fd)


def open_lines(path: Path, schema: str, *, mode: int = 0o600, exclusive: bool = False) -> AppendedFile:
    """Return the file of JSON lines at `path`, created if it is missing; its first line names the schema. A torn last
    line is cut off. `exclusive` locks the file for this process. Raises `DiskError`, and `ConfigError` if the file is
    not regular, has another schema or is locked."""
    with writing(path):
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"{path} is not a regular file; use a different file")
        if exclusive:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with writing(path):
            _ensure_header(fd, path, schema)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(f"{path} is in use by a running process: stop the process, or use another file") from None
    except BaseException:
        os.close(fd)
        raise
    return AppendedFile(fd, path)


def read_lines(path: Path) -> Iterator[dict[str, JSON]]:
    """Yield the JSON objects in a file's lines. Lines that cannot be parsed, such as a torn last line, are skipped; a
    missing file yields nothing."""
    try:
        lines = read_regular(path).splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(*UNREADABLE):
            yield msgspec.json.decode(line, type=dict[str, Any])


def _ensure_header(fd: int, path: Path, schema: str) -> None:
    """Write the first line, or check it and cut off a torn last line."""
    head = msgspec.json.encode({"schema": schema}) + b"\n"
    with path.open("rb") as file:
        first = file.readline()
    # The file is new, or its maker died while it wrote this line.
    if first != head and head.startswith(first):
        os.ftruncate(fd, 0)
        os.write(fd, head)
        return
    try:
        found = msgspec.json.decode(first)["schema"] if first.endswith(b"\n") else None
    except (*UNREADABLE, UnicodeDecodeError, KeyError, TypeError):
        found = None
    if found != schema:
        raise ConfigError(f"{path} has schema {found!r} in its first line; this version reads {schema!r}")
    end = os.fstat(fd).st_size
    while True:
        start = max(0, end - (1 << 16))
        last = os.pread(fd, end - start, start).rfind(b"\n")
        if last >= 0:
            os.ftruncate(fd, start + last + 1)
            return
        end = start


def unfinished_name(path: Path) -> Path:
    """Return a new name next to `path`. Nobody can have put a link there, because nobody can guess the name."""
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(8).hex()}.tmp")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to fill, which becomes `path` when the block ends; `path` must not exist or be empty. If the
    block fails or the process is killed, there is no `path`. Raises `OSError`."""
    unfinished = unfinished_name(path)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to fill, which replaces `path` when the block ends. If the block fails, only the previous file
    remains. Raises `OSError`."""
    unfinished = unfinished_name(path)
    try:
        with open(unfinished, "xb", opener=private) as file:
            yield file
            file.flush()
            # Otherwise, the rename could be on the disk before the content is, and a crash would leave an empty file.
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
