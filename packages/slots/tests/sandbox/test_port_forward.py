"""A port of the host in a slot without a network: what is sent arrives, and what the slot forges stays harmless."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.port_forward import forwarded_port
from palaestra_slots.sandbox.slot import Slot, SlotSpec

pytestmark = pytest.mark.slots

CLIENT = """
import socket, sys, threading
def echo(size):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30) as connection:
        data, back = bytes(range(256)) * (size // 256), b""
        def read():
            nonlocal back
            while len(back) < len(data):
                back += connection.recv(1 << 16)
        reader = threading.Thread(target=read); reader.start()
        connection.sendall(data); reader.join()
        assert back == data
threads = [threading.Thread(target=echo, args=(size,)) for size in [256] * 20 + [3_000_000]]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print("fine")
"""


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


def forwarding(body: Callable[[Slot, int], Awaitable[None]], most: int = 64) -> None:
    """Run with a slot that reaches an echo server of this machine at a port."""

    async def main() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        backend = LocalBackend()
        try:
            await backend.start()
            slot = await backend.create(spec=SlotSpec(), trajectory_id="t")
            async with forwarded_port(slot, "127.0.0.1", server.sockets[0].getsockname()[1], most=most) as port:
                await body(slot, port)
        finally:
            await backend.aclose()
            server.close()

    asyncio.run(main())


def test_concurrent_connections_carry_large_data() -> None:
    async def body(slot: Slot, port: int) -> None:
        result = await slot.execute(["python3", "-c", CLIENT, str(port)], timeout_s=60)
        assert "fine" in result.output, result.output

    forwarding(body)


def test_connections_beyond_the_limit_are_closed() -> None:
    async def body(slot: Slot, port: int) -> None:
        code = (
            "import socket, sys\n"
            "made = [socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10) for _ in range(3)]\n"
            "print(made[2].recv(1))\n"
        )
        result = await slot.execute(["python3", "-c", code, str(port)], timeout_s=30)
        assert result.output.strip() == "b''"

    forwarding(body, most=2)


def test_an_agent_that_kills_the_relay_loses_its_port_alone() -> None:
    async def body(slot: Slot, port: int) -> None:
        await slot.execute("kill -9 -1", timeout_s=10)
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 3)"
        assert not (await slot.execute(["python3", "-c", code])).success
        assert (await slot.execute("echo alive")).output == "alive\n"

    forwarding(body)


STOP_RELAY = """
import os, signal, socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10)
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read().split(chr(0))
    except OSError:
        continue
    if words[1:3] == ["-I", "-S"]:
        os.kill(int(pid), signal.SIGSTOP)
        print("stopped")
"""


async def test_an_agent_that_stops_the_relay_does_not_keep_the_host_waiting() -> None:
    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1)
        writer.write(bytes(4 << 20))
        await asyncio.wait([asyncio.ensure_future(reader.read())])
        writer.close()

    server = await asyncio.start_server(late, "127.0.0.1", 0)
    backend = LocalBackend()
    try:
        await backend.start()
        slot = await backend.create(spec=SlotSpec(), trajectory_id="t")
        async with asyncio.timeout(30):
            async with forwarded_port(slot, "127.0.0.1", server.sockets[0].getsockname()[1]) as port:
                result = await slot.execute(["python3", "-c", STOP_RELAY, str(port)])
                assert result.output == "stopped\n"
                await asyncio.sleep(1.5)
    finally:
        await backend.aclose()
        server.close()
