"""One end of the stream between server and client: frames in, frames out, nothing blocking.

It is the server's; the client has the same on its own event loop (`wire.py`). What the server sends before a client has
asked for more is bounded by the window of each request, so its outgoing buffer is bounded by the number of requests in
flight.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ..event_loop import READ, WRITE, Callback
from .frames import RECEIVE_BYTES, Decoder, Fields, Frame, Kind, encode


class Watcher(Protocol):
    """What tells a link that its stream is ready: the server's `Loop`, or the client's."""

    def watch(self, fd: int, call: Callback) -> None: ...

    def watch_for(self, fd: int, events: int, call: Callback) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class Link:
    """Calls `on_frame` for each frame, and `on_end` once when the other side is gone."""

    def __init__(
        self, loop: Watcher, stream: socket.socket, on_frame: Callable[[Frame], None], on_end: Callable[[], None]
    ) -> None:
        self._loop, self._stream, self._on_frame, self._on_end = loop, stream, on_frame, on_end
        self._decoder = Decoder()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._outgoing: deque[memoryview] = deque()
        stream.setblocking(False)
        loop.watch(stream.fileno(), self._ready)

    def send(self, kind: Kind, request: int, fields: Fields | None = None, data: bytes = b"") -> None:
        """Send one frame: what the socket takes at once, the rest when it can."""
        frame = encode(kind, request, fields, data)
        sent = 0
        if not self._outgoing:
            try:
                sent = self._stream.send(frame)
            except BlockingIOError:
                pass
            except OSError:
                return  # the end is noticed when reading
            if sent == len(frame):
                return
            self._loop.watch_for(self._stream.fileno(), READ | WRITE, self._ready)
        self._outgoing.append(memoryview(frame)[sent:])

    @property
    def waiting(self) -> bool:
        """Whether something has not been sent yet."""
        return bool(self._outgoing)

    def _ready(self) -> None:
        if self._outgoing:
            self._flush()
            if not self._outgoing:
                self._loop.watch_for(self._stream.fileno(), READ, self._ready)
        try:
            size = self._stream.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self._loop.unwatch(self._stream.fileno())
            self._on_end()
            return
        for frame in self._decoder.feed(self._buffer[:size]):
            self._on_frame(frame)

    def _flush(self) -> None:
        while self._outgoing:
            view = self._outgoing[0]
            try:
                sent = self._stream.send(view)
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()  # the end is noticed when reading
                return
            if sent == len(view):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = view[sent:]
