"""What can be asked of a slot's processes from outside, with no program, library or file of the slot's in between.

    op          fields                                              RESULT
    arguments   pid                                                 arguments: of a live process, else null
    ask         port, timeout_s, max_bytes, and the bytes           what 127.0.0.1 answered until it hung up

Both carry the lease. The kernel says what the arguments are, and a connection is made by the server itself, from a
socket that belongs to the slot's network; where slots have no network of their own, to the machine's.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from .. import files, syscalls
from ..event_loop import READ, WRITE, Job, Loop
from ..protocol.connection import Link
from ..protocol.frames import Frame, Kind
from ..server_slot import Slot

MAX_ANSWER_BYTES = 4 << 20

_MAX_ARGUMENTS_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10


class Looking:
    """Serves the requests above. `leased` finds the slot that a request names."""

    def __init__(self, loop: Loop, link: Link, leased: Callable[[Frame], Slot]) -> None:
        self._loop, self._link, self._leased = loop, link, leased
        self.operations: dict[str, Callable[[Frame], Job | None]] = {"arguments": self._arguments, "ask": self._ask}

    def _arguments(self, frame: Frame) -> None:
        found = arguments(self._leased(frame).root, int(frame.fields["pid"]))
        self._link.send(Kind.RESULT, frame.request, {"arguments": found})

    def _ask(self, frame: Frame) -> None:
        slot, link, number = self._leased(frame), self._link, frame.request

        def answered(data: bytes, error: OSError | None) -> None:
            if error is None:
                link.send(Kind.RESULT, number, {}, data)
            else:
                fields = {"error": "os", "errno": error.errno, "message": error.strerror, "path": ""}
                link.send(Kind.ERROR, number, fields)

        _Exchange(self._loop, slot, int(frame.fields["port"]), bytes(frame.data), frame.fields, answered)


def arguments(root: int, pid: int) -> list[str] | None:
    """The arguments of a process as the slot numbers it; None where none of that number lives."""
    try:
        fd = files.open_at(root, f"/proc/{pid}/cmdline", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if syscalls.filesystem_type(fd) != files.PROC:
            return None
        data = os.read(fd, _MAX_ARGUMENTS_BYTES)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
    words = data.removesuffix(b"\0").split(b"\0")
    return [word.decode(errors="replace") for word in words] if data else None


class _Exchange:
    """One connection: everything is sent, and what comes is kept until its end, its time or its bound."""

    def __init__(
        self,
        loop: Loop,
        slot: Slot,
        port: int,
        request: bytes,
        limits: dict[str, float],
        answered: Callable[[bytes, OSError | None], None],
    ) -> None:
        self._loop, self._unsent, self._answered = loop, memoryview(request), answered
        self._most = min(int(limits["max_bytes"]), MAX_ANSWER_BYTES)
        self._received = bytearray()
        self._socket = slot.make_socket(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        self._socket.setblocking(False)
        self._timer = loop.later(limits["timeout_s"], lambda: self._end(TimeoutError(errno.ETIMEDOUT, "no end of it")))
        self._socket.connect_ex(("127.0.0.1", port))
        loop.watch(self._socket.fileno(), self._write)
        loop.watch_for(self._socket.fileno(), WRITE, self._write)

    def _write(self) -> None:
        problem = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self._end(OSError(problem, os.strerror(problem)))
            return
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if not self._unsent:
            self._loop.watch_for(self._socket.fileno(), READ, self._read)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        self._received += data
        if not data or len(self._received) >= self._most:
            self._end(None)

    def _end(self, error: OSError | None) -> None:
        self._timer.cancel()
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        self._answered(bytes(self._received[: self._most]), error)
