"""The Connect protocol as the SDKs speak it: JSON messages, unary calls, and streams of enveloped messages.

Source: connectrpc.com/docs/protocol. Compression and the binary codec are not offered; the SDKs use neither.
Invariant: a message from a client is at most `MOST_MESSAGE_BYTES` long.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import AsyncIterator

from aiohttp import web

from palaestra_e2b.wire_errors import RpcError
from palaestra_slots.core.types import JSON

MOST_MESSAGE_BYTES = 4 << 20
MESSAGE_S = 60.0
LONGEST_TIMEOUT_S = 24 * 3600.0
_HEAD = struct.Struct("!BI")
_COMPRESSED, _END = 1, 2
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def dumps(message: JSON) -> str:
    """Return a message as JSON. Bytes of file names and outputs that are not UTF-8 become U+FFFD, as envd writes them;
    JSON has no other form for them that all clients can read."""
    return _LONE_SURROGATE.sub("\ufffd", json.dumps(message, separators=(",", ":"), ensure_ascii=False))


def envelope(message: JSON, *, end: bool = False) -> bytes:
    """Return one message of a stream; `end` marks the last, which carries the error if there is one."""
    data = dumps(message).encode()
    return _HEAD.pack(_END if end else 0, len(data)) + data


def timeout_of(request: web.Request) -> float | None:
    """Return the client's time limit for the call, in seconds. Raises `RpcError`."""
    text = request.headers.get("Connect-Timeout-Ms", "")
    if not text:
        return None
    if not text.isdigit() or len(text) > 10:
        raise RpcError("invalid_argument", f"Connect-Timeout-Ms is not a number of milliseconds: {text!r:.50}")
    return min(int(text) / 1000, LONGEST_TIMEOUT_S)


def check_codec(request: web.Request, *, stream: bool) -> None:
    """Raise `web.HTTPUnsupportedMediaType` for a codec other than JSON."""
    wanted = "application/connect+json" if stream else "application/json"
    if request.content_type != wanted:
        raise web.HTTPUnsupportedMediaType(headers={"Accept-Post": wanted}, text=f"this call needs {wanted}")


async def read_unary(request: web.Request) -> dict[str, JSON]:
    """Return the message of a unary call. Raises `RpcError`."""
    data = bytearray()
    async with _in_time():
        async for piece in request.content.iter_chunked(1 << 16):
            data += piece
            if len(data) > MOST_MESSAGE_BYTES:
                raise RpcError("resource_exhausted", f"a message may have at most {MOST_MESSAGE_BYTES} bytes")
    return _parse_message(bytes(data or b"{}"))


async def read_stream(request: web.Request) -> AsyncIterator[dict[str, JSON]]:
    """Yield the messages that a client streams. Raises `RpcError`."""
    while True:
        try:
            async with _in_time():
                flags, length = _HEAD.unpack(await request.content.readexactly(_HEAD.size))
                if length > MOST_MESSAGE_BYTES:
                    raise RpcError("resource_exhausted", f"a message may have at most {MOST_MESSAGE_BYTES} bytes")
                data = await request.content.readexactly(length)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise RpcError("invalid_argument", "the stream ended within a message") from None
            return
        if flags & _COMPRESSED:
            raise RpcError("unimplemented", "compressed messages are not supported")
        if flags & _END:
            return
        yield _parse_message(data)


def _in_time() -> asyncio.Timeout:
    return asyncio.timeout(MESSAGE_S)


def _parse_message(data: bytes) -> dict[str, JSON]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise RpcError("invalid_argument", "the message is not JSON") from None
    if not isinstance(message, dict):
        raise RpcError("invalid_argument", "the message is not a JSON object")
    return message


def text_field(message: dict[str, JSON], name: str, *, required: bool = False) -> str:
    """Return a string of a message, empty if it is missing. Raises `RpcError`."""
    value = message.get(name)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value):
        raise RpcError("invalid_argument", f"{name} must be a string")
    return value


def object_field(message: dict[str, JSON], name: str) -> dict[str, JSON]:
    """Return an object of a message, empty if it is missing. Raises `RpcError`."""
    value = message.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RpcError("invalid_argument", f"{name} must be an object")
    return value


def flag_field(message: dict[str, JSON], name: str, default: bool = False) -> bool:
    """Return a truth value of a message. Raises `RpcError`."""
    value = message.get(name, default)
    if not isinstance(value, bool):
        raise RpcError("invalid_argument", f"{name} must be true or false")
    return value


def number_field(message: dict[str, JSON], name: str) -> int:
    """Return a whole number of a message, which JSON may also write as a string; 0 if it is missing. Raises
    `RpcError`."""
    value = message.get(name, 0)
    if isinstance(value, str) and value.isdigit() and len(value) < 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 32:
        raise RpcError("invalid_argument", f"{name} must be a whole number")
    return value
