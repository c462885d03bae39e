"""Blocks that somebody else may end: what is under way when its owner is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Ending:
    """Blocks of one owner, on one loop. Invariant: after `end` none of those that had begun runs any more."""

    def __init__(self) -> None:
        self._blocks: dict[asyncio.Timeout, asyncio.Event] = {}

    @asynccontextmanager
    async def block(self, error: Exception) -> AsyncIterator[None]:
        """Raises `error` when the block is ended; it is cancelled first, so that it cleans up."""
        ended, limit = asyncio.Event(), asyncio.timeout(None)
        try:
            async with limit:
                self._blocks[limit] = ended
                yield
        except TimeoutError:
            if limit.expired():
                raise error from None
            raise
        finally:
            self._blocks.pop(limit, None)
            ended.set()

    async def end(self) -> None:
        """End the blocks that are under way, and wait until they have."""
        under_way = list(self._blocks.values())
        for limit in self._blocks:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
        for each in under_way:
            await each.wait()
