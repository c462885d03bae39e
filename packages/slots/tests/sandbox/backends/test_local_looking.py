"""What a slot's processes are and answer, asked from outside: nothing that the slot's root holds has a say in it."""

from __future__ import annotations

import pytest

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Process, Slot
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots

SERVER = """
import socket
listener = socket.create_server(("127.0.0.1", 23456))
print("ready", flush=True)
held = []
while True:
    connection, _ = listener.accept()
    asked = connection.recv(100)
    if asked == b"hold":
        held.append(connection)
        continue
    try:
        connection.sendall(b"x" * 2_000_000 if asked == b"flood" else b"you said " + asked)
    except ConnectionError:
        pass  # who asked has had enough
    connection.close()
"""


async def ready(process: Process) -> None:
    """Until it has said so: from then on it is the program that it was started as."""
    async for piece in process.output():
        if b"ready" in piece.data:
            return
    raise AssertionError("it ended before it was ready")


def test_a_process_is_what_the_kernel_says(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        argv = ["sh", "-c", "echo ready; read line", "", "a word"]
        process = await slot.spawn(argv)
        await ready(process)
        await slot.execute("printf 'exit 1' > /etc/ld.so.preload; ln -sf /bin/true /usr/bin/ps")
        assert await slot.arguments(process.pid) == argv
        await process.kill()
        assert await slot.arguments(process.pid) is None
        assert await slot.arguments(987_654) is None

    on_each_rung(body)


def test_what_a_service_answers(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        with pytest.raises(ConnectionRefusedError):
            await slot.ask(23_456, b"anybody?")
        await slot.write_text("server.py", SERVER)
        await ready(await slot.spawn(["python3", "server.py"]))
        assert await slot.ask(23_456, b"hello") == b"you said hello"
        assert await slot.ask(23_456, b"flood", max_bytes=1000) == b"x" * 1000
        with pytest.raises(TimeoutError):
            await slot.ask(23_456, b"hold", timeout_s=0.2)
        assert await slot.ask(23_456, b"again") == b"you said again"
        async with slot.fork() as fork:
            with pytest.raises(ConnectionRefusedError):
                await fork.ask(23_456, b"another slot's network")
        with pytest.raises(ValueError, match="from 1 to 65535"):
            await slot.ask(0, b"")

    on_each_rung(body)
