"""A file that only grows, line by line: how journals and stores get to the disk.

A line is handed to the kernel when it is appended, so it survives the death of this process; `commit` returns once all
that was appended before it is on the disk, and concurrent commits share one fsync. Invariant: a line that could not be
written whole (the disk is full) is taken back, so that what follows does not begin in the middle of it.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor


class AppendedFile:
    """Owns `fd`, which is open for appending. `name` is what its thread is called. Used by one event loop."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self._appended = self._committed = 0
        self._committing = asyncio.Lock()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix=name)

    def append(self, line: bytes) -> None:
        """Hand one line to the kernel. Raises `OSError`, and then nothing of it stays."""
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
        """Return once what was appended is on the disk."""
        wanted = self._appended
        async with self._committing:
            if self._committed < wanted:
                covered = self._appended
                await asyncio.get_running_loop().run_in_executor(self._disk, os.fsync, self.fd)
                self._committed = covered

    def close(self) -> None:
        """Flush and close. Idempotent."""
        if self.fd >= 0:
            self._disk.shutdown()
            os.fsync(self.fd)
            os.close(self.fd)
            self.fd = -1
