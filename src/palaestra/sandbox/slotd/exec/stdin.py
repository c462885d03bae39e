"""What is written to a running process: in order, at its pace, each request answered when all of it is in."""

from __future__ import annotations

import errno
import os
from collections import deque

from ..event_loop import WRITE
from ..protocol.frames import Fields, Kind
from ..requests.streams import Conversation
from . import pipes
from .command import Asker, Rounds


class Input:
    """The server's end of a process's input. `mark` is what ends the input of a terminal, which stays open then."""

    def __init__(self, fd: int, mark: bytes, loop: Rounds, link: Asker, talks: dict[int, Conversation]) -> None:
        self.fd, self._mark, self._loop, self._link, self._talks = fd, mark, loop, link, talks
        self._writing: deque[tuple[int, memoryview, int]] = deque()
        self._closing = self._listening = False

    def write(self, number: int, data: bytes, close: bool, owner: Conversation) -> None:
        """Answer when all of `data` is in; `close` ends the input after it. Raises BrokenPipeError."""
        if self.fd < 0 or self._closing:
            raise BrokenPipeError(errno.EPIPE, "the input of the process is closed")
        if close:
            data, self._closing = data + self._mark, not self._mark
        self._writing.append((number, memoryview(data), len(data)))
        self._talks[number] = owner
        self._pump()

    def cancel(self, number: int) -> None:
        """Answer a request with what of it is in; the rest is not written."""
        for item in [item for item in self._writing if item[0] == number]:
            self._writing.remove(item)
            self._answer(item)

    def finish(self) -> None:
        """The process reads no more: answer all requests and close. Idempotent."""
        while self._writing:
            self._answer(self._writing.popleft())
        self._close()

    def fail(self, fields: Fields) -> None:
        """The slot is gone."""
        while self._writing:
            self._refuse(self._writing.popleft()[0], fields)
        self._close()

    def _pump(self) -> None:
        """Write what can be written without waiting."""
        while self._writing and self.fd >= 0:
            number, view, size = self._writing[0]
            try:
                written = os.write(self.fd, view) if view else 0
            except BlockingIOError:
                break
            except OSError:
                self._writing.popleft()
                message = "the process has closed its input"
                self._refuse(number, {"error": "os", "errno": errno.EPIPE, "message": message, "path": None})
                continue
            if written < len(view):
                self._writing[0] = (number, view[written:], size)
            else:
                self._writing.popleft()
                self._answer((number, view[written:], size))
        if self._closing and not self._writing:
            self._close()
        self._listen()

    def _listen(self) -> None:
        """For room, and only while there is something to write: without a reader a pipe is always ready."""
        wanted = bool(self._writing) and self.fd >= 0
        if wanted and not self._listening:
            self._loop.watch(self.fd, self._pump)
            self._loop.watch_for(self.fd, WRITE, self._pump)
        elif self._listening and not wanted and self.fd >= 0:
            self._loop.unwatch(self.fd)
        self._listening = wanted

    def _answer(self, item: tuple[int, memoryview, int]) -> None:
        number, view, size = item
        self._talks.pop(number, None)
        self._link.send(Kind.RESULT, number, {"written": size - len(view)})

    def _refuse(self, number: int, fields: Fields) -> None:
        self._talks.pop(number, None)
        self._link.send(Kind.ERROR, number, fields)

    def _close(self) -> None:
        if self.fd >= 0:
            if self._listening:
                self._loop.unwatch(self.fd)
                self._listening = False
            pipes.close(self.fd)
            self.fd = -1
