"""Our end of a program's channel: frames in, answers out, over the input and output of a background process.

Not for deciding what a call may do. What the frames are is told in `supervisor.py`.

Invariant: whatever comes from the slot, which the program can write to as it likes, is bounded here and never trusted:
what is no frame ends the program.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from palaestra.sandbox.host_tools import Capture
from palaestra.sandbox.slot import Process

MAX_REQUEST_BYTES = 8 << 20
"""How long one call may be; a longer one is read to its end and refused."""

_FRAME_BYTES = 32768
_HEADER_BYTES = 16
_KINDS = b"ocCe"

Answer = Callable[[bytes | None], Awaitable[bytes]]
"""Answers one request; None stands for one that is too long."""


class BrokenChannel(Exception):
    """What came is no frame. The message says what it was."""


class Channel:
    """The channel of one program. `output` is what the program has printed so far."""

    def __init__(self, process: Process, max_output_bytes: int) -> None:
        self._process = process
        self._request = bytearray()
        self._too_long = False
        self.output = Capture(max_output_bytes)

    async def serve(self, answer: Answer) -> int | None:
        """Carry until the program has ended: its exit status, None where its supervisor ended without telling.

        Raises `BrokenChannel`, and what `answer` and the slot raise.
        """
        async for kind, payload in self._frames():
            reply = b""
            if kind == b"o":
                self.output.add(payload)
            elif kind == b"e":
                return _number(payload)
            else:
                self._take(payload)
                if kind == b"C":
                    reply = await answer(None if self._too_long else bytes(self._request))
                    self._request, self._too_long = bytearray(), False
            try:
                await self._process.write(b"%d\n" % len(reply) + reply)
            except BrokenPipeError:  # it was killed from inside; what it left in the output is still to be read
                continue
        return None

    def _take(self, payload: bytes) -> None:
        self._request += payload
        if len(self._request) > MAX_REQUEST_BYTES:
            self._request, self._too_long = bytearray(), True

    async def _frames(self) -> AsyncIterator[tuple[bytes, bytes]]:
        buffer, cursor = bytearray(), 0
        async for piece in self._process.output():
            if piece.lost or piece.start != cursor:
                raise BrokenChannel(f"{piece.lost} bytes that nobody had asked for")
            cursor = piece.end
            buffer += piece.data
            while (frame := _first(buffer)) is not None:
                yield frame


def _first(buffer: bytearray) -> tuple[bytes, bytes] | None:
    """Take the first frame out of the buffer; None while it is not there whole."""
    line, newline, _ = buffer[:_HEADER_BYTES].partition(b"\n")
    if not newline:
        if len(buffer) >= _HEADER_BYTES:
            raise BrokenChannel(f"{bytes(buffer[:_HEADER_BYTES])!r} where a frame begins")
        return None
    kind, length = bytes(line[:1]), _number(bytes(line[1:]))
    if kind not in _KINDS or not kind or length > _FRAME_BYTES:
        raise BrokenChannel(f"{bytes(line)!r} where a frame begins")
    start = len(line) + 1
    if len(buffer) < start + length:
        return None
    payload = bytes(buffer[start : start + length])
    del buffer[: start + length]
    return kind, payload


def _number(digits: bytes) -> int:
    if not digits.isdigit():
        raise BrokenChannel(f"{digits!r} where a number belongs")
    return int(digits)
