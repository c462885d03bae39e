"""What runs in the background while the gateway serves: its tasks, and the connections to the platforms."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial

from palaestra_gateway.notices import Notices
from palaestra_gateway.outbox import Outbox
from palaestra_gateway.platform import Incoming, Platform
from palaestra_slots.core.clock import Clock
from palaestra_slots.core.errors import PalaestraError, PlatformUnavailable

logger = logging.getLogger(__name__)

LONGEST_RECONNECT_S = 60.0
STOP_PATIENCE_S = 10.0


class GatewayTasks:
    """The tasks of a gateway, which run while the block of `running` runs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._background: list[asyncio.Task[None]] = []
        self._tasks: asyncio.TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let tasks start while the block runs; at its end, wait for them."""
        async with asyncio.TaskGroup() as self._tasks:
            yield

    def start(self, work: Coroutine[None, None, None], name: str) -> None:
        """Run `work` in the background. If it fails, the error is logged, and everything else continues."""

        async def run() -> None:
            try:
                await work
            except Exception:
                logger.exception("the task %r failed", name)

        task = self._tasks.create_task(run(), name=name)
        self._background.append(task)
        task.add_done_callback(self._background.remove)
        task.add_done_callback(lambda _: work.close())  # it never began if the task was cancelled before

    async def retried(self, do: Callable[[], Awaitable[None]], what: str) -> None:
        """Call `do` until it succeeds, for example until a full disk has room again."""
        wait_s = 1.0
        while True:
            try:
                await do()
            except Exception:
                logger.exception("%s failed; trying again in %.0f s", what, wait_s)
            else:
                return
            await self._clock.sleep(wait_s)
            wait_s = min(LONGEST_RECONNECT_S, wait_s * 2)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in list(self._background):
            task.cancel()


class Connections:
    """The connections to the platforms, which give their messages to `receive`."""

    def __init__(
        self,
        platforms: Mapping[str, Platform],
        receive: Callable[[Incoming], Awaitable[None]],
        outbox: Outbox,
        notices: Notices,
        tasks: GatewayTasks,
        clock: Clock,
    ) -> None:
        self._platforms, self._receive, self._outbox = platforms, receive, outbox
        self._notices, self._tasks, self._clock = notices, tasks, clock

    async def open(self) -> None:
        """Start all platforms. Raises `PlatformRefused` for a wrong token."""
        await asyncio.gather(*(self._start_platform(platform) for platform in self._platforms.values()))

    async def close(self) -> None:
        """Stop all platforms."""
        for platform in self._platforms.values():
            try:
                async with asyncio.timeout(STOP_PATIENCE_S):
                    await platform.stop()
            except Exception as error:  # an error of a client library: the other platforms are stopped anyway
                logger.warning("%s was not stopped: %s: %s", platform.name, type(error).__name__, error)

    async def _start_platform(self, platform: Platform) -> None:
        """Start a platform. If its server does not answer, keep trying in the background."""
        try:
            await platform.start(self._receive)
        except PlatformUnavailable as error:
            logger.warning("%s: %s; trying again until it answers", platform.name, error)
            self._tasks.start(self._reconnect(platform), f"connect {platform.name}")
        else:
            await self._outbox.begin(platform.name)

    async def _reconnect(self, platform: Platform) -> None:
        wait_s = 1.0
        while True:
            await self._clock.sleep(wait_s)
            try:
                await platform.start(self._receive)
            except PlatformUnavailable:
                wait_s = min(LONGEST_RECONNECT_S, wait_s * 2)
            except PalaestraError as error:
                await self._notices.post(f"{platform.name} is not connected: {error}")
                return
            except Exception:  # a bug in the platform: the others continue
                logger.exception("%s cannot be started; trying again", platform.name)
                wait_s = min(LONGEST_RECONNECT_S, wait_s * 2)
            else:
                await self._tasks.retried(partial(self._outbox.begin, platform.name), "the sending of waiting messages")
                return
