"""Bounded capture of a command's output: the head and the tail are kept, the total is counted."""

from __future__ import annotations

from collections import deque


class Capture:
    """Keeps at most `limit` bytes of a stream of any length: half from its start, half from its end."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0

    def add(self, data: bytes) -> None:
        """Take the next piece of the stream."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_limit:
            self._tail_size -= len(self._tail.popleft())
        if len(self._tail) > 1024:
            self._join()

    @property
    def truncated(self) -> bool:
        """Whether anything was dropped."""
        return self.total > self._head_limit + self._tail_limit

    def parts(self) -> tuple[bytes, bytes]:
        """The head and the tail. Together they are the whole stream when nothing was dropped."""
        if not self._tail:
            return bytes(self._head), b""
        self._join()
        return bytes(self._head), self._tail[0]

    def _join(self) -> None:
        """Many small pieces become one, so that a stream of single bytes costs no more than its bound."""
        tail = b"".join(self._tail)
        self._tail = deque([tail[len(tail) - self._tail_limit :] if len(tail) > self._tail_limit else tail])
        self._tail_size = len(self._tail[0])
