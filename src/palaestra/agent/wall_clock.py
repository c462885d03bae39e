"""The wall clock of one conversation: how long it has gone on, and the limit that ends it.

Not for the other ceilings of a budget, which are looked at between turns (`budget.py`). It keeps: time in which the
conversation waits for something that it is not to pay for (its place among the slots of a run, a model server that is
overloaded or away) does not pass. Of a conversation that does several things at once, one that waits is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from palaestra.core.clock import ChargedTo, Clock
from palaestra.core.io.threads import running_loop


class WallClock:
    """Runs from `start`. Seconds of the limit are those of the event loop, all others the given clock's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = self._stood_s = 0.0
        self._waiting = 0
        self._wall_s: float | None = None
        self._limit: asyncio.Timeout | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin anew."""
        self._started_s = self._stood_s = self._clock.monotonic()

    @property
    def elapsed_s(self) -> float:
        """How long it has gone on."""
        return (self._stood_s if self._waiting else self._clock.monotonic()) - self._started_s

    @asynccontextmanager
    async def limited(self, wall_s: float | None) -> AsyncIterator[asyncio.Timeout]:
        """End the block with `TimeoutError` when it has gone on for so long; None: never. What is `uncharged` in it is
        not counted."""
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(wall_s) as self._limit:
                self._wall_s = wall_s
                with ChargedTo(self.standing):
                    yield self._limit
        finally:
            self._limit = None

    def charge(self, seconds: float) -> None:
        """So much has passed by now, whatever has passed since the start: for what began in another process."""
        self._stood_s = self._clock.monotonic()
        self._started_s = self._stood_s - seconds
        self._set_limit()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Let no time pass in the block, or in others that begin before it ends. Blocks may be of other threads' loops:
        the tools of a `ToolSession` wait on its own."""
        self._there(self._wait)
        try:
            yield
        finally:
            self._there(self._go_on)

    def _there(self, step: Callable[[], None]) -> None:
        """Take a step on the loop that has the limit."""
        if self._loop is None or self._loop is running_loop():
            step()
        else:
            with contextlib.suppress(RuntimeError):  # that loop has ended, and nothing is limited any more
                self._loop.call_soon_threadsafe(step)

    def _wait(self) -> None:
        if not self._waiting:
            self._stood_s = self._clock.monotonic()
        self._waiting += 1
        self._set_limit()

    def _go_on(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._started_s += self._clock.monotonic() - self._stood_s
        self._set_limit()

    def _set_limit(self) -> None:
        limit, wall_s = self._limit, self._wall_s
        if limit is None or wall_s is None or limit.expired():
            return
        limit.reschedule(None if self._waiting else asyncio.get_running_loop().time() + wall_s - self.elapsed_s)
