"""The client of a slot server: starts the server's process, reads and writes its stream, and offers requests as
coroutines.

Requests are multiplexed by number on one stream, so a slow command does not delay other requests. An error of the
slot's operating system is raised as a built-in exception (`FileNotFoundError`, …); other failures are raised as the
sandbox's own errors.

A coroutine that is cancelled while its request runs waits for the answer first (a command is killed, and its death is
proved), so that nothing continues without its caller.

The stream uses asyncio's descriptor callbacks, because asyncio's transports and protocols would double the number of
calls per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import IO, Self

from palaestra_slots.core.errors import IsolationUnavailable, SandboxError, SlotEnded, SlotLost, StaleLease
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slotd.event_loop import WRITE
from palaestra_slots.sandbox.slotd.protocol import frames
from palaestra_slots.sandbox.slotd.protocol.frames import CHUNK, WINDOW, Fields, Frame, FrameConnection, FrameKind

_SLOTD = Path(__file__).parents[1] / "slotd"
_CLOSE_PATIENCE_S = 15.0
_READ_AHEAD_BYTES = 4 << 20

OnData = Callable[[bytes], object]
OnHole = Callable[[int], object]
OnLost = Callable[[str, int], None]  # name and epoch of a slot that died; an empty name means the whole server
Undo = Callable[[Fields], tuple[str, Fields]]  # from the answer to a request, returns the request that undoes it


class CommandNotStarted(Exception):
    """A program could not be run. The slot turns this error into exit status 126 or 127, as a shell would."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno


class Pending:
    """One request that waits for its answer."""

    __slots__ = ("answered", "failure", "number", "on_data", "on_hole", "reply", "taken", "waiter")

    def __init__(self, number: int, on_data: OnData | None, on_hole: OnHole | None) -> None:
        self.number, self.on_data, self.on_hole = number, on_data, on_hole
        self.taken = 0
        self.failure: Exception | None = None
        self.answered = False
        self.reply: Frame | None = None
        self.waiter: asyncio.Future[None] | None = None

    def answer(self, reply: Frame | None, failure: Exception | None = None) -> None:
        """Set the result; the waiter may already have been cancelled."""
        self.answered, self.reply = True, reply
        self.failure = self.failure or failure
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def outcome(self) -> Frame:
        """Wait for the answer and return it; if the answer is an error, raise that error."""
        if not self.answered:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.failure is not None:
            raise self.failure
        assert self.reply is not None
        return self.reply

    async def settled(self) -> None:
        """Wait for the answer after a cancellation."""
        if not self.answered:
            # The first future was cancelled together with the coroutine that waited for it.
            self.waiter = asyncio.get_running_loop().create_future()
            await wait_uninterrupted(self.waiter)


