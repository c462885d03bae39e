"""Injected clocks, so that tests need not wait, and a way to exclude time from the clocks of rollouts.

Code that waits for its turn or for a failing service stops the clocks of its rollouts. A context variable holds these
clocks, because the code that waits, such as a transport or a pool, knows nothing about rollouts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, Token
from typing import Protocol


class Clock(Protocol):
    """A source of time. `monotonic` returns seconds, `wall` returns seconds since the epoch, and `sleep` takes
    seconds."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock and the running event loop's sleep."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


StoppedClock = Callable[[], AbstractContextManager[None]]
"""Creates a context manager that stops a clock for its block. Blocks of several tasks may overlap."""

_clocks: ContextVar[tuple[StoppedClock, ...]] = ContextVar("clocks", default=())


class ChargedTo:
    """While the block runs, `uncharged` sections of its code, and of the tasks that it starts, stop this clock."""

    __slots__ = ("_before", "_standing")

    def __init__(self, standing: StoppedClock) -> None:
        self._standing = standing
        self._before: Token[tuple[StoppedClock, ...]]

    def __enter__(self) -> None:
        self._before = _clocks.set((*_clocks.get(), self._standing))

    def __exit__(self, *_: object) -> None:
        _clocks.reset(self._before)


@contextmanager
def uncharged() -> Iterator[None]:
    """While the block runs, stop the clocks of all `ChargedTo` blocks around it."""
    with ExitStack() as stack:
        for standing in _clocks.get():
            stack.enter_context(standing())
        yield


async def take_turn(places: asyncio.Semaphore) -> None:
    """Acquire the semaphore. The wait for it is `uncharged`."""
    if places.locked():
        with uncharged():
            await places.acquire()
    else:
        await places.acquire()
