"""A port of a slot, reached from this process."""

from __future__ import annotations

import asyncio

import pytest

from palaestra_slots import Sandbox
from palaestra_slots.sandbox import slot_port as module
from palaestra_slots.sandbox.slot_port import slot_port

pytestmark = pytest.mark.slots

SERVER = """\
import socket
server = socket.create_server(("127.0.0.1", 8000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    asked = connection.makefile().readline().strip()
    if asked == "endless":
        try:
            while True:
                connection.sendall(bytes(1 << 16))
        except OSError:
            continue
    connection.sendall(asked[::-1].encode())
    connection.close()
"""


async def test_connections_are_copied_both_ways_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 20)

    async def asked(path: str, text: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(text + b"\n")
        try:
            return await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()

    async def main() -> None:
        async with Sandbox() as box:
            process = await box.slot.spawn(["python3", "-c", SERVER])
            assert (await process.read(wait_s=10)).data == b"ready\n"
            async with slot_port(box.slot, "127.0.0.1", 8000) as path:
                assert await asyncio.gather(*(asked(str(path), word) for word in (b"abc", b"de"))) == [b"cba", b"ed"]
                assert (1 << 19) < len(await asked(str(path), b"endless")) <= 1 << 20
                assert await asked(str(path), b"after") == b"retfa"
            async with slot_port(box.slot, "127.0.0.1", 8001) as path:
                assert await asked(str(path), b"nobody") == b""

    await main()