class Requests(ABC):
    """Sends requests about slots and waits for their answers. Forked children close the descriptors of every instance,
    because the descriptors would otherwise keep slots alive that this process drops."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        _instances.add(self)

    @abstractmethod
    async def call(
        self, op: str, fields: Fields, data: bytes = b"", on_data: OnData | None = None, on_hole: OnHole | None = None
    ) -> Frame:
        """Send a request and wait for its answer. The call owns `fields` from then on and may change the mapping.
        Before the answer, `on_data` receives each piece of data, and `on_hole` the size of each hole in the data. An
        error in either function ends the request.
        Raises ValueError for a request that is too long."""

    @abstractmethod
    async def make(self, op: str, fields: Fields, undo: Undo, data: bytes = b"") -> Fields:
        """Send a request that makes something; if the call is cancelled, undo what the request has made."""

    @abstractmethod
    async def send_file(self, fields: Fields, pieces: AsyncIterator[bytes]) -> None:
        """Send a request to write a file, and then the file's pieces as fast as the server reads them."""

    @abstractmethod
    def slot_ended(self) -> None:
        """Close the slot's own descriptors, because the slot has ended."""

    @abstractmethod
    def close_in_child(self) -> None:
        """Close every descriptor and nothing else, in a forked child."""

    async def read(self, op: str, fields: Fields) -> bytes:
        """Send a request and return the bytes of its answer, which may come in pieces."""
        pieces: list[bytes] = []
        last = await self.call(op, fields, on_data=pieces.append)
        return b"".join((*pieces, last.data)) if pieces else last.data

    async def listing(self, op: str, fields: Fields) -> list[dict[str, JSON]]:
        """Send a request whose answer is a list of objects, and return the list sorted by path."""
        found: list[dict[str, JSON]] = json.loads(await self.read(op, fields))
        return sorted(found, key=lambda entry: str(entry["path"]))

    async def download(self, fields: Fields, file: IO[bytes]) -> None:
        """Copy a file in a slot into a file on this machine, and keep its holes."""
        fields = {**fields, "holes": True}
        last = await self.call("read", fields, b"", file.write, lambda size: file.seek(size, os.SEEK_CUR))
        file.write(last.data)
        file.truncate()

    async def upload(self, fields: Fields, data: bytes) -> None:
        """Write a file in a slot."""
        if len(data) <= CHUNK:
            await self.call("write", fields, data)
        else:
            await self.send_file(fields, _pieces_of(data))

    async def upload_file(self, fields: Fields, file: IO[bytes]) -> int:
        """Copy a file on this machine into a file in a slot, piece by piece. Returns the file's size in bytes."""
        await self.send_file(fields, _pieces_from(file))
        return file.tell()

    # The table of pending requests

    @abstractmethod
    def _send(self, kind: FrameKind, number: int, fields: Fields, data: bytes = b"") -> None: ...

    def _new_request(self, on_data: OnData | None = None, on_hole: OnHole | None = None) -> Pending:
        """Return a new pending request, which the caller must remove from the table."""
        number = next(self._numbers)
        pending = self._pending[number] = Pending(number, on_data, on_hole)
        return pending

    async def _abandon(self, pending: Pending) -> None:
        """Cancel a request and wait for its end."""
        if not pending.answered:
            self._send(FrameKind.CANCEL, pending.number, {})
        await pending.settled()

    def _on_frame(self, frame: Frame) -> bool:
        """Handle a frame for a pending request; returns False if that request is not pending."""
        kind, pending = frame.kind, self._pending.get(frame.request)
        if pending is None:
            return False
        if kind is FrameKind.RESULT or kind is FrameKind.HELLO:
            pending.answer(frame)
        elif kind is FrameKind.DATA:
            self._take_frame(frame, pending)
        elif kind is FrameKind.ERROR:
            pending.answer(None, error_of(frame.fields))
        return True

    def _take_frame(self, frame: Frame, pending: Pending) -> None:
        if pending.on_data is not None and pending.failure is None:
            try:
                if frame.fields and pending.on_hole is not None:
                    pending.on_hole(frame.fields["hole"])
                else:
                    pending.on_data(frame.data)
            # an error in the caller's callback ends the command, and the caller gets the error
            except Exception as error:
                pending.failure = error
                self._send(FrameKind.CANCEL, pending.number, {})
        pending.taken += len(frame.data)
        # Credit for each piece would double the number of frames; credit only for a whole window would let the stream
        # stop.
        if pending.taken >= WINDOW // 2:
            self._send(FrameKind.CREDIT, pending.number, {"bytes": pending.taken})
            pending.taken = 0


