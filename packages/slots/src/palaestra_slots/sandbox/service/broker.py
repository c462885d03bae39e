"""Runs the process of a service, which holds slots for one client at a time.

The process is the slot server's client, and passes frames between that server and the client that is attached to the
service's unix socket. When a client leaves, its running commands are cancelled and its snapshots dropped; its slots
stay. The next client gets the leases of these slots with new epochs, so that late calls of the former client are
refused. If this process is killed, the slot server and all its slots end too.

`service_client.py` starts the process and makes the socket (mode 0600, in a directory that only the user can enter).
The process ends on request, when the slot server has died, or after a minute with neither a client nor slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import struct
import sys
from dataclasses import dataclass, field

from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.local.client import SlotClient
from palaestra_slots.sandbox.slotd.protocol import frames
from palaestra_slots.sandbox.slotd.protocol.frames import RECEIVE_BYTES, Frame, FrameDecoder, FrameKind

IDLE_S = 60.0


@dataclass
class Visitor:
    """One connection. `client` is true if its other side is attached. `numbers` maps the numbers of its requests to the
    numbers under which they were sent to the slot server."""

    writer: asyncio.StreamWriter
    client: bool = False
    numbers: dict[int, int] = field(default_factory=dict)

    def send(self, kind: FrameKind, request: int, fields: dict[str, JSON] | None = None, data: bytes = b"") -> None:
        """Send one frame, unless the connection is gone."""
        if not self.writer.is_closing():
            self.writer.write(frames.encode(kind, request, fields, data))


@dataclass
class _Request:
    """One request to the slot server, and the visitor that sent it."""

    visitor: Visitor
    number: int
    fields: dict[str, JSON]


class Broker:
    """Serves one socket with one slot server, until `over` is set."""

    def __init__(self, below: asyncio.StreamWriter, rung: str) -> None:
        self._below, self._rung = below, rung
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Request] = {}
        self._own: dict[int, asyncio.Future[Frame]] = {}
        self._leases: dict[str, dict[str, JSON]] = {}
        self._layers: set[str] = set()  # the layers of the client's snapshots
        self._client: Visitor | None = None
        self.over = asyncio.Event()

    # The client's side

    async def visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, from its HELLO to its end."""
        visitor, decoder = Visitor(writer), FrameDecoder()
        try:
            if not _is_same_user(writer):
                return
            while data := await reader.read(RECEIVE_BYTES):
                for frame in decoder.feed(data):
                    await self._on_visitor(visitor, frame)
                await self._below.drain()
        except (OSError, ValueError, frames.ProtocolError):
            pass  # the visitor is gone, or does not follow the protocol
        finally:
            self._drop_visitor(visitor)
            writer.close()

    async def _on_visitor(self, visitor: Visitor, frame: Frame) -> None:
        if frame.kind is FrameKind.HELLO:
            await self._hello(visitor, frame)
        elif frame.kind is FrameKind.REQUEST and frame.fields["op"] == "end":
            self.over.set()
        elif not visitor.client:
            visitor.send(FrameKind.ERROR, frame.request, {"error": "sandbox", "message": "not attached"})
        elif frame.kind is FrameKind.REQUEST:
            number = visitor.numbers[frame.request] = next(self._numbers)
            self._pending[number] = _Request(visitor, frame.request, frame.fields)
            self._below.write(frames.encode(frame.kind, number, frame.fields, frame.data))
        elif frame.request in visitor.numbers:
            self._below.write(frames.encode(frame.kind, visitor.numbers[frame.request], frame.fields, frame.data))

    async def _hello(self, visitor: Visitor, frame: Frame) -> None:
        about: dict[str, JSON] = {"version": frames.VERSION, "pid": os.getpid(), "rung": self._rung}
        # Before the version is compared, so that a client of another version can list the service, and end it.
        if frame.fields.get("look"):
            about |= {"attached": self._client is not None, "leases": list(self._leases.values())}
            visitor.send(FrameKind.HELLO, frame.request, about)
        elif frame.fields["version"] != frames.VERSION:
            message = f"the service uses protocol version {frames.VERSION}; to end it, run: palaestra slots clean --all"
            visitor.send(FrameKind.ERROR, frame.request, {"error": "isolation", "message": message})
        elif self._client is not None:
            message = "another process is attached to this service; wait until it ends, or use another service"
            visitor.send(FrameKind.ERROR, frame.request, {"error": "sandbox", "message": message})
        else:
            # Before the first wait, so that no second client can attach meanwhile.
            self._client, visitor.client = visitor, True
            for name in list(self._leases):
                await self._renew(name)
            visitor.send(FrameKind.HELLO, frame.request, about | {"leases": list(self._leases.values())})

    async def _renew(self, name: str) -> None:
        """Give a lease a new epoch, so that its former holder is refused from now on. Drop the lease if the slot server
        does not renew it."""
        lease = self._leases[name]
        answer = await self._send_request({"op": "renew", "slot": name, "epoch": lease["epoch"]})
        if answer.kind is FrameKind.RESULT:
            lease["epoch"] = answer.fields["epoch"]
        else:
            self._leases.pop(name, None)

    def _drop_visitor(self, visitor: Visitor) -> None:
        """Cancel a visitor's commands and drop its snapshots; its slots stay."""
        for number in visitor.numbers.values():
            self._below.write(frames.encode(FrameKind.CANCEL, number))
        if self._client is visitor:
            self._client = None
            self._drop_layers(self._layers)

    def _drop_layers(self, layers: set[str]) -> None:
        """Drop the snapshots with these layers. Slots keep the layers that they use."""
        fields: dict[str, JSON] = {"op": "forget", "layers": sorted(layers)}
        self._below.write(frames.encode(FrameKind.REQUEST, next(self._numbers), fields))
        layers.clear()

    # The slot server's side

    async def _send_request(self, fields: dict[str, JSON]) -> Frame:
        number = next(self._numbers)
        self._own[number] = asyncio.get_running_loop().create_future()
        self._below.write(frames.encode(FrameKind.REQUEST, number, fields))
        return await self._own[number]

    async def listen_below(self, reader: asyncio.StreamReader, decoder: FrameDecoder) -> None:
        """Handle the slot server's frames until the slot server ends."""
        while data := await reader.read(RECEIVE_BYTES):
            for frame in decoder.feed(data):
                self._on_below(frame)
            if self._client is not None:
                # A client that does not read holds up the slot server, and does not fill this process's memory.
                with contextlib.suppress(OSError):
                    await self._client.writer.drain()
        self.over.set()

    def _on_below(self, frame: Frame) -> None:
        final = frame.kind in (FrameKind.RESULT, FrameKind.ERROR)
        if frame.kind is FrameKind.LOST:
            self._leases.pop(frame.fields["slot"], None)
            if self._client is not None:
                self._client.send(frame.kind, 0, frame.fields)
        elif frame.request in self._own and final:
            self._own.pop(frame.request).set_result(frame)
        elif frame.request in self._pending:
            request = self._pending[frame.request]
            if final:
                del self._pending[frame.request]
                del request.visitor.numbers[request.number]
                self._account(request, frame)
            request.visitor.send(frame.kind, request.number, frame.fields, frame.data)

    def _account(self, request: _Request, answer: Frame) -> None:
        """Update the leases, and the layers of the client's snapshots."""
        asked, op = request.fields, request.fields["op"]
        if op == "create" and answer.kind is FrameKind.RESULT:
            lease = {"slot": answer.fields["slot"], "epoch": answer.fields["epoch"], "about": asked.get("about", {})}
            self._leases[answer.fields["slot"]] = lease
        elif op in ("destroy", "seal"):
            self._leases.pop(asked["slot"], None)
        if op == "forget":
            self._layers.difference_update(asked["layers"])
        elif op in ("seal", "checkpoint", "view", "load", "compose") and answer.kind is FrameKind.RESULT:
            made = set(answer.fields["layers"][: None if op == "load" else 1])
            if request.visitor is self._client:
                self._layers |= made
            else:
                # The client has left, and nobody else knows the snapshot.
                self._drop_layers(made)

    async def watch_idleness(self) -> None:
        """End the service after `IDLE_S` seconds with neither a client nor slots."""
        idle_s = 0.0
        while idle_s < IDLE_S:
            await asyncio.sleep(1.0)
            idle_s = 0.0 if self._client is not None or self._leases else idle_s + 1.0
        self.over.set()


