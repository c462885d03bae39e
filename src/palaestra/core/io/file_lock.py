"""A lock between the processes of one machine, awaited without blocking the event loop."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path


@contextlib.asynccontextmanager
async def turn(path: Path, sleep: Callable[[float], Awaitable[None]], poll_s: float) -> AsyncIterator[None]:
    """Hold the lock file `path`, alone on this machine. A process that dies releases it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _try_lock(lock):
            await sleep(poll_s)
        yield
    finally:
        os.close(lock)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
