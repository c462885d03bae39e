"""Lets one task end the code that other tasks are running, for example when the owner of the work is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Ending:
    """Blocks of code that belong to one owner and run on one event loop. Another task can end them with `end`, which
    returns when all of them have ended."""

    def __init__(self) -> None:
        self._blocks: dict[asyncio.Timeout, asyncio.Event] = {}

    @asynccontextmanager
    async def block(self, error: Exception) -> AsyncIterator[None]:
        """Run the block. If another task calls `end`, the block is cancelled, cleans up, and then `error` is raised."""
        ended, limit = asyncio.Event(), asyncio.timeout(None)
        try:
            async with limit:
                self._blocks[limit] = ended
                yield
        except TimeoutError:
            # A TimeoutError that the block itself has raised stays what it is.
            if limit.expired():
                raise error from None
            raise
        finally:
            self._blocks.pop(limit, None)
            ended.set()

    async def end(self) -> None:
        """End the blocks in progress, and wait for them."""
        # A copy, because each block that ends leaves the table.
        under_way = list(self._blocks.values())
        for limit in self._blocks:
            if not limit.expired():
                # A timeout that ends now cancels the block, whichever task runs it.
                limit.reschedule(asyncio.get_running_loop().time())
        for each in under_way:
            await each.wait()


async def end_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait until they have ended, whatever their results; None stands for a task that never began."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
