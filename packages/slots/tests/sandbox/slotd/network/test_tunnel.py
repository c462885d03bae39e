"""The network of a slot with the network on: connections through its device, to named ports of this host."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import AsyncIterator

import pytest

from golden_messages import check_message
from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.core.types import Network
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec
from palaestra_slots.sandbox.slotd.network import tunnel
from palaestra_slots.sandbox.slotd.network.tunnel_device import HOST_NAME
from sandbox.processes import descendants

MIB = 1 << 20


@pytest.mark.parametrize(
    ("address", "port", "allowed"),
    [
        ("127.0.0.1", 53, False),
        ("::1", 80, False),
        ("0.0.0.0", 80, False),
        ("::ffff:127.0.0.1", 80, False),
        ("64:ff9b::7f00:1", 80, False),
        ("224.0.0.1", 80, False),
        ("255.255.255.255", 80, False),
        ("169.254.169.254", 80, False),
        ("169.254.169.254", 53, True),
        ("::ffff:169.254.169.254", 80, False),
        ("8.8.8.8", 443, True),
        ("10.1.2.3", 5432, True),
    ],
)
def test_destinations(address: str, port: int, allowed: bool) -> None:
    assert (tunnel.refusal(ipaddress.ip_address(address), port) is None) == allowed


def test_an_address_of_this_host_is_refused() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 9))
        except OSError:
            pytest.skip("this host has no address besides the loopback's")
        own = probe.getsockname()[0]
    check_message(tunnel.refusal(ipaddress.ip_address(own), 80))


def test_slots_share_the_descriptors() -> None:
    assert tunnel.connections_per_tunnel(1 << 20, 1) == tunnel.MOST_CONNECTIONS
    for slots in (2, 4, 8):
        assert 3 * slots * tunnel.connections_per_tunnel(4096, slots) <= 4096
    assert tunnel.connections_per_tunnel(1024, 100) == 16


@pytest.fixture(params=[Rung.FULL, Rung.USERNS], ids=lambda rung: str(rung.label))
def rung(request: pytest.FixtureRequest) -> Rung:
    return request.param  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def _online(rung: Rung, *ports: int) -> AsyncIterator[tuple[LocalBackend, Slot]]:
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("/dev/net/tun cannot be opened here")
    backend = LocalBackend(rung=rung, host_ports=ports)
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with backend:
        yield backend, await backend.create(SlotSpec(network=Network.ON), "online")


async def _python(slot: Slot, program: str) -> str:
    return (await slot.execute(["python3", "-c", program], timeout_s=60)).output


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what came, once the other side has ended."""
    with contextlib.suppress(OSError):
        writer.write(await reader.read(-1))
        await writer.drain()
    writer.close()


@pytest.mark.slots
async def test_a_named_port_is_reached_by_all_that_there_is_to_tcp(rung: Rung) -> None:
    """Large data both ways, a half-closed connection, many connections, and a port that nobody serves."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, limit=64 * MIB)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    port = server.sockets[0].getsockname()[1]
    async with server, _online(rung, port, nobody) as (_, slot):
        program = f"""
import hashlib, os, socket, threading
def echo(host, size):
    sent = os.urandom(size)
    with socket.create_connection((host, {port}), 20) as s:
        s.sendall(sent); s.shutdown(socket.SHUT_WR)
        got = b''.join(iter(lambda: s.recv(1 << 20), b''))
    return got == sent
print(echo({HOST_NAME!r}, 20 << 20), echo('198.18.0.2', 1), echo('198.18.0.2', 0))
done = []
threads = [threading.Thread(target=lambda: done.append(echo('198.18.0.2', 70000))) for _ in range(100)]
for each in threads: each.start()
for each in threads: each.join()
print(len(done), all(done))
for port in ({nobody}, 1):
    try: socket.create_connection(('198.18.0.2', port), 20)
    except OSError as error: print(error.errno)
"""
        assert await _python(slot, program) == "True True True\n100 True\n111\n111\n"


@pytest.mark.slots
async def test_datagrams_reach_a_named_port(rung: Rung) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as service:
        service.bind(("127.0.0.1", 0))
        service.setblocking(False)
        loop = asyncio.get_running_loop()

        def answer() -> None:
            data, sender = service.recvfrom(65535)
            service.sendto(data[::-1], sender)

        loop.add_reader(service, answer)
        port = service.getsockname()[1]
        async with _online(rung, port) as (_, slot):
            program = f"""
import socket
with socket.socket(2, 2) as s:
    s.settimeout(10)
    for size in (0, 1, 1400, 60000):
        s.sendto(b'a' * size + b'z', ('198.18.0.2', {port}))
        data, sender = s.recvfrom(65535)
        print(data == b'z' + b'a' * size, sender == ('198.18.0.2', {port}))
"""
            assert await _python(slot, program) == "True True\n" * 4
            many = f"""
import socket
kept = [socket.socket(2, 2) for _ in range(400)]
for s in kept: s.sendto(b'x', ('198.18.0.2', {port}))
kept[-1].settimeout(10)
print(kept[-1].recv(10))
"""
            assert await _python(slot, many) == "b'x'\n"
        loop.remove_reader(service)


@pytest.mark.slots
async def test_the_network_comes_back_when_its_process_is_killed(rung: Rung) -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, _online(rung, port) as (backend, slot):
        ask = f"exec 3<>/dev/tcp/198.18.0.2/{port}"
        assert (await slot.execute(ask)).success
        killed = [each.pid for each in descendants(backend.server_pid) if each.name == "slot-proxy"]
        for pid in killed:
            os.kill(pid, 9)
        assert killed
        retry = f"for i in $(seq 50); do (timeout 2 bash -c '{ask}') 2>/dev/null && exit 0; sleep 0.1; done; exit 1"
        assert (await slot.execute(retry, timeout_s=60)).success
