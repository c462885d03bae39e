"""The protocol between client and server: frames on one duplex byte stream. Shared by both sides; does no I/O.

A frame is `u32 body length, u8 kind, u32 request, u32 length of the JSON`, then the JSON object, then raw bytes; all
integers big-endian. Output travels as bytes, never as text.

    client                            server
    HELLO   version, settings    ->   HELLO   version, rung, or ERROR
    REQUEST op, …                ->   RESULT or ERROR, once
    DATA, END (a file's bytes)   ->
                                 <-   DATA (output or a file's bytes) before the RESULT
    CREDIT  bytes                ->   the server may send that many more bytes of DATA for this request
    CANCEL                       ->   the command is killed; its RESULT still comes
                                 <-   LOST    slot, reason: a slot died without being asked to

What can be asked is listed where it is served: one command, files and layers in `server.py`, the rest in `modes.py`.
Every request that names a slot carries the epoch of the lease; one of another epoch is answered with a `stale` ERROR.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

VERSION = 2
"""Both sides must agree; the server is started from the same package, so a mismatch is a broken installation."""

WINDOW = 256 << 10
"""How many bytes of DATA a request may have under way before the receiver has taken them."""

CHUNK = 128 << 10
"""The size of one DATA frame, so that no stream keeps the others waiting for long."""

RECEIVE_BYTES = 256 << 10
"""The size of the buffer that each side receives into, made once: a fresh one per read costs more than the read."""

MAX_FRAME = 64 << 20

_HEADER = struct.Struct("!IBII")

Fields = dict[str, Any]
"""The JSON object of a frame."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    REQUEST = 2
    DATA = 3
    END = 4
    CREDIT = 5
    CANCEL = 6
    RESULT = 7
    ERROR = 8
    LOST = 9


class ProtocolError(Exception):
    """The other side does not speak this protocol."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it was received."""

    kind: Kind
    request: int
    fields: Fields = field(default_factory=dict)
    data: bytes = b""


def encode(kind: Kind, request: int, fields: Fields | None = None, data: bytes = b"") -> bytes:
    """One frame as bytes."""
    text = json.dumps(fields, separators=(",", ":")).encode() if fields else b""
    return b"".join((_HEADER.pack(len(text) + len(data), kind, request, len(text)), text, data))


class Decoder:
    """Turns a byte stream into frames, however it was cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """The frames that `data` completes. Raises `ProtocolError` for a stream that cannot be ours."""
        self._buffer += data
        position = 0
        while len(self._buffer) - position >= _HEADER.size:
            length, kind, request, text_length = _HEADER.unpack_from(self._buffer, position)
            if length > MAX_FRAME or text_length > length:
                raise ProtocolError(f"a frame of {length} bytes")
            end = position + _HEADER.size + length
            if len(self._buffer) < end:
                break
            text_end = position + _HEADER.size + text_length
            fields = json.loads(self._buffer[position + _HEADER.size : text_end]) if text_length else {}
            yield Frame(Kind(kind), request, fields, bytes(self._buffer[text_end:end]))
            position = end
        del self._buffer[:position]
