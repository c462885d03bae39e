"""The actor that carries the two streams of one node's worker. The worker is a process of its own: Ray's event loop
stays free whatever the environment does, and the worker ends with the actor, because its stdin ends.

Ray ends an actor when its driver ends or its node dies. If Ray kills the actor for lack of memory, only this node's
groups move.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

from palaestra_cloud.cluster.launcher import NodeLost, ProcessLink, start_worker


class NodeActor:
    """One worker. There is at most one call that receives, and one of `send` at a time."""

    def __init__(self) -> None:
        self._link: ProcessLink | None = None

    async def start(self, command: tuple[str, ...]) -> int:
        """Start the worker, Python with these arguments, and return its process id."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._link = ProcessLink(await start_worker(ours, command))
        return self._link.process.pid

    async def send(self, frames: bytes) -> None:
        """Send frames to the worker. Raises `NodeLost`."""
        assert self._link is not None
        await self._link.send(frames)

    async def receive(self) -> AsyncIterator[bytes]:
        """Yield the messages of the worker until it ends."""
        assert self._link is not None
        try:
            async for message in self._link.receive():
                yield message
        except NodeLost:
            return

    async def end(self) -> None:
        """Let the worker end, and wait until it has."""
        if self._link is not None:
            await self._link.aclose()
