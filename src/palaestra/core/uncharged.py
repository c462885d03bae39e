"""Time that nobody is to pay for: code that waits for its turn, or for a service that is down, stops the clocks of
those it works for.

A context variable, because who waits (a transport, a pool) knows nothing of conversations and their limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar

Standing = Callable[[], AbstractContextManager[None]]
"""Makes a block in which a clock stands. Blocks of several tasks may overlap."""

_clocks: ContextVar[tuple[Standing, ...]] = ContextVar("clocks", default=())


@contextmanager
def charged_to(standing: Standing) -> Iterator[None]:
    """What runs in the block, in tasks that it starts too, stops this clock where it is uncharged."""
    token = _clocks.set((*_clocks.get(), standing))
    try:
        yield
    finally:
        _clocks.reset(token)


@contextmanager
def uncharged() -> Iterator[None]:
    """A block in which every clock stands that the code around it is charged to."""
    with ExitStack() as stack:
        for standing in _clocks.get():
            stack.enter_context(standing())
        yield


@asynccontextmanager
async def in_turn(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold a place in the block; waiting for one is uncharged."""
    if places.locked():
        with uncharged():
            await places.acquire()
    else:
        await places.acquire()
    try:
        yield
    finally:
        places.release()
