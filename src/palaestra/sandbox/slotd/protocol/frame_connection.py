"""One end of the stream between client and server: frames in, frames out, without blocking. Both sides use it.

Each request's window bounds the server's unrequested data, so the outgoing buffer is bounded by the number of open
requests.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

from ..event_loop import READ, WRITE, Watcher
from .frames import RECEIVE_BYTES, Fields, Frame, FrameDecoder, FrameKind, encode


class FrameConnection:
    """Calls `on_frame` for each frame, and `on_end` once when the other side has closed the stream."""

    def __init__(
        self, loop: Watcher, stream: socket.socket, on_frame: Callable[[Frame], object], on_end: Callable[[], None]
    ) -> None:
        self._loop, self._stream, self._on_frame, self._on_end = loop, stream, on_frame, on_end
        self._decoder = FrameDecoder()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._outgoing: deque[memoryview] = deque()
        stream.setblocking(False)
        loop.watch(stream.fileno(), self._ready)

    def send(self, kind: FrameKind, request: int, fields: Fields | None = None, data: bytes = b"") -> None:
        """Send one frame: at once as much as the socket takes, the rest later. Raises like `encode`."""
        frame = encode(kind, request, fields, data)
        sent = 0
        if not self._outgoing:
            try:
                sent = self._stream.send(frame)
            except BlockingIOError:
                pass
            except OSError:
                return  # reading will find the end
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
                self._outgoing.clear()  # reading will find the end
                return
            if sent == len(view):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = view[sent:]
