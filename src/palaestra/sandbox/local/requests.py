"""Requests in flight: each is a coroutine that waits for its answer, whoever serves it (`client.py`, `line.py`).

Errors come back typed: what a file call can expect are the builtins (`FileNotFoundError`, …), everything else is one of
the sandbox's own errors.

A coroutine that is cancelled while its request runs waits for the answer first (a command is killed, its death is
proved), so that nothing goes on behind the caller's back.

The slot server's `Link` on the client's event loop: frames out at once where the socket takes them, frames in.

Not asyncio's transports and protocols: per request they cost as many calls again as everything else that the client
does. What they bring besides is here: a socket that is full is waited for, and nonsense ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator

from palaestra.core.errors import IsolationUnavailable, SandboxError, SlotLost, StaleLease
from palaestra.core.types import JSON
from palaestra.sandbox.local.direct import after_fork
from palaestra.sandbox.slotd.event_loop import WRITE
from palaestra.sandbox.slotd.protocol.connection import Link
from palaestra.sandbox.slotd.protocol.frames import WINDOW, Fields, Frame, Kind

Reply = Frame
"""The answer to a request: its `fields` and `data`."""

OnData = Callable[[bytes], object]
OnHole = Callable[[int], object]

Send = Callable[[Kind, int, Fields, bytes], object]
"""Takes a frame to whoever serves requests. What it raises, the request raises."""


class CommandNotStarted(Exception):
    """A program that could not be run; the slot turns it into exit status 126 or 127, as a shell would."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno


class Call:
    """One request in flight, under its `number`."""

    __slots__ = ("answered", "failure", "number", "on_data", "on_hole", "reply", "taken", "waiter")

    def __init__(self, number: int, on_data: OnData | None = None, on_hole: OnHole | None = None) -> None:
        self.number, self.on_data, self.on_hole = number, on_data, on_hole
        self.taken = 0
        self.failure: Exception | None = None
        self.answered = False
        self.reply: Reply | None = None
        self.waiter: asyncio.Future[None] | None = None

    def answer(self, reply: Reply | None, failure: Exception | None = None) -> None:
        """This is it; whoever waited may have been cancelled."""
        self.answered, self.reply = True, reply
        self.failure = self.failure or failure
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def outcome(self) -> Reply:
        """Wait for the answer. Raises what it is, if it is an error."""
        if not self.answered:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.failure is not None:
            raise self.failure
        assert self.reply is not None
        return self.reply

    async def settled(self) -> None:
        """After a cancellation: wait for the answer all the same."""
        if not self.answered:
            self.waiter = asyncio.get_running_loop().create_future()
            await settle(self.waiter)


class InFlight:
    """All that one side has asked another."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}

    async def request(
        self,
        kind: Kind,
        fields: Fields,
        data: bytes = b"",
        on_data: OnData | None = None,
        on_hole: OnHole | None = None,
    ) -> Reply:
        """Send a frame and wait for its answer. Cancelled, it cancels there and waits for the end.

        `on_data` and `on_hole` get what comes before the answer; what they raise ends the request.
        """
        number = next(self._numbers)
        call = self._calls[number] = Call(number, on_data, on_hole)
        try:
            self._send(kind, number, fields, data)
            return await call.outcome()
        except asyncio.CancelledError:
            await self.abandon(call)
            raise
        finally:
            del self._calls[number]

    @contextlib.contextmanager
    def begin(self) -> Iterator[Call]:
        """For a request of more than one frame."""
        number = next(self._numbers)
        call = self._calls[number] = Call(number)
        try:
            yield call
        finally:
            del self._calls[number]

    async def abandon(self, call: Call) -> None:
        """Nobody wants the answer: have the request given up, and wait until it is."""
        if not call.answered:
            self._send(Kind.CANCEL, call.number, {}, b"")
        await call.settled()

    def on_frame(self, frame: Frame) -> bool:
        """What has become of a request; False for one that is not in flight."""
        kind, call = frame.kind, self._calls.get(frame.request)
        if call is None:
            return False
        if kind is Kind.RESULT or kind is Kind.HELLO:
            call.answer(frame)
        elif kind is Kind.DATA:
            self._take(frame, call)
        elif kind is Kind.ERROR:
            call.answer(None, error_of(frame.fields))
        return True

    def fail(self, error: Exception) -> None:
        """There will be no more answers."""
        for call in self._calls.values():
            call.answer(None, error)

    def _take(self, frame: Frame, call: Call) -> None:
        if call.on_data is not None and call.failure is None:
            try:
                if frame.fields and call.on_hole is not None:
                    call.on_hole(frame.fields["hole"])
                else:
                    call.on_data(frame.data)
            except Exception as error:  # the caller's callback: its command ends, and the caller gets its error
                call.failure = error
                self._send(Kind.CANCEL, call.number, {}, b"")
        call.taken += len(frame.data)
        if call.taken >= WINDOW // 2:
            self._send(Kind.CREDIT, call.number, {"bytes": call.taken}, b"")
            call.taken = 0


async def settle(future: asyncio.Future[JSON], patience_s: float | None = None) -> None:
    """Wait for the end of what cannot be left half done, however often the caller is cancelled meanwhile."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            done, _ = await asyncio.wait([future], timeout=patience_s)
            if not done:
                future.cancel()
                return
    if not future.cancelled():
        future.exception()


def error_of(fields: Fields) -> Exception:
    """What an ERROR says, as it is raised."""
    message = fields["message"]
    match fields["error"]:
        case "os":
            return OSError(fields["errno"], message, fields.get("path"))
        case "exec":
            return CommandNotStarted(fields["errno"], message)
        case "stale":
            return StaleLease(message)
        case "lost":
            return SlotLost(message)
        case "isolation":
            return IsolationUnavailable(message)
    return SandboxError(message)


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
        after_fork.not_for_children(self)

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
