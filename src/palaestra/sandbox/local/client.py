"""The client's end of a slot server: the process, the stream, and requests as coroutines.

Requests are multiplexed by number on one socket pair, so a slow command delays nobody; `in_flight.py` has what they
raise, and what becomes of one whose caller is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import IO

from palaestra.core.errors import SlotLost
from palaestra.core.types import JSON
from palaestra.sandbox.local.direct.files import Hands, Reach
from palaestra.sandbox.local.requests import InFlight, OnData, OnHole, Reply, Wire, error_of, settle
from palaestra.sandbox.slotd.protocol import frames
from palaestra.sandbox.slotd.protocol.frames import CHUNK, Frame, Kind
from palaestra.sandbox.slotd.protocol.init_messages import Environment

_SLOTD = Path(__file__).parents[1] / "slotd"
_CLOSE_PATIENCE_S = 15.0
_READ_AHEAD_BYTES = 4 << 20

Undo = Callable[[dict[str, JSON]], tuple[str, dict[str, JSON]]]
"""The request that undoes another, from what that one was answered."""

OnLost = Callable[[str, int], None]


class SlotServer:
    """One running slot server. Made by `start`; ends with `aclose`, or with this process."""

    def __init__(self, on_lost: OnLost) -> None:
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._wire: Wire | None = None
        self._in_flight = InFlight(self._send)
        self._process: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None
        self._over: Exception | None = None
        self._refusal: Exception | None = None
        self._gone = asyncio.Event()
        self._hands: Hands | None = None
        self.hello: dict[str, JSON] = {}
        """What the server said of itself."""

    @classmethod
    async def launch(cls, rung: str) -> tuple[SlotServer, socket.socket]:
        """A server that somebody else will talk to: its process, and the stream to it."""
        server = cls(lambda name, epoch: None)
        ours, theirs = socket.socketpair()
        with theirs:
            await server._spawn(theirs, rung)
        return server, ours

    @classmethod
    async def attach(cls, path: str, on_lost: OnLost) -> SlotServer:
        """The server behind a socket, which goes on after `aclose`. Raises `SandboxError` while another one has it."""
        server = cls(on_lost)
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.setblocking(False)
            await server._loop.sock_connect(stream, path)
        except BaseException:
            stream.close()
            raise
        server._wire = Wire(stream, server._on_frame, server._on_end)
        try:
            server.hello = (await server.request(Kind.HELLO, {"version": frames.VERSION})).fields
        except BaseException:
            await server.aclose()
            raise
        return server

    @classmethod
    async def start(cls, rung: str, settings: dict[str, JSON], on_lost: OnLost) -> SlotServer:
        """Start a server for a rung. Raises `IsolationUnavailable` when it refuses."""
        server = cls(on_lost)
        ours, theirs = socket.socketpair()
        try:
            with theirs, contextlib.ExitStack() as others:
                hands = others.enter_context(server._open_hands()) if rung == "full" else None
                await server._spawn(theirs, rung, hands)
            server._wire = Wire(ours, server._on_frame, server._on_end)
            server.hello = (await server.request(Kind.HELLO, {"version": frames.VERSION, **settings})).fields
        except BaseException:
            await server.aclose()
            ours.close()
            raise
        return server

    def _open_hands(self) -> socket.socket:
        """Be ready to take the roots that the server hands over; the server's end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._hands = Hands(ours)
        return theirs

    async def _spawn(self, stream: socket.socket, rung: str, hands: socket.socket | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        inherited = [stream.fileno()] if hands is None else [stream.fileno(), hands.fileno()]
        arguments = [sys.executable, "-I", "-S", str(_SLOTD), str(inherited[0]), rung, *map(str, inherited[1:])]
        self._process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=self._log,
            env={},
            cwd="/",
            pass_fds=inherited,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The pid of the process that watches the server, or of the service it belongs to."""
        return int(self.hello["pid"]) if self._process is None else self._process.pid

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it can be used on."""
        return self._loop

    @property
    def ended(self) -> bool:
        """Whether the server is gone, and every slot with it."""
        return self._over is not None

    async def aclose(self) -> None:
        """End the server, and with it every slot, or leave a service. Returns when that is done. Idempotent."""
        if self._wire is not None:
            if self._process is None:
                self._wire.write_eof()  # the service lets go, then the next one can attach
                await settle(asyncio.ensure_future(self._gone.wait()), _CLOSE_PATIENCE_S)
            self._wire.close()
        if self._process is not None:
            waiting = asyncio.ensure_future(self._process.wait())
            await settle(waiting, _CLOSE_PATIENCE_S)
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
        if self._log is not None:
            self._log.close()
        if self._hands is not None:
            self._hands.close()

    def reach(self, name: str, epoch: int, environment: Environment) -> Reach | None:
        """What the server has handed over of a slot that has been made just now, if anything. Asked for once."""
        if self._hands is None:
            return None

        async def ask(op: str) -> dict[str, JSON]:
            return (await self.call(op, {"slot": name, "epoch": epoch})).fields

        return self._hands.reach(name, epoch, environment, ask)

    def forget(self, epoch: int) -> None:
        """Nobody will ask for that."""
        if self._hands is not None:
            self._hands.forget(epoch)

    def call(
        self, op: str, fields: dict[str, JSON], data: bytes = b"", on_data: OnData | None = None
    ) -> Coroutine[None, None, Reply]:
        """One request, to its answer. `fields` becomes its own."""
        fields["op"] = op
        return self._in_flight.request(Kind.REQUEST, fields, data, on_data)

    async def read(self, op: str, fields: dict[str, JSON]) -> bytes:
        """A request whose answer may be long, and comes in pieces."""
        pieces: list[bytes] = []
        last = await self.call(op, fields, on_data=pieces.append)
        return b"".join((*pieces, last.data)) if pieces else last.data

    async def listing(self, op: str, fields: dict[str, JSON]) -> list[dict[str, JSON]]:
        """The same where the answer is a list of objects, by path."""
        found: list[dict[str, JSON]] = json.loads(await self.read(op, fields))
        return sorted(found, key=lambda entry: str(entry["path"]))

    async def download(self, fields: dict[str, JSON], file: IO[bytes]) -> None:
        """Read a file of a slot into one of this machine. Its holes are holes there."""
        last = await self.request(
            Kind.REQUEST,
            {"op": "read", **fields, "holes": True},
            on_data=file.write,
            on_hole=lambda size: file.seek(size, os.SEEK_CUR),
        )
        file.write(last.data)
        file.truncate()

    def request(
        self, kind: Kind, fields: dict[str, JSON], on_data: OnData | None = None, on_hole: OnHole | None = None
    ) -> Coroutine[None, None, Reply]:
        """One frame, to its answer. Raises ValueError for what is too long for a frame."""
        return self._in_flight.request(kind, fields, b"", on_data, on_hole)

    async def make(self, op: str, fields: dict[str, JSON], undo: Undo) -> dict[str, JSON]:
        """A request that makes something, of which the answer tells. Cancelled, it leaves nothing behind."""
        with self._in_flight.begin() as call:
            try:
                self._send(Kind.REQUEST, call.number, {"op": op, **fields})
                return (await call.outcome()).fields
            except asyncio.CancelledError:
                await call.settled()
                if call.reply is not None:
                    op, fields = undo(call.reply.fields)
                    await settle(asyncio.ensure_future(self.call(op, fields)))
                raise

    async def upload(self, fields: dict[str, JSON], data: bytes) -> None:
        """Write a file. What is more than one piece follows the request, at the pace at which the server takes it."""
        if len(data) <= CHUNK:
            await self.call("write", fields, data)
        else:
            await self._upload(fields, _pieces_of(data))

    async def upload_file(self, fields: dict[str, JSON], file: IO[bytes]) -> int:
        """The same with what a file of this machine holds, of which little is in memory at a time: its bytes."""
        await self._upload(fields, _pieces_from(file))
        return file.tell()

    async def _upload(self, fields: dict[str, JSON], pieces: AsyncIterator[bytes]) -> None:
        wire = self._wire
        assert wire is not None
        with self._in_flight.begin() as call:
            self._send(Kind.REQUEST, call.number, {"op": "write", **fields, "follows": True})
            try:
                async for piece in pieces:
                    if call.answered:
                        break
                    self._send(Kind.DATA, call.number, None, piece)
                    await wire.drained()
                self._send(Kind.END, call.number)
                await call.outcome()
            except BaseException:
                await self._in_flight.abandon(call)
                raise

    def _send(self, kind: Kind, number: int, fields: dict[str, JSON] | None = None, data: bytes = b"") -> None:
        if self._over is not None:
            raise self._over
        assert self._wire is not None, "the server has been started"
        self._wire.link.send(kind, number, fields, data)

    def _on_end(self, error: Exception | None) -> None:
        why = f": {error}" if error is not None else self._last_words()
        self._over = self._refusal or SlotLost(f"the slot server has ended{why}")
        self._gone.set()
        self._in_flight.fail(self._over)
        self._on_lost("", 0)

    def _on_frame(self, frame: Frame) -> None:
        if self._in_flight.on_frame(frame):
            return
        if frame.kind is Kind.LOST:
            self._on_lost(frame.fields["slot"], frame.fields["epoch"])
        elif frame.kind is Kind.ERROR and frame.request == 0:
            self._refusal = error_of(frame.fields)

    def _last_words(self) -> str:
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()
        return f": {text}" if text else ""


async def _pieces_of(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


async def _pieces_from(file: IO[bytes]) -> AsyncIterator[bytes]:
    """Read in a thread, many pieces at a time: the disk may be slow, and a thread per piece would be."""
    while data := await asyncio.to_thread(file.read, _READ_AHEAD_BYTES):
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]
