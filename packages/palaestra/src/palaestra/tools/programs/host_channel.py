"""Serves the tool calls of `execute_code`'s programs: the module that they import, and the host's end of the channel.

`module_text` returns the source of the module `palaestra_tools`, which has one function for each tool that a program
may call. The function has the tool's name and parameters. The module needs Python 3.7 or newer. `ProgramChannel` reads
the program's frames from the output of a background process and writes answers to its input. The docstring of
`program_supervisor.py`, which runs in the slot, describes the frames.

Invariant: all data from the slot is bounded and checked here, because the program can write anything to the channel;
anything that is not a frame ends the program. The tool runtime checks the calls.
"""

from __future__ import annotations

import keyword
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from palaestra.tools.tool import ToolSchema
from palaestra_slots.sandbox.host_tools import Capture
from palaestra_slots.sandbox.slot import Process

MODULE = "palaestra_tools"
MAX_REQUEST_BYTES = 8 << 20
"""The maximum size of a call in bytes; a longer call is read to its end and refused."""

_FRAME_BYTES = 32768
_HEADER_BYTES = 16
_KINDS = b"ocCe"

AnswerCall = Callable[[bytes | None], Awaitable[bytes]]
"""Answers one request; None stands for a request that is too long."""

_HEAD = '''\
"""The tools of this agent as functions. A call returns the tool's reply: a dict, or text.

If a tool refuses or fails, its reply has the reason under "error", as in a direct call. RuntimeError is raised if no
more calls can be made.
"""

import json as _json
import os as _os
import socket as _socket
import struct as _struct
import threading as _threading

_LEFT_OUT = object()
_turn = _threading.Lock()
_channel = _socket.socket(fileno=int(_os.environ.pop("PALAESTRA_TOOLS_FD")))
_channel.set_inheritable(False)
_owner = _os.getpid()


def _exactly(count):
    data = bytearray()
    while len(data) < count:
        more = _channel.recv(min(count - len(data), 1 << 16))
        if not more:
            raise RuntimeError("the tools can no longer be reached")
        data += more
    return bytes(data)


def _call(name, arguments):
    if _os.getpid() != _owner:
        raise RuntimeError("only the program itself can call tools, not the processes that it has started")
    given = {key: value for key, value in arguments.items() if value is not _LEFT_OUT}
    request = _json.dumps({"tool": name, "arguments": given}).encode()
    with _turn:
        _channel.sendall(_struct.pack("!I", len(request)) + request)
        reply = _json.loads(_exactly(_struct.unpack("!I", _exactly(4))[0]).decode())
    if "refused" in reply:
        raise RuntimeError(reply["refused"])
    return reply["reply"]
'''


def module_text(schemas: Iterable[ToolSchema]) -> str:
    """Return the source of the module. `call_tool(name, arguments)` calls tools whose names are not valid for a
    function."""
    functions = [_function(schema) for schema in schemas if _usable(schema.name)]
    any_tool = 'def call_tool(name, arguments=None):\n    """Call a tool by its name."""\n'
    return "\n\n".join([_HEAD, f"{any_tool}    return _call(name, dict(arguments or {{}}))\n", *functions])


def _function(schema: ToolSchema) -> str:
    """Return the source of one function. Its required parameters come first, then the optional ones. If the tool has
    parameters whose names are not valid in Python, `**others` accepts them."""
    names = [name for name in schema.parameters if _usable(name)]
    required = [name for name in names if name in schema.required]
    optional = [f"{name}=_LEFT_OUT" for name in names if name not in schema.required]
    others = ["**others"] if len(names) < len(schema.parameters) else []
    given = ", ".join(f"{name!r}: {name}" for name in names)
    more = ", **others" if others else ""
    return (
        f"def {schema.name}({', '.join([*required, *optional, *others])}):\n"
        f"    {_documentation(schema)!r}\n"
        f"    return _call({schema.name!r}, dict({{{given}}}{more}))\n"
    )


def _documentation(schema: ToolSchema) -> str:
    told = (f"{name}: {each.get('description', '')}" for name, each in schema.parameters.items())
    return "\n".join([schema.description, "", *told])


def _usable(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")


class BrokenChannel(Exception):
    """Raised if data arrives that is not a frame; the message describes the data."""


class ProgramChannel:
    """The channel of one program. `output` holds the program's output so far."""

    def __init__(self, process: Process, max_output_bytes: int) -> None:
        self._process = process
        self._request = bytearray()
        self._too_long = False
        self.output = Capture(max_output_bytes)

    async def serve(self, answer: AnswerCall) -> int | None:
        """Serve until the program has ended. Returns its exit status, or None if its supervisor did not report one.

        Raises `BrokenChannel`, and the errors of `answer` and of the slot.
        """
        async for kind, payload in self._frames():
            reply = b""
            if kind == b"o":
                self.output.add(payload)
            elif kind == b"e":
                return _parse_number(payload)
            else:
                self._take_payload(payload)
                if kind == b"C":
                    reply = await answer(None if self._too_long else bytes(self._request))
                    self._request, self._too_long = bytearray(), False
            try:
                await self._process.write(b"%d\n" % len(reply) + reply)
            except BrokenPipeError:  # the supervisor was killed; its remaining output is still read
                continue
        return None

    def _take_payload(self, payload: bytes) -> None:
        self._request += payload
        if len(self._request) > MAX_REQUEST_BYTES:
            self._request, self._too_long = bytearray(), True

    async def _frames(self) -> AsyncIterator[tuple[bytes, bytes]]:
        buffer, cursor = bytearray(), 0
        async for piece in self._process.output():
            # The supervisor sends a frame only after the answer to the last one, so
            # a gap means that something else has written.
            if piece.lost or piece.start != cursor:
                raise BrokenChannel(f"{piece.lost} bytes that were not requested")
            cursor = piece.end
            buffer += piece.data
            while (frame := _take_frame(buffer)) is not None:
                yield frame


def _take_frame(buffer: bytearray) -> tuple[bytes, bytes] | None:
    """Remove the first frame from the buffer and return it. Returns None while the frame is incomplete."""
    line, newline, _ = buffer[:_HEADER_BYTES].partition(b"\n")
    if not newline:
        if len(buffer) >= _HEADER_BYTES:
            raise BrokenChannel(f"{bytes(buffer[:_HEADER_BYTES])!r} where a frame begins")
        return None
    kind, length = bytes(line[:1]), _parse_number(bytes(line[1:]))
    if kind not in _KINDS or not kind or length > _FRAME_BYTES:
        raise BrokenChannel(f"{bytes(line)!r} where a frame begins")
    start = len(line) + 1
    if len(buffer) < start + length:
        return None
    payload = bytes(buffer[start : start + length])
    del buffer[: start + length]
    return kind, payload


def _parse_number(digits: bytes) -> int:
    if not digits.isdigit():
        raise BrokenChannel(f"{digits!r} where a number belongs")
    return int(digits)
