"""Connects to a slot server behind a network port (`port_server.py`). A token authenticates the client."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from pathlib import Path
from typing import Self

import palaestra_slots
from palaestra_cloud import port_launch, port_server
from palaestra_cloud.port_server import UPGRADE, keep_alive
from palaestra_slots.core.errors import SandboxError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.local.client import OnLost
from palaestra_slots.sandbox.remote.remote_client import SILENCE_S, DistantClient, packed, slotd_files
from palaestra_slots.sandbox.slotd.protocol.frames import Fields

_ANSWER_S = 15.0
_SLOTS = Path(palaestra_slots.__file__).parent
_FILES = (
    "core/__init__.py", "core/errors.py", "core/extras.py", "core/printable.py", "core/types.py", "sandbox/__init__.py",
    "sandbox/artifact_files.py", "sandbox/server_backend.py", "sandbox/images/__init__.py",
    "sandbox/images/reference.py", "sandbox/isolation/__init__.py", "sandbox/isolation/self_test.py",
    "sandbox/local/__init__.py", "sandbox/local/client.py", "sandbox/local/local_slot.py", "sandbox/python_call.py",
    "sandbox/slot.py", "sandbox/slot_tools.py", "sandbox/terminal/__init__.py",
    "sandbox/terminal/interactive_terminal.py", "sandbox/terminal/pane.py", "sandbox/terminal/screen.py",
)  # fmt: skip
"""The files of slots that the server needs in addition to `slotd`."""


class PortClient(DistantClient):
    """A client with its own slot server behind a port."""

    @classmethod
    async def connect(
        cls,
        address: tuple[str, int],
        token: str,
        rung: str,
        settings: Fields,
        on_lost: OnLost,
        *,
        silence_s: float = SILENCE_S,
    ) -> Self:
        """Start a server at an isolation level. Raises `SandboxError` or `OSError`."""
        client = cls(on_lost)
        stream = await _connected_socket(address)
        try:
            head = f"POST /stream?rung={rung} HTTP/1.1\r\nHost: slots\r\nAuthorization: Bearer {token}\r\n"
            request = f"{head}Connection: Upgrade\r\nUpgrade: {UPGRADE}\r\nContent-Length: 0\r\n\r\n"
            await client.loop.sock_sendall(stream, request.encode())
            async with asyncio.timeout(_ANSWER_S):
                first = await _read_head(stream)
            if " 101 " not in first:
                raise SandboxError(f"the slot server at {_host_and_port(address)} refuses a stream: {first}")
            client._connect(stream)
            async with asyncio.timeout(silence_s):
                await client._greet(settings)
        except BaseException as error:
            await client.aclose()
            stream.close()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"the slot server at {_host_and_port(address)} did not answer in time") from None
            raise
        client.beat(silence_s)
        return client


async def ask(address: tuple[str, int], token: str, method: str, path: str, body: bytes = b"") -> tuple[int, JSON]:
    """Send one request and return its status and JSON. Raises OSError, including TimeoutError, if there is no
    answer."""
    async with asyncio.timeout(_ANSWER_S):
        reader, writer = await asyncio.open_connection(*address)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: slots\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            answer = await reader.read()
        finally:
            writer.close()
    head, _, text = answer.decode(errors="replace").partition("\r\n\r\n")
    words = head.split()
    if len(words) < 2 or not words[1].isdecimal():
        raise ConnectionError(f"{_host_and_port(address)} is not an HTTP server")
    try:
        return int(words[1]), json.loads(text)
    except ValueError:
        return int(words[1]), None


async def deliver(address: tuple[str, int], token: str) -> None:
    """Send the server its files, unless it already has them. Raises `SandboxError` or OSError."""
    status, _ = await ask(address, token, "GET", "/health")
    if status == 503:
        status, _ = await ask(address, token, "PUT", "/server", archive())
    if status != 200:
        raise SandboxError(f"the slot server at {_host_and_port(address)} refuses its files: status {status}")


async def _connected_socket(address: tuple[str, int]) -> socket.socket:
    stream = socket.socket()
    try:
        stream.setblocking(False)
        async with asyncio.timeout(_ANSWER_S):
            await asyncio.get_running_loop().sock_connect(stream, address)
        keep_alive(stream)
    except BaseException:
        stream.close()
        raise
    return stream


async def _read_head(stream: socket.socket) -> str:
    """Read the head of an answer and return its first line. The bytes after the head stay in the socket, because they
    are frames."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = await asyncio.get_running_loop().sock_recv(stream, 1)
        if not piece:
            break
        head += piece
    return head.decode(errors="replace").split("\r\n", 1)[0]


def _host_and_port(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


@functools.cache
def program() -> str:
    """Return the source of `port_launch`."""
    return Path(port_launch.__file__).read_text()


@functools.cache
def archive() -> bytes:
    """Return the server's files as the archive that `port_launch` unpacks: packages with an empty `__init__.py`."""
    paths: dict[str, Path | None] = dict.fromkeys(
        ("palaestra/__init__.py", "palaestra/cloud/__init__.py", "palaestra_slots/__init__.py")
    )
    paths["palaestra/cloud/port_server.py"] = Path(port_server.__file__)
    for path in (*(_SLOTS / name for name in _FILES), *slotd_files()):
        paths[f"palaestra_slots/{path.relative_to(_SLOTS)}"] = path
    return packed(paths)
