"""A lock on the host's file system that waits without blocking the event loop."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from palaestra.core.errors import InfraError

_POLL_S = 0.05


@asynccontextmanager
async def locked(path: Path, *, timeout_s: float) -> AsyncIterator[None]:
    """Hold the lock file at `path`, against other processes and other tasks. Ends with the holder, however it ends.

    Raises `InfraError` when it stays held for `timeout_s`.
    """
    with path.open("a") as file:
        await _acquire(file.fileno(), path, timeout_s)
        yield


async def _acquire(descriptor: int, path: Path, timeout_s: float) -> None:
    """The kernel has no wait for a file lock that an event loop could cancel, so this asks again every 50 ms."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if asyncio.get_running_loop().time() >= deadline:
                raise InfraError(f"{path} stayed locked for {timeout_s:g} s; is another run stuck?") from None
            await asyncio.sleep(_POLL_S)
        else:
            return
