"""Forwards a port of a slot's loopback to one address that this machine can reach, for slots that have no network.

A relay in the slot (`port_relay.py`) listens and sends incoming data over its pipes, so forwarding works with every
backend, and the slot reaches this one address and nothing else.

Invariant: everything that comes from the slot is bounded and checked, because the agent can write to the relay's pipes.
At worst the agent ends the forwarding, or opens `most` connections to the address that it may reach anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import logging
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import SandboxError
from palaestra_slots.sandbox.slot import Process, Slot

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
_HEAD = struct.Struct("!cII")
_WINDOW_BYTES = 128 << 10
_START_S, _WRITE_S = 30.0, 60.0


@asynccontextmanager
async def forwarded_port(slot: Slot, host: str, port: int, *, most: int = MOST_CONNECTIONS) -> AsyncIterator[int]:
    """Yield the port on the slot's loopback that reaches `host:port` during the block. At most `most` connections are
    open at a time. Raises `SandboxError` if no port can be opened, for example because the slot has no Python."""
    text = importlib.resources.files("palaestra_slots.sandbox").joinpath("port_relay.py").read_text()
    try:
        process = await slot.spawn(["python3", "-I", "-S", "-c", text], cwd="/")
    except FileNotFoundError:
        raise SandboxError("forwarding a port into a slot needs python3 there: add it to the image") from None
    forward = _Forward(process, host, port, most)
    serving = asyncio.create_task(forward.serve(), name="port forward")
    try:
        started = asyncio.create_task(forward.listening.wait())
        done, _ = await asyncio.wait({started, serving}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if not forward.listening.is_set():
            if serving in done:
                serving.result()
            said = (await process.read(-2000)).data.decode(errors="replace")
            raise SandboxError(f"no port can be opened in the slot: {said.strip() or 'its relay ended'}")
        yield forward.slot_port
    finally:
        await end_tasks(serving)
        with contextlib.suppress(ProcessLookupError, SandboxError):
            await process.forget()  # first, because a write to a relay that does not read ends only with the relay
        await forward.aclose()


class _Forward:
    """The host's end of one relay."""

    def __init__(self, process: Process, host: str, port: int, most: int) -> None:
        self.listening, self.slot_port = asyncio.Event(), 0
        self._process, self._host, self._port, self._most = process, host, port, most
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sending = asyncio.Lock()

    async def serve(self) -> None:
        """Serve until the relay has ended, a part of its output is missing, or it sends something that is not a frame.
        Raises the slot's errors."""
        buffer, cursor = bytearray(), 0
        async for piece in self._process.output():
            # After a gap, a payload would be read as the head of a frame.
            if piece.lost or piece.start != cursor:
                break
            cursor = piece.end
            buffer += piece.data
            while len(buffer) >= _HEAD.size:
                kind, number, length = _HEAD.unpack_from(buffer)
                # The agent can write to the relay's output, and could claim a payload that never ends.
                if kind not in b"pocd" or length > _WINDOW_BYTES:
                    logger.warning("the relay in a slot sent data that is not a frame; its port is no longer forwarded")
                    return
                if len(buffer) < _HEAD.size + length:
                    break
                payload = bytes(buffer[_HEAD.size : _HEAD.size + length])
                del buffer[: _HEAD.size + length]
                await self._take_message(kind, number, payload)

    async def aclose(self) -> None:
        """Close all connections."""
        tasks = list(self._tasks.values())
        await end_tasks(*tasks)

    async def _take_message(self, kind: bytes, number: int, payload: bytes) -> None:
        if kind == b"p":
            self.slot_port = number
            self.listening.set()
        elif kind == b"o":
            await self._open_connection(number)
        elif kind == b"c":
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
        else:
            await self._pass_on(number, payload)
            # Only now, because this is what opens the relay's window again.
            await self._send_to_relay(_HEAD.pack(b"a", 0, len(payload)))

    async def _open_connection(self, number: int) -> None:
        # An agent that writes to the relay's output can name a connection twice.
        if len(self._tasks) >= self._most or number in self._tasks:
            await self._send_to_relay(_HEAD.pack(b"c", number, 0))
            return
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            await self._send_to_relay(_HEAD.pack(b"c", number, 0))
            return
        self._writers[number] = writer
        self._tasks[number] = asyncio.create_task(self._copy(number, reader, writer))

    async def _pass_on(self, number: int, payload: bytes) -> None:
        writer = self._writers.get(number)
        if writer is None:
            return
        writer.write(payload)
        try:
            async with asyncio.timeout(_WRITE_S):
                await writer.drain()
        except (OSError, TimeoutError):
            if (task := self._tasks.get(number)) is not None:  # the task ends by itself if the host disconnects
                task.cancel()

    async def _copy(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._send_to_relay(_HEAD.pack(b"d", number, len(data)) + data)
        except OSError:
            pass
        finally:
            del self._writers[number], self._tasks[number]
            writer.close()
            with contextlib.suppress(OSError, SandboxError, ProcessLookupError):
                await asyncio.shield(self._send_to_relay(_HEAD.pack(b"c", number, 0)))

    async def _send_to_relay(self, data: bytes) -> None:
        """Write to the relay; does nothing if the relay has ended."""
        async with self._sending:
            with contextlib.suppress(BrokenPipeError, ProcessLookupError):
                await self._process.write(data)
