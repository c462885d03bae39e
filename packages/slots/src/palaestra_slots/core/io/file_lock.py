"""A lock file that excludes other processes on this machine and other tasks in this process.

Waiting does not block the event loop. The kernel releases the lock when its holder dies (flock(2)).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from palaestra_slots.core.errors import InfraError


@contextlib.asynccontextmanager
async def file_lock(
    path: Path,
    *,
    timeout_s: float = math.inf,
    poll_s: float = 0.05,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[None]:
    """Hold the lock file `path`, which is created if it does not exist. Raises `InfraError` after `timeout_s`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        waited_s = 0.0
        while not _try_lock(descriptor):  # flock has no wait that an event loop could cancel
            if waited_s >= timeout_s:
                raise InfraError(f"{path} stayed locked for {timeout_s:g} s; is another run stuck?")
            await sleep(poll_s)
            waited_s += poll_s
        yield
    finally:
        # The file stays: if it were removed, another process could lock a new file while one still waits for the old.
        os.close(descriptor)


@contextlib.contextmanager
def thread_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which may be in a folder that somebody else made. Blocks the thread. Raises `OSError`
    for a link, whose target would otherwise be opened for writing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