def _is_same_user(writer: asyncio.StreamWriter) -> bool:
    """Return whether the user on the other side is this user or root. The socket's permissions are a first check."""
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[1] in (0, os.geteuid())


def _say(fields: dict[str, JSON]) -> None:
    """Report the outcome of the start to the process that started this one. Only the first call has an effect."""
    os.write(1, json.dumps(fields).encode() + b"\n")
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)


async def _serve_clients(listener: socket.socket, path: str, rung: str, settings: dict[str, JSON]) -> None:
    server, stream = await SlotClient.launch_server(rung)
    reader, writer = await asyncio.open_unix_connection(sock=stream)
    decoder = FrameDecoder()
    writer.write(frames.encode(FrameKind.HELLO, 0, {"version": frames.VERSION, **settings}))
    frame = next(iter(decoder.feed(await reader.read(RECEIVE_BYTES))), None)
    if frame is None or frame.kind is not FrameKind.HELLO:
        _unlink(path)
        _say(frame.fields if frame else {"message": "the slot server has ended"})
        await server.aclose()
        return
    broker = Broker(writer, rung)
    ready = await asyncio.start_unix_server(broker.visit, sock=listener)
    _say({})
    async with asyncio.TaskGroup() as group:
        watching = [group.create_task(broker.listen_below(reader, decoder)), group.create_task(broker.watch_idleness())]
        await broker.over.wait()
        ready.close()
        _unlink(path)
        writer.close()
        for task in watching:
            task.cancel()
    await server.aclose()


def main() -> None:
    """Run `broker FD PATH RUNG SETTINGS`: serve the listening socket FD, whose name is PATH."""
    number, path, rung, settings = sys.argv[1:]
    if os.fork():
        os._exit(0)  # so that no process has to wait for the service to end
    try:
        asyncio.run(_serve_clients(socket.socket(fileno=int(number)), path, rung, json.loads(settings)))
    except BaseException:
        _unlink(path)
        raise


def _unlink(path: str) -> None:
    """Remove the socket before others notice that the service has ended; after that, the name may belong to another
    service."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


if __name__ == "__main__":
    main()
