"""The slot server's `Link` on the client's event loop: frames out at once where the socket takes them, frames in.

Not asyncio's transports and protocols: per request they cost as many calls again as everything else that the client
does. What they bring besides is here: a socket that is full is waited for, and nonsense ends the connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from palaestra.sandbox import forks
from palaestra.sandbox.slotd.frames import Frame
from palaestra.sandbox.slotd.link import Link
from palaestra.sandbox.slotd.loop import WRITE


class Wire:
    """One connection, from now to `close` or to the server's end, of which `on_end` is told once."""

    def __init__(
        self, stream: socket.socket, on_frame: Callable[[Frame], None], on_end: Callable[[Exception | None], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream, self._on_end = stream, on_end
        self._ready: Callable[[], object] = lambda: None
        self._drained = asyncio.Event()
        self._closed = False
        self.link = Link(self, stream, on_frame, self._end)
        """Sends; not to be used once `on_end` was called."""
        forks.not_for_children(self)

    async def drained(self) -> None:
        """Until the socket has taken everything, or is closed."""
        while self.link.waiting and not self._closed:
            self._drained.clear()
            await self._drained.wait()

    def write_eof(self) -> None:
        """Say that nothing more will come."""
        if not self._closed:
            self._stream.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let go of the socket. Idempotent."""
        self._end()

    def let_go(self) -> None:
        """In a forked child: the loop's list of descriptors is still that of its parent, and is left alone."""
        self._closed = True
        self._stream.close()

    # What the link calls: asyncio's loop as one of the server's

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call whenever there is something to read."""
        self._ready = call
        self._loop.add_reader(fd, self._on_ready)

    def watch_for(self, fd: int, events: int, call: Callable[[], object]) -> None:
        """Also when there is room to write, or no longer."""
        if events & WRITE:
            self._loop.add_writer(fd, self._on_ready)
        else:
            self._loop.remove_writer(fd)
            self._drained.set()

    def unwatch(self, fd: int) -> None:
        """No more calls."""
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)

    def _on_ready(self) -> None:
        try:
            self._ready()
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        if not self._closed:
            self._closed = True
            self.unwatch(self._stream.fileno())
            self._stream.close()
            self._drained.set()
            self._on_end(error)
