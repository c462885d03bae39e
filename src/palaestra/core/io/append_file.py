"""A file that only grows, line by line: how journals and stores get to the disk.

A line is handed to the kernel when it is appended, so it survives the death of this process; `commit` returns once all
that was appended before it is on the disk, and concurrent commits share one fsync. Invariant: a line that could not be
written whole (the disk is full) is taken back, so that what follows does not begin in the middle of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from palaestra.core.errors import DiskError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the operating system refuses in the block is said of this file: raises `DiskError`."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror or error}. What was written before is kept") from error


class AppendedFile:
    """Owns `fd`, which is open for appending to `path`. Used by one event loop."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        self._appended = self._committed = 0
        self._committing = asyncio.Lock()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix=path.stem)

    def append(self, line: bytes) -> None:
        """Hand one line to the kernel. Raises `DiskError`, and then nothing of it stays."""
        with writing(self.path):
            written = os.write(self.fd, line)
            if written < len(line):
                self._append_rest(line, written)
        self._appended += 1

    def _append_rest(self, line: bytes, written: int) -> None:
        start = os.fstat(self.fd).st_size - written
        try:
            while written < len(line):
                written += os.write(self.fd, line[written:])
        except OSError:
            os.ftruncate(self.fd, start)
            raise

    async def commit(self) -> None:
        """Return once what was appended is on the disk. Raises `DiskError`."""
        wanted = self._appended
        async with self._committing:
            if self._committed < wanted:
                covered = self._appended
                with writing(self.path):
                    await asyncio.get_running_loop().run_in_executor(self._disk, os.fsync, self.fd)
                self._committed = covered

    def close(self) -> None:
        """Flush and close. Idempotent. Raises `DiskError`."""
        if self.fd < 0:
            return
        self._disk.shutdown()
        fd, self.fd = self.fd, -1
        try:
            with writing(self.path):
                os.fsync(fd)
        finally:
            os.close(fd)
