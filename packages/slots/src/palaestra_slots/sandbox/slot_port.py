"""Reaches a TCP port in a slot's network from this process, through the slot's pipes. Every backend can do that, and no
network between the slot and this machine is needed.

Each connection is a process in the slot, which connects to the port and copies data. It has the rights and the network
of the slot's commands, so nothing is reached that they cannot reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import SandboxError
from palaestra_slots.core.io.temporary_folder import TemporaryFolder
from palaestra_slots.sandbox.slot import Process, Slot

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 16
MOST_BYTES = 64 << 20
"""The maximum number of bytes that a connection receives, because what answers in the slot may be the agent."""

_PIECE = 1 << 16
_COPY = """\
import os, socket, sys, threading
far = socket.create_connection((sys.argv[1], int(sys.argv[2])), 30)
far.settimeout(None)
def send():
    while data := os.read(0, 65536):
        far.sendall(data)
    far.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := far.recv(65536):
    while data:
        data = data[os.write(1, data):]
"""


@asynccontextmanager
async def slot_port(slot: Slot, host: str, port: int, *, most: int = MOST_CONNECTIONS) -> AsyncIterator[Path]:
    """Yield the path of a Unix socket of this user; at most `most` connections to it reach `host:port` in the slot's
    network at a time. A connection that the slot cannot open is closed at once, and one that receives more than
    `MOST_BYTES` then."""
    connections = _Connections(lambda: slot, (host, port), most)
    with TemporaryFolder("slot-port") as folder:
        path = folder.path / "socket"
        server = await asyncio.start_unix_server(connections.accept, path)
        try:
            yield path
        finally:
            server.close()
            await end_tasks(*connections.tasks)


@asynccontextmanager
async def local_port(
    slot: Callable[[], Slot | None], host: str, port: int, here: int, *, most: int = MOST_CONNECTIONS
) -> AsyncIterator[None]:
    """Listen on the port `here` of this machine's loopback during the block. Connections reach `host:port` in the
    network of the slot that there is then, as with `slot_port`. Raises OSError if the port is not free."""
    connections = _Connections(slot, (host, port), most)
    server = await asyncio.start_server(connections.accept, "127.0.0.1", here)
    try:
        yield
    finally:
        server.close()
        await end_tasks(*connections.tasks)


class _Connections:
    """The connections to a port of a slot, at most `most` at a time."""

    def __init__(self, slot: Callable[[], Slot | None], address: tuple[str, int], most: int) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._slot, self._address, self._most = slot, address, most

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection in a task, or close it."""
        slot = self._slot()
        if slot is None or len(self.tasks) >= self._most:
            writer.close()
            return
        name = f"port {self._address[1]} of a slot"
        task = asyncio.create_task(_copied(slot, self._address, reader, writer), name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


async def _copied(
    slot: Slot, address: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Copy between a connection and the port until one side ends."""
    process: Process | None = None
    sending: asyncio.Task[None] | None = None
    try:
        argv = ["python3", "-I", "-S", "-c", _COPY, address[0], str(address[1])]
        # Errors of the program are kept out of the data. With `hold`, the slot drops nothing if this process reads
        # slowly.
        process = await slot.spawn(argv, cwd="/", stderr=True, hold=True)
        sending = asyncio.create_task(_send_input(reader, process))
        left = MOST_BYTES
        async for piece in process.output():
            if len(piece.data) > left:
                logger.warning("a connection to a port of a slot is closed after %d bytes", MOST_BYTES)
                break
            left -= len(piece.data)
            writer.write(piece.data)
            await writer.drain()
    except FileNotFoundError:
        logger.warning("reaching a port of a slot needs python3 there: add it to the image")
    except (OSError, SandboxError) as error:
        logger.debug("a connection to port %s of a slot ended: %s", address[1], error)
    finally:
        writer.close()
        if sending is not None:
            await end_tasks(sending)
        if process is not None:
            with contextlib.suppress(ProcessLookupError, SandboxError):
                # Even if this task is cancelled: otherwise, the slot would keep the process.
                await asyncio.shield(process.forget())


async def _send_input(reader: asyncio.StreamReader, process: Process) -> None:
    with contextlib.suppress(OSError, SandboxError):
        while data := await reader.read(_PIECE):
            await process.write(data)
        await process.close_input()