class _StreamWatcher:
    """Watches the stream of a client in asyncio's event loop: a `Watcher` for one descriptor. `failed` gets the error
    of a callback, and `drained` is set when the stream has taken everything."""

    def __init__(self, drained: asyncio.Event, failed: Callable[[Exception], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._drained = drained
        self._failed = failed
        self._ready: Callable[[], object] = lambda: None

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call `call` whenever the stream is readable."""
        self._ready = call
        self._loop.add_reader(fd, self._on_ready)

    def watch_for(self, fd: int, events: int, call: Callable[[], object]) -> None:
        """Start or stop the callbacks that report that the stream is writable."""
        if events & WRITE:
            self._loop.add_writer(fd, self._on_ready)
        else:
            self._loop.remove_writer(fd)
            self._drained.set()

    def unwatch(self, fd: int) -> None:
        """Stop the callbacks."""
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)

    def _on_ready(self) -> None:
        try:
            self._ready()
        except Exception as error:
            self._failed(error)


class SlotClient(Requests):
    """The client of one running slot server. A client is made by `start`, `attach` or `launch`, and ends with `aclose`,
    with its server or with this process."""

    def __init__(self, on_lost: OnLost) -> None:
        super().__init__()
        self._on_lost = on_lost
        self.loop = asyncio.get_running_loop()  # the only event loop on which the client can be used
        self._stream: socket.socket | None = None
        self._connection: FrameConnection
        self._drained = asyncio.Event()
        self._watcher = _StreamWatcher(self._drained, self._end)
        self._process: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None
        self._over: Exception | None = None
        self._refusal: Exception | None = None
        self._gone = asyncio.Event()
        self.hello: Fields = {}  # the server's HELLO

    @classmethod
    async def launch_server(cls, rung: str) -> tuple[SlotClient, socket.socket]:
        """Start a server for another process to use; returns a client that holds the server's process, and the stream
        to the server."""
        client = cls(lambda name, epoch: None)
        ours, theirs = socket.socketpair()
        with theirs:
            await client._spawn(theirs, rung)
        return client, ours

    @classmethod
    async def attach(cls, path: str, on_lost: OnLost) -> SlotClient:
        """Return a client of the server behind a socket; the server keeps running after `aclose`. Raises `SandboxError`
        while another client is attached."""
        client = cls(on_lost)
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.setblocking(False)
            await client.loop.sock_connect(stream, path)
            client._connect(stream)
            await client._greet({})
        except BaseException:
            await client.aclose()
            stream.close()
            raise
        return client

    @classmethod
    async def start(cls, rung: str, settings: Fields, on_lost: OnLost) -> Self:
        """Start a server at an isolation level. Raises `IsolationUnavailable` if the server cannot provide the
        level."""
        client = cls(on_lost)
        await client._launch(rung, settings)
        return client

    async def _launch(self, rung: str, settings: Fields) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await self._spawn(theirs, rung)
            await self._deliver(ours)
            self._connect(ours)
            await self._greet(settings)
        except BaseException:
            await self.aclose()
            ours.close()
            raise

    async def _spawn(self, stream: socket.socket, rung: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        with contextlib.ExitStack() as handed:
            others = [handed.enter_context(each).fileno() for each in self._sockets_for_server()]
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_SLOTD), str(stream.fileno()), rung, *map(str, others)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=self._log,
                # Variables of this process may hold keys.
                env={},
                cwd="/",
                pass_fds=[stream.fileno(), *others],
                start_new_session=True,
            )

    async def _deliver(self, stream: socket.socket) -> None:
        """Send the process everything that it needs to become a server. A process on this machine needs nothing."""

    def _sockets_for_server(self) -> Sequence[socket.socket]:
        """Return additional sockets that the server inherits; this process closes its own copies."""
        return ()

    def _connect(self, stream: socket.socket) -> None:
        self._stream = stream
        self._connection = FrameConnection(self._watcher, stream, self._on_stream_frame, self._end)

    async def _greet(self, settings: Fields) -> None:
        pending = self._new_request()
        try:
            self._send(FrameKind.HELLO, pending.number, {"version": frames.VERSION, **settings})
            self.hello = (await pending.outcome()).fields
        finally:
            del self._pending[pending.number]

    @property
    def pid(self) -> int:
        """The pid of the process that watches the server, or of the service to which the server belongs."""
        return int(self.hello["pid"]) if self._process is None else self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the server, and every slot with it, is gone."""
        return self._over is not None

    async def aclose(self) -> None:
        """End the server with every slot, or detach from a service. Returns when that is done. Idempotent."""
        if self._stream is not None:
            if self._process is None and self._over is None:
                self._stream.shutdown(socket.SHUT_WR)  # the service detaches; after that, the next client can attach
                await wait_uninterrupted(asyncio.ensure_future(self._gone.wait()), _CLOSE_PATIENCE_S)
            self._end()
        if self._process is not None:
            await wait_uninterrupted(asyncio.ensure_future(self._process.wait()), _CLOSE_PATIENCE_S)
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
        if self._log is not None:
            self._log.close()

    async def create(self, fields: Fields) -> tuple[Fields, Requests]:
        """Make a slot; returns the server's answer, and the object for requests about the slot."""
        return await self.make("create", fields, lambda made: ("destroy", made)), self

    async def call(
        self, op: str, fields: Fields, data: bytes = b"", on_data: OnData | None = None, on_hole: OnHole | None = None
    ) -> Frame:
        fields["op"] = op
        pending = self._new_request(on_data, on_hole)
        try:
            self._send(FrameKind.REQUEST, pending.number, fields, data)
            return await pending.outcome()
        except asyncio.CancelledError:
            await self._abandon(pending)
            raise
        finally:
            del self._pending[pending.number]

    async def make(self, op: str, fields: Fields, undo: Undo, data: bytes = b"") -> Fields:
        pending = self._new_request()
        try:
            self._send(FrameKind.REQUEST, pending.number, {"op": op, **fields}, data)
            return (await pending.outcome()).fields
        except asyncio.CancelledError:
            # Nothing that is half made can be cancelled. Once it exists, it is undone.
            await pending.settled()
            if pending.reply is not None:
                op, fields = undo(pending.reply.fields)
                await wait_uninterrupted(asyncio.ensure_future(self.call(op, fields)))
            raise
        finally:
            del self._pending[pending.number]

    async def send_file(self, fields: Fields, pieces: AsyncIterator[bytes]) -> None:
        pending = self._new_request()
        try:
            self._send(FrameKind.REQUEST, pending.number, {"op": "write", **fields, "follows": True})
            async for piece in pieces:
                if pending.answered:
                    break
                self._send(FrameKind.DATA, pending.number, {}, piece)
                # A fast reader of a large file would otherwise fill the memory of this process.
                while self._connection.waiting and self._over is None:
                    self._drained.clear()
                    await self._drained.wait()
            self._send(FrameKind.END, pending.number, {})
            await pending.outcome()
        except BaseException:
            await self._abandon(pending)
            raise
        finally:
            del self._pending[pending.number]

    def slot_ended(self) -> None:
        """Do nothing: this client holds no resources of a single slot."""

    def close_in_child(self) -> None:
        """Close the stream in a forked child. The event loop's descriptors still belong to its parent."""
        if self._stream is not None:
            self._over = self._over or SlotLost("slots cannot be used in a forked process")
            self._stream.close()

    def _send(self, kind: FrameKind, number: int, fields: Fields, data: bytes = b"") -> None:
        if self._over is not None:
            raise self._over
        self._connection.send(kind, number, fields, data)

    def _on_stream_frame(self, frame: Frame) -> None:
        if self._on_frame(frame):
            return
        if frame.kind is FrameKind.LOST:
            self._on_lost(frame.fields["slot"], frame.fields["epoch"])
        elif frame.kind is FrameKind.ERROR and frame.request == 0:
            self._refusal = error_of(frame.fields)

    def _end(self, error: Exception | None = None) -> None:
        """Close the stream, fail all pending requests and report the loss. Idempotent."""
        if self._over is not None or self._stream is None:
            return
        why = f": {error}" if error is not None else self._last_log()
        self._over = self._refusal or SlotLost(f"the slot server has ended{why}")
        self._watcher.unwatch(self._stream.fileno())
        self._stream.close()
        self._drained.set()
        self._gone.set()
        for pending in self._pending.values():
            pending.answer(None, self._over)
        self._on_lost("", 0)

    def _last_log(self) -> str:
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()
        return f": {text}" if text else ""


_instances: weakref.WeakSet[Requests] = weakref.WeakSet()


def _close_in_child() -> None:
    for each in list(_instances):
        each.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


async def wait_uninterrupted(future: asyncio.Future[JSON], patience_s: float | None = None) -> None:
    """Wait for the end of work that must not be interrupted, even if the caller is cancelled meanwhile. After
    `patience_s` seconds, cancel the work."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            done, _ = await asyncio.wait([future], timeout=patience_s)
            if not done:
                future.cancel()
                return
    if not future.cancelled():
        # Otherwise, asyncio would log that nobody has looked at the error.
        future.exception()


def error_of(fields: Fields) -> Exception:
    """Return the exception for an ERROR frame."""
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
        case "ended":
            return SlotEnded(
                f"{message}, because its own commands used up its memory, or killed or stopped its first process"
            )
        case "isolation":
            return IsolationUnavailable(message)
    return SandboxError(message)


async def _pieces_of(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


async def _pieces_from(file: IO[bytes]) -> AsyncIterator[bytes]:
    """Yield the file's content in pieces. The file is read in a thread, because the disk may be slow. Each read gets
    many pieces, because a thread for each piece would be slow too."""
    while data := await asyncio.to_thread(file.read, _READ_AHEAD_BYTES):
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]
