"""Forwards HTTP requests in absolute form, and CONNECT requests, to destinations that a judge allows.

`proxy.py` runs a `Forwarder` for slots, in a separate process; other proxies of this project use the class too. The
owner of a listener passes each connection to `Forwarder.accept`.

Invariant: the requested host, and each address before a connection to it, are judged, and the connection goes to the
judged address. A name is resolved only once per request, so a second answer cannot differ.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import urllib.parse
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from . import allowlist

PROXY_NAME = "palaestra"  # marks an answer in `Proxy-Status` as the proxy's own (RFC 9209)
HEAD_BYTES = 64 << 10
_PIECE_BYTES = 64 << 10
_HEAD_PATIENCE_S, _CONNECT_PATIENCE_S, _IDLE_PATIENCE_S = 30.0, 20.0, 600.0
_HOP_BY_HOP = ("connection", "keep-alive", "proxy-connection", "proxy-authorization", "host", "upgrade")


class ForwardRefused(Exception):
    """An answer in place of a connection: an HTTP status and a line of text."""

    def __init__(self, status: str, text: str, header: str = "") -> None:
        super().__init__(text)
        self.status, self.text, self.header = status, text, header


class Judge(Protocol):
    """Decides which hosts, and which addresses found for them, may be reached. Each method returns the reason to refuse
    one, or None to allow it."""

    def refusal(self, host: str, port: int) -> str | None: ...

    def address_refusal(self, host: str, port: int, address: allowlist.Address) -> str | None: ...


class Forwarder:
    """Serves at most `most` connections at a time. If `key` is not empty, it serves only clients that send the key
    (RFC 9110, 11.7.2). `refused` is called with the host, the port and the reason for every request whose destination
    is not allowed or cannot be reached."""

    def __init__(
        self,
        judge: Judge,
        resolver: ThreadPoolExecutor,
        *,
        most: int,
        key: str = "",
        refused: Callable[[str, int, str], None] | None = None,
    ) -> None:
        self._judge, self._resolver, self._most, self._key, self._refused = judge, resolver, most, key, refused
        self._connections: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.cancel()

    async def accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one connection to its end. The reader's limit must be `HEAD_BYTES`."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) > self._most:
                raise ForwardRefused("503 Service Unavailable", f"at most {self._most} connections at a time")
            await self._answer_request(reader, writer)
        except ForwardRefused as refused:
            body = f"{refused.text}\n".encode(errors="replace")
            head = f"HTTP/1.1 {refused.status}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
            head += f"Proxy-Status: {PROXY_NAME}; error=http_request_denied\r\n{refused.header}"
            writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side of the connection, or the slot, is gone
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer_request(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise ForwardRefused("431 Request Header Fields Too Large", "the request's head is too long") from None
        self._check_key(head)
        method, host, port, request = parse_request(head)
        try:
            far_reader, far_writer = await self._connect(host, port)
        except ForwardRefused as refused:
            if self._refused is not None:
                self._refused(host, port, refused.text)
            raise
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                far_writer.write(request)
            async with asyncio.TaskGroup() as both:
                both.create_task(copy(reader, far_writer, _IDLE_PATIENCE_S))
                both.create_task(copy(far_reader, writer, _IDLE_PATIENCE_S))
        except* (OSError, TimeoutError):
            pass
        finally:
            far_writer.close()

    def _check_key(self, head: bytes) -> None:
        wanted = f"basic {self._key}".encode()
        lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
        given = [value.strip() for name, _, value in lines if name.strip().lower() == b"proxy-authorization"]
        # The name of the scheme has no case (RFC 9110, 11.1), but the key has.
        if self._key and not any(hmac.compare_digest(each[:6].lower() + each[6:], wanted) for each in given):
            header = f'Proxy-Authenticate: Basic realm="{PROXY_NAME}"\r\n'
            raise ForwardRefused("407 Proxy Authentication Required", "the proxy's key is missing or wrong", header)

    async def _connect(self, host: str, port: int) -> tuple[StreamReader, StreamWriter]:
        """Resolve the host, and try its addresses in order until one answers. Each address is judged first. Raises
        `ForwardRefused` if an address may not be reached, or if none answers."""
        if (why := self._judge.refusal(host, port)) is not None:
            raise ForwardRefused("403 Forbidden", why)
        failure: object = "it has no address"
        for address in await self._look_up(host, port):
            if (why := self._judge.address_refusal(host, port, address)) is not None:
                raise ForwardRefused("403 Forbidden", why)
            try:
                async with asyncio.timeout(_CONNECT_PATIENCE_S):
                    return await asyncio.open_connection(str(address), port)
            except (OSError, TimeoutError) as error:
                failure = error
        raise ForwardRefused("502 Bad Gateway", f"cannot connect to {host}:{port}: {failure}")

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
            raise ForwardRefused("502 Bad Gateway", f"{host} cannot be looked up: {error}") from None
        texts = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)
        return [address for text in texts if (address := allowlist.literal(text)) is not None]


def parse_request(head: bytes) -> tuple[str, str, int, bytes]:
    """Return the method, the host, the port, and the request as it is forwarded (RFC 9112, 3.2). Raises
    `ForwardRefused`."""
    lines = head[:-4].decode("latin-1").split("\r\n")
    try:
        method, target, version = lines[0].split(" ")
        absolute = urllib.parse.urlsplit(target if method != "CONNECT" else f"//{target}")
        host, port = allowlist.normal(absolute.hostname or ""), absolute.port
    except ValueError:
        raise ForwardRefused("400 Bad Request", "this is not a request to a proxy") from None
    if method != "CONNECT" and absolute.scheme != "http":
        raise ForwardRefused("400 Bad Request", "this is a proxy: request http://host/path, or CONNECT host:port")
    if not host or (method == "CONNECT" and port is None):
        raise ForwardRefused("400 Bad Request", "the request names no host and port")
    path = urllib.parse.urlunsplit(("", "", absolute.path or "/", absolute.query, ""))
    kept = [line for line in lines[1:] if line.partition(":")[0].strip().lower() not in _HOP_BY_HOP]
    # A proxy replaces the client's Host (RFC 9112, 3.2.2): otherwise, the host that the server sees could be another
    # one than the judged host.
    authority = absolute.netloc.rpartition("@")[2]
    # Everything after the head is copied unread, so no second request, perhaps for another host, may follow on this
    # connection.
    request = "\r\n".join([f"{method} {path} {version}", f"Host: {authority}", *kept, "Connection: close", "", ""])
    return method, host, port or 80, request.encode("latin-1")


async def copy(reader: StreamReader, writer: StreamWriter, patience_s: float | None) -> None:
    """Copy data until the reader's end, and then end the writer's output. Raises OSError, and TimeoutError if no data
    arrives for `patience_s` seconds."""
    while True:
        async with asyncio.timeout(patience_s):
            data = await reader.read(_PIECE_BYTES)
        if not data:
            break
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
