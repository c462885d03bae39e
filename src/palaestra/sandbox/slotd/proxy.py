"""The proxy of slots with a list of hosts: a process of its own, in the host's network.

Such a slot has an empty network and one thing in it, a listening socket on its loopback that this process accepts on.
HTTP requests in absolute form and CONNECT are answered as the list says; there is no other way out, no DNS included.

It reads what an agent writes, so it keeps nothing that is worth having: the server forks it, it closes all but its
control socket, leaves root, and knows lists and listeners. What it cannot see is which of several hosts behind one
address and name an encrypted connection is for: a listed name is a listed operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401 - nothing can be imported once root is left
import json
import os
import signal
import socket
import urllib.parse
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from . import allowlist, descriptors, syscalls
from .allowlist import Rule

MAX_MESSAGE = 60_000
MAX_CONNECTIONS = 64
"""Per slot."""

_NOBODY = 65534
_HEAD_BYTES, _PIECE_BYTES = 64 << 10, 64 << 10
_HEAD_PATIENCE_S, _CONNECT_PATIENCE_S, _IDLE_PATIENCE_S = 30.0, 20.0, 600.0
_HOP_BY_HOP = ("connection", "keep-alive", "proxy-connection", "proxy-authorization", "host", "upgrade")


class Refused(Exception):
    """An answer instead of a connection: a status of HTTP and a line that a person can read."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def run(control: socket.socket) -> NoReturn:
    """The life of the process, in the child of a fork, whose root is the host's."""
    status = 1
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(control.fileno(), 3, inheritable=False)
        control.detach()
        syscalls.close_from(4)
        resolver = ThreadPoolExecutor(4, thread_name_prefix="resolver")
        with contextlib.suppress(OSError):  # a server without root is nobody already
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        asyncio.run(_Proxy(socket.socket(fileno=3), resolver).serve())
        status = 0
    finally:
        os._exit(status)


class _Gate:
    """One slot's way out."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self.connections: set[asyncio.Task[None]] = set()
        self.server: asyncio.Server | None = None

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        for connection in self.connections:
            connection.cancel()


class _Proxy:
    def __init__(self, control: socket.socket, resolver: ThreadPoolExecutor) -> None:
        self._control, self._resolver = control, resolver
        self._gates: dict[str, _Gate] = {}
        self._over = asyncio.Event()

    async def serve(self) -> None:
        """Until the server is gone."""
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        self._orders: asyncio.Queue[tuple[dict[str, object], list[int]]] = asyncio.Queue()
        loop.add_reader(self._control.fileno(), self._take)
        while not self._over.is_set():
            message, fds = await self._orders.get()
            name = str(message.get("slot", ""))
            if fds:
                await self._add(name, message, fds[0])
            elif name in self._gates:
                self._gates.pop(name).close()

    def _take(self) -> None:
        data, fds = descriptors.receive(self._control, MAX_MESSAGE, 1)
        if not data:
            self._over.set()
        self._orders.put_nowait((json.loads(data or b"{}"), fds))

    async def _add(self, name: str, message: dict[str, object], fd: int) -> None:
        entries = message["allow"]
        assert isinstance(entries, list)
        gate = self._gates[name] = _Gate([allowlist.parse(entry) for entry in entries])
        listener = socket.socket(fileno=fd)
        listener.setblocking(False)
        gate.server = await asyncio.start_server(
            lambda reader, writer: self._accept(gate, reader, writer), sock=listener, limit=_HEAD_BYTES
        )

    async def _accept(self, gate: _Gate, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        gate.connections.add(task)
        try:
            if len(gate.connections) > MAX_CONNECTIONS:
                raise Refused("503 Service Unavailable", f"a slot has at most {MAX_CONNECTIONS} connections at a time")
            await self._answer(gate, reader, writer)
        except Refused as refused:
            body = f"{refused.text}\n".encode(errors="replace")
            head = f"HTTP/1.1 {refused.status}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
            writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side has gone, or the slot has
        finally:
            gate.connections.discard(task)
            writer.close()

    async def _answer(self, gate: _Gate, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise Refused("431 Request Header Fields Too Large", "the request's head is too long") from None
        method, host, port, request = parse_request(head)
        far_reader, far_writer = await self._connect(gate.rules, host, port)
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                far_writer.write(request)
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, far_writer))
                both.create_task(_copy(far_reader, writer))
        except* (OSError, TimeoutError):
            pass
        finally:
            far_writer.close()

    async def _connect(self, rules: Sequence[Rule], host: str, port: int) -> tuple[StreamReader, StreamWriter]:
        """Look the host up, check every address, connect to the first that answers."""
        if (why := allowlist.refusal(rules, host, port)) is not None:
            raise Refused("403 Forbidden", why)
        failure: object = "it has no address"
        for address in await self._look_up(host, port):
            if (why := allowlist.address_refusal(host, address)) is not None:
                raise Refused("403 Forbidden", why)
            try:
                async with asyncio.timeout(_CONNECT_PATIENCE_S):
                    return await asyncio.open_connection(str(address), port)
            except (OSError, TimeoutError) as error:
                failure = error
        raise Refused("502 Bad Gateway", f"cannot connect to {host}:{port}: {failure}")

    async def _look_up(self, host: str, port: int) -> list[allowlist.Address]:
        address = allowlist.literal(host)
        if address is not None:
            return [address]
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_PATIENCE_S):
                found = await loop.run_in_executor(
                    self._resolver, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                )
        except (OSError, TimeoutError, UnicodeError) as error:
            raise Refused("502 Bad Gateway", f"{host} cannot be looked up: {error}") from None
        texts = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)
        return [address for text in texts if (address := allowlist.literal(text)) is not None]


def parse_request(head: bytes) -> tuple[str, str, int, bytes]:
    """Method, host, port, and the request as the far side is to see it (RFC 9112, 3.2). Raises `Refused`."""
    lines = head[:-4].decode("latin-1").split("\r\n")
    try:
        method, target, version = lines[0].split(" ")
        absolute = urllib.parse.urlsplit(target if method != "CONNECT" else f"//{target}")
        host, port = allowlist.normal(absolute.hostname or ""), absolute.port
    except ValueError:
        raise Refused("400 Bad Request", "this is not a request to a proxy") from None
    if method != "CONNECT" and absolute.scheme != "http":
        raise Refused("400 Bad Request", "this is a proxy: ask it for http://host/path, or CONNECT host:port")
    if not host or (method == "CONNECT" and port is None):
        raise Refused("400 Bad Request", "the request names no host and port")
    path = urllib.parse.urlunsplit(("", "", absolute.path or "/", absolute.query, ""))
    kept = [line for line in lines[1:] if line.partition(":")[0].strip().lower() not in _HOP_BY_HOP]
    authority = absolute.netloc.rpartition("@")[2]
    request = "\r\n".join([f"{method} {path} {version}", f"Host: {authority}", *kept, "Connection: close", "", ""])
    return method, host, port or 80, request.encode("latin-1")


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    while True:
        async with asyncio.timeout(_IDLE_PATIENCE_S):
            data = await reader.read(_PIECE_BYTES)
        if not data:
            break
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
