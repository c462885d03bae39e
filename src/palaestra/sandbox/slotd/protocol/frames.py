"""The protocol between client and server: frames on one duplex byte stream. Shared by both sides; does no I/O.

A frame is `u32 body length, u8 kind, u32 request, u32 length of the JSON`, then the JSON object, then raw bytes; all
integers big-endian. Output travels as bytes, never as text.

    client                            server
    HELLO   version, settings    ->   HELLO   version, rung, or ERROR
    REQUEST op, …                ->   RESULT or ERROR, once
    DATA, END (a file's bytes)   ->
                                 <-   DATA (output or a file's bytes, or `hole`: so many zeros) before the RESULT
    CREDIT  bytes                ->   the server may send that many more bytes of DATA for this request
    CANCEL                       ->   the command is killed; its RESULT still comes
                                 <-   LOST    slot, reason: a slot died without being asked to

The RESULT of a command begins with a struct (`outcomes.py`). A list that a slot can make as long as it likes (the
entries of a directory, changes) is a JSON array that comes as the bytes of a file do.

What can be asked is listed where it is served: slots, files and layers in `server.py`, commands and shells in
`command_requests.py`, the rest in `background_requests.py`, `keep_requests.py` and `looking.py`.
Every request that names a slot carries the epoch of the lease; one of another epoch is answered with a `stale` ERROR.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from json.scanner import make_scanner
from typing import Any, NamedTuple

VERSION = 6
"""Both sides must agree; the server is started from the same package, so a mismatch is a broken installation."""

WINDOW = 256 << 10
"""How many bytes of DATA a request may have under way before the receiver has taken them."""

CHUNK = 128 << 10
"""The size of one DATA frame, so that no stream keeps the others waiting for long."""

RECEIVE_BYTES = 256 << 10
"""The size of the buffer that each side receives into, made once: a fresh one per read costs more than the read."""

MAX_FRAME = 64 << 20

USUAL_TIMEOUT_S, USUAL_OUTPUT_BYTES = 60.0, 50_000
"""The bounds of a command whose request does not name others."""

_HEADER = struct.Struct("!IBII")

Fields = dict[str, Any]
"""The JSON object of a frame."""


def _path(value: object) -> str:
    """Paths may be objects. Raises TypeError for what nothing can be made of."""
    if isinstance(value, os.PathLike):
        return str(value)
    raise TypeError(f"{value!r:.100} cannot be sent to a slot: text, numbers and paths can, not {type(value).__name__}")


def _encoder() -> Callable[[Fields, bool], Iterable[str]]:
    """Gives the pieces of an object's JSON; the flag is False.

    What the standard library makes for each call costs as much as encoding does.
    """
    encoder = json.JSONEncoder(separators=(",", ":"), default=_path)
    found: Callable[[Fields, bool], Iterable[str]] = encoder.iterencode
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is not None:
        text = json.encoder.encode_basestring_ascii
        found = make(None, encoder.default, text, None, ":", ",", False, False, True)
    return found


_to_json, _from_json = _encoder(), make_scanner(json.JSONDecoder())  # type: ignore[arg-type]


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


_SAME = (int, float, bool)
"""Values that JSON leaves as they are, beside text."""

_KINDS = {int(kind): kind for kind in Kind}


class ProtocolError(Exception):
    """The other side does not speak this protocol."""


class Frame(NamedTuple):
    """One frame as it was received."""

    kind: Kind
    request: int
    fields: Fields
    data: bytes


new = tuple.__new__
"""Makes a named tuple without the call in between that its class has: for what every command has."""


def encode(kind: Kind, request: int, fields: Fields | None = None, data: bytes = b"") -> bytes:
    """One frame as bytes. Raises ValueError for one that the other side would not take, TypeError for what is none."""
    text = "".join(_to_json(fields, False)).encode() if fields else b""
    if len(text) + len(data) > MAX_FRAME:
        raise ValueError(f"{len(text) + len(data)} bytes are more than the {MAX_FRAME} of one message to a slot")
    try:
        return b"".join((_HEADER.pack(len(text) + len(data), kind, request, len(text)), text, data))
    except TypeError:
        raise TypeError(f"what goes to a slot must be bytes, not {type(data).__name__}; encode text first") from None


def received(kind: Kind, request: int, fields: Fields, data: bytes) -> Frame:
    """A frame as the other side would receive it, for one that stays on this side. Raises as `encode` does."""
    size = len(data)
    for value in fields.values():
        if type(value) is str:
            size += len(value)
        elif type(value) not in _SAME:
            size = MAX_FRAME
    if size < CHUNK and type(data) is bytes:
        return new(Frame, (kind, request, fields, data))
    return Decoder().feed(encode(kind, request, fields, data))[0]


class Decoder:
    """Turns a byte stream into frames, however it was cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = 0
        """How much the buffer must hold before there is anything to take from it."""

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """The frames that `data` completes. Raises `ProtocolError` for a stream that cannot be ours."""
        found: list[Frame] = []
        if self._buffer:
            self._buffer += data
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
