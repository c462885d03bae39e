"""Connects a client of `pods/exec` to a process, for the Kubernetes stand-in.

Clients from 1.31 use a WebSocket with the subprotocol `v5.channel.k8s.io`, in which the first byte of a message is its
channel. Older ones use SPDY/3.1 with one stream per channel, of which only the frames that such clients send are read.
Sources: k8s.io/apimachinery/pkg/util/remotecommand, k8s.io/client-go/tools/remotecommand (v4, v5), SPDY draft 3.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import WSMsgType, web

from palaestra_slots.core.types import JSON

CHANNELS = ("stdin", "stdout", "stderr", "error")
"""The channels of an exec; their positions are the first bytes of messages."""
WEBSOCKET, SPDY = "v5.channel.k8s.io", "v4.channel.k8s.io"
_CLOSE = 255
_PIECE = 32 << 10

Start = Callable[[], Awaitable["asyncio.subprocess.Process | str"]]
"""Starts the process of an exec, or returns why it cannot start."""
Send = Callable[[str, bytes], Awaitable[None]]


async def answer_websocket(request: web.Request, start: Start) -> web.WebSocketResponse:
    """Run an exec over a WebSocket."""
    stream = web.WebSocketResponse(protocols=(WEBSOCKET,), max_msg_size=0)
    await stream.prepare(request)

    async def send(channel: str, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            await stream.send_bytes(bytes([CHANNELS.index(channel)]) + data)

    async def given() -> AsyncIterator[bytes]:
        async for message in stream:
            if message.type is not WSMsgType.BINARY:
                return
            if message.data[0] == _CLOSE:
                return
            if message.data[0] == 0 and len(message.data) > 1:
                yield message.data[1:]

    await _run(start, given(), send)
    await stream.close()
    return stream


async def _run(start: Start, given: AsyncIterator[bytes], send: Send) -> None:
    """Start a process, pass its streams on until it has ended, and send its status."""
    process = await start()
    if isinstance(process, str):
        await send("error", _failure(500, "InternalError", f"Internal error occurred: {process}"))
        return
    assert process.stdin is not None
    feeding = asyncio.create_task(_feed(process.stdin, given))
    outputs = [(process.stdout, "stdout"), (process.stderr, "stderr")]
    await asyncio.gather(*(_pass_on(stream, name, send) for stream, name in outputs if stream is not None))
    code = await process.wait()
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    if code == 0:
        await send("error", json.dumps({"metadata": {}, "status": "Success"}).encode())
        return
    code = code if code > 0 else 128 - code
    causes = [{"reason": "ExitCode", "message": str(code)}]
    message = f"command terminated with non-zero exit code: exit status {code}"
    await send("error", _failure(500, "NonZeroExitCode", message, {"causes": causes}))


async def _feed(stdin: asyncio.StreamWriter, given: AsyncIterator[bytes]) -> None:
    """Write what the client sends. At its end, which may be that of the connection, close the input, as a container
    runtime does."""
    try:
        with contextlib.suppress(ConnectionError):
            async for piece in given:
                stdin.write(piece)
                await stdin.drain()
    finally:
        stdin.close()


async def _pass_on(stream: asyncio.StreamReader, name: str, send: Send) -> None:
    while piece := await stream.read(_PIECE):
        await send(name, piece)


def _failure(code: int, reason: str, message: str, details: JSON = None) -> bytes:
    status = {"metadata": {}, "status": "Failure", "message": message, "reason": reason, "code": code}
    return json.dumps(status | ({} if details is None else {"details": details})).encode()


# SPDY

_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _PING, _GOAWAY = 1, 2, 3, 6, 7
_FIN = 1
_LONGEST_FRAME = 1 << 20

_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow "
    "authorization cache-control connection content-base content-encoding content-language content-length "
    "content-location content-md5 content-range content-type date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma "
    "proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status 200+OK version HTTP/1.1 url public set-cookie "
    "keep-alive origin"
)
_TEXT = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Authoritative "
    "Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 Not Found500 "
    "Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec "
    "00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,"
    "application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset="
    "iso-8859-1,utf-,*,enq=0."
)
DICTIONARY = (
    b"".join(struct.pack(">I", len(word)) + word.replace("+", " ").encode() for word in _WORDS.split()) + _TEXT.encode()
)
"""The dictionary with which SPDY compresses headers (section 2.6.10.1 of the draft)."""


@dataclass
class _Frame:
    """A frame: a control frame with its type, or data of a stream with the type 0."""

    kind: int
    flags: int
    payload: bytes
    stream: int = 0


class SpdyConnection:
    """The server's end of a SPDY connection with an exec."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)
        self._deflate = zlib.compressobj(zdict=DICTIONARY)
        self._streams: dict[str, int] = {}
        self._stdin: asyncio.Queue[bytes] = asyncio.Queue(maxsize=64)

    async def serve(self, channels: Sequence[str], start: Start) -> None:
        """Wait for the client's streams, then run the exec."""
        while not self._streams.keys() >= set(channels):
            frame = await self._read()
            if frame is None:
                return
            await self._handle(frame)
        reading = asyncio.create_task(self._read_all())
        await _run(start, self._given(), self._send)
        for name in ("stdout", "stderr", "error"):
            if name in self._streams:
                self._write_data(self._streams[name], b"", fin=True)
        await self._writer.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(reading), 5)  # the client closes the connection
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def _read_all(self) -> None:
        try:
            while (frame := await self._read()) is not None:
                await self._handle(frame)
        finally:
            await self._stdin.put(b"")

    async def _given(self) -> AsyncIterator[bytes]:
        while piece := await self._stdin.get():
            yield piece

    async def _send(self, channel: str, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self._write_data(self._streams[channel], data)
            await self._writer.drain()

    async def _read(self) -> _Frame | None:
        """Return the next frame; None at the end. Raises `ValueError` for a frame that is too long."""
        try:
            head = await self._reader.readexactly(8)
            first, flagged = struct.unpack(">II", head)
            flags, size = flagged >> 24, flagged & 0xFFFFFF
            if size > _LONGEST_FRAME:
                raise ValueError(f"a SPDY frame of {size} bytes")
            payload = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        if first >> 31:
            return _Frame(first & 0xFFFF, flags, payload)
        return _Frame(0, flags, payload, first)

    async def _handle(self, frame: _Frame) -> None:
        if frame.kind == _SYN_STREAM:
            stream = struct.unpack(">I", frame.payload[:4])[0] & 0x7FFFFFFF
            self._streams[self._headers(frame.payload[10:])["streamtype"]] = stream
            block = self._deflate.compress(struct.pack(">I", 0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
            self._write_control(_SYN_REPLY, struct.pack(">I", stream) + block)
        elif frame.kind == _PING:
            self._write_control(_PING, frame.payload)
        elif frame.kind == 0 and frame.stream == self._streams.get("stdin"):
            if frame.payload:
                await self._stdin.put(frame.payload)
            if frame.flags & _FIN:
                await self._stdin.put(b"")

    def _headers(self, block: bytes) -> dict[str, str]:
        text = self._inflate.decompress(block, _LONGEST_FRAME)
        count, at, words = struct.unpack(">I", text[:4])[0], 4, []
        for _ in range(2 * count):
            size = struct.unpack(">I", text[at : at + 4])[0]
            words.append(text[at + 4 : at + 4 + size].decode())
            at += 4 + size
        return dict(zip(words[::2], words[1::2], strict=True))

    def _write_control(self, kind: int, payload: bytes) -> None:
        self._writer.write(struct.pack(">II", 1 << 31 | 3 << 16 | kind, len(payload)) + payload)

    def _write_data(self, stream: int, data: bytes, *, fin: bool = False) -> None:
        self._writer.write(struct.pack(">II", stream, (_FIN if fin else 0) << 24 | len(data)) + data)
