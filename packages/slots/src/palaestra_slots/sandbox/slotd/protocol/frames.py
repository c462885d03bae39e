"""The protocol between client and server: frames on one duplex byte stream. Both sides use this module.

A frame is `u32 body length, u8 kind, u32 request, u32 length of the JSON`, then the JSON object, then raw bytes; all
integers are big-endian. Output travels as bytes, never as text.

    client                            server
    HELLO   version, settings    ->   HELLO   version, pid, uid (of a service: rung, leases), or ERROR
    REQUEST op, …                ->   RESULT or ERROR, once
    DATA, END (a file's bytes)   ->
                                 <-   DATA (output, a file's bytes, or a number of zeros: `hole`) before the RESULT
    CREDIT  bytes                ->   the server may send that many more bytes of DATA for this request
    CANCEL                       ->   the request ends early (a command is killed); its RESULT still comes
                                 <-   LOST    slot, epoch: a slot died without having been ended

The bytes of a command's RESULT begin with a struct (`encode_result`). A list whose length a slot controls (directory
entries, changes) is a JSON array that is sent like the bytes of a file.

The modules that serve requests list them: `server.py`, `exec/supervisor.py`, `exec/stateful_shell.py` and
`exec/background.py`. Each request about a slot contains the epoch of the lease. If the slot now has another epoch, the
answer is a `stale` ERROR.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from json.scanner import make_scanner
from typing import Any, NamedTuple, Protocol

from ..event_loop import READ, WRITE, Watcher

VERSION = 8  # both sides must agree; they can differ if another version of this package started a service
WINDOW = 256 << 10  # the maximum number of bytes of DATA under way for a request that the receiver has not read
CHUNK = 128 << 10  # the size of one DATA frame: small enough that no stream keeps the others waiting
RECEIVE_BYTES = 256 << 10  # size of the receive buffer, allocated once: a new one per read costs more than the read
MAX_FRAME = 64 << 20

USUAL_TIMEOUT_S, USUAL_OUTPUT_BYTES = 60.0, 50_000  # the limits of a command whose request sets none
_HEADER = struct.Struct("!IBII")

Fields = dict[str, Any]  # the JSON object of a frame
_RESULT = struct.Struct("!iBIIQddQ")

RESULT_SIZE = _RESULT.size

# Flags of a command's RESULT.
TIMEOUT, CANCELLED, SWEPT, OOM = 1, 2, 4, 8  # two reasons for a kill; all of the slot was killed; memory had run out
BASH, SH = 16, 32  # the shell that ran the command, if any
STATEFUL, RESTARTED = 64, 128  # the shell is stateful; the shell was started again since the last command

# The struct before the bytes of a command's RESULT (JSON would cost more than all other work on a result): exit code,
# flags, bytes kept of the output's head and tail, total bytes of the output, wall seconds, processor seconds, peak
# resident bytes of one process. The head, the tail and the verdict follow. If the request has `stderr`, head and tail
# of standard error come before the verdict, and the RESULT's field `stderr` has their sizes and the total.
encode_result, decode_result = _RESULT.pack, _RESULT.unpack_from

HANDOVER = struct.Struct("!QQ")  # sent with a slot's descriptors to the client: the lease's epoch, the files' owner


class FrameKind(IntEnum):
    """The kinds of frames."""

    HELLO = 1
    REQUEST = 2
    DATA = 3
    END = 4
    CREDIT = 5
    CANCEL = 6
    RESULT = 7
    ERROR = 8
    LOST = 9


_KINDS = {int(kind): kind for kind in FrameKind}

_PLAIN = (int, float, bool)  # types other than text that JSON leaves unchanged


class ProtocolError(Exception):
    """The other side does not follow this protocol."""


class Frame(NamedTuple):
    """One frame as it was received."""

    kind: FrameKind
    request: int
    fields: Fields
    data: bytes


class SendFrame(Protocol):
    """Sends a frame to the client, or passes it on if the client is this process."""

    def __call__(self, kind: FrameKind, request: int, fields: Fields | None = None, data: bytes = b"") -> None: ...


class OpenRequest(Protocol):
    """A request that has not been answered yet; it handles the CREDIT, CANCEL, DATA and END frames with its number."""

    def on_frame(self, frame: Frame) -> None: ...


new = tuple.__new__  # makes a named tuple without the intermediate call of its class, because each command makes some


def _encode_path(value: object) -> str:
    if isinstance(value, os.PathLike):
        return str(value)
    raise TypeError(
        f"{value!r:.100} cannot be sent to a slot: use a string, a number or a path, not {type(value).__name__}"
    )


def _encoder() -> Callable[[Fields, bool], Iterable[str]]:
    """Return a function that returns the pieces of an object's JSON. It is made once, because the standard library
    would make one for each call."""
    encoder = json.JSONEncoder(separators=(",", ":"), default=_encode_path)
    found: Callable[[Fields, bool], Iterable[str]] = encoder.iterencode
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is not None:
        text = json.encoder.encode_basestring_ascii
        found = make(None, encoder.default, text, None, ":", ",", False, False, True)
    return found


_to_json, _from_json = _encoder(), make_scanner(json.JSONDecoder())  # type: ignore[arg-type]


def encode(kind: FrameKind, request: int, fields: Fields | None = None, data: bytes = b"") -> bytes:
    """Return one frame as bytes. Raises ValueError if the frame is too long, and TypeError if `fields` or `data` has a
    wrong type."""
    text = "".join(_to_json(fields, False)).encode() if fields else b""
    if len(text) + len(data) > MAX_FRAME:
        raise ValueError(f"{len(text) + len(data)} bytes are more than the {MAX_FRAME} of one message to a slot")
    try:
        return b"".join((_HEADER.pack(len(text) + len(data), kind, request, len(text)), text, data))
    except TypeError:
        raise TypeError(f"data for a slot must be bytes, not {type(data).__name__}; encode text first") from None


def received(kind: FrameKind, request: int, fields: Fields, data: bytes) -> Frame:
    """Return a frame that stays in this process, as the other side would receive it. Raises the errors of `encode`."""
    size = len(data)
    # Plain values are the same after encoding and decoding, so that work is left out for them.
    for value in fields.values():
        if type(value) is str:
            size += len(value)
        elif type(value) not in _PLAIN:
            size = MAX_FRAME
    if size < CHUNK and type(data) is bytes:
        return new(Frame, (kind, request, fields, data))
    return FrameDecoder().feed(encode(kind, request, fields, data))[0]


class FrameDecoder:
    """Turns a byte stream, which may arrive in pieces of any size, into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = 0  # the number of bytes that the buffer must hold before a frame can be complete

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Return the frames that `data` completes. Raises `ProtocolError` for a stream of another protocol."""
        found: list[Frame] = []
        if self._buffer:
            self._buffer += data
            # Otherwise, each piece of a large frame would copy everything that has arrived before it.
            if len(self._buffer) < self._needed:
                return found
        view = memoryview(self._buffer if self._buffer else data)
        position = 0
        self._needed = _HEADER.size
        while len(view) - position >= _HEADER.size:
            length, kind, request, text_length = _HEADER.unpack_from(view, position)
            if length > MAX_FRAME or text_length > length or kind not in _KINDS:
                raise ProtocolError(f"a frame of kind {kind} with {length} bytes")
            start = position + _HEADER.size
            if len(view) < start + length:
                self._needed = _HEADER.size + length
                break
            position, text_end = start + length, start + text_length
            fields = _from_json(str(view[start:text_end], "utf-8"), 0)[0] if text_length else {}
            found.append(new(Frame, (_KINDS[kind], request, fields, bytes(view[text_end:position]))))
        if position < len(view) or self._buffer:
            self._buffer = bytearray(view[position:])
        return found


class FrameConnection:
    """One end of the stream: frames in, frames out, without blocking.

    Calls `on_frame` for each frame, and `on_end` once when the other side has closed the stream. The window of each
    request bounds the data that the server sends for the request, so the number of open requests bounds the outgoing
    buffer.
    """

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
        """Send one frame: immediately as much as the socket accepts, the rest later. Raises the errors of `encode`."""
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
            # Only now: a stream with room is always ready to write, and would keep the loop busy.
            self._loop.watch_for(self._stream.fileno(), READ | WRITE, self._ready)
        self._outgoing.append(memoryview(frame)[sent:])

    @property
    def waiting(self) -> bool:
        """Whether data is waiting to be sent."""
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
