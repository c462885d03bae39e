"""Time that nobody is to pay for: code that waits for its turn, or for a service that is down, stops the clocks of
those it works for.

A context variable, because who waits (a transport, a pool) knows nothing of conversations and their limits. Thousands
of requests are under way at once, so nothing here is held while one is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, Token

Standing = Callable[[], AbstractContextManager[None]]
"""Makes a block in which a clock stands. Blocks of several tasks may overlap."""

_clocks: ContextVar[tuple[Standing, ...]] = ContextVar("clocks", default=())


class ChargedTo:
    """What runs in the block, in tasks that it starts too, stops this clock where it is uncharged."""

    __slots__ = ("_before", "_standing")

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._before: Token[tuple[Standing, ...]]

    def __enter__(self) -> None:
        self._before = _clocks.set((*_clocks.get(), self._standing))

    def __exit__(self, *_: object) -> None:
        _clocks.reset(self._before)


@contextmanager
def uncharged() -> Iterator[None]:
    """A block in which every clock stands that the code around it is charged to."""
    with ExitStack() as stack:
        for standing in _clocks.get():
            stack.enter_context(standing())
        yield


async def take_turn(places: asyncio.Semaphore) -> None:
    """Take a place, to be released; waiting for one is uncharged."""
    if places.locked():
        with uncharged():
            await places.acquire()
    else:
        await places.acquire()
