"""Groups of slots: who reaches whom, and what is left of a group."""

from __future__ import annotations

import asyncio
import socket

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import AcquireTimeout, ConfigError, SandboxError
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import GroupAddress, Rung, Slot, SlotSpec
from sandbox.bodies import WithSlot
from sandbox.conftest import SlotServers

pytestmark = pytest.mark.slots

SERVE = """
import socket
with socket.create_server(("0.0.0.0", 80)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        connection.sendall(b"hello")
        connection.close()
"""
ASK = """
import socket, sys
for address, port in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        with socket.create_connection((address, int(port)), timeout=1) as asked:
            print(asked.recv(9).decode() or "silence")
    except OSError as error:
        print(type(error).__name__)
"""
SCAN = """
import socket
for number in range(256):
    try:
        socket.socket(2, 2).sendto(b"x", (f"198.19.0.{number}", 9))
    except OSError:
        pass
print(open("/proc/net/arp").read())
"""


def member(group: str, number: int, members: int = 2) -> SlotSpec:
    return SlotSpec(group=GroupAddress(group, number, members))


async def serve(slot: Slot) -> None:
    process = await slot.spawn(["python3", "-c", SERVE])
    assert (await process.read(wait_s=20)).data == b"ready\n"


async def ask(slot: Slot, *where: str) -> list[str]:
    return (await slot.execute(["python3", "-c", ASK, *where])).output.split()


def test_members_of_a_group_reach_each_other_and_nobody_else(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, outsider: Slot) -> None:
        first, second = [await backend.create(member("a", number), "a") for number in (2, 3)]
        other = await backend.create(member("b", 2), "b")
        await serve(second)
        await serve(outsider)
        assert await ask(first, "198.19.0.3", "80") == ["hello"]
        assert await ask(other, "198.19.0.3", "80") != ["hello"], "another group has the same addresses"
        assert await ask(outsider, "198.19.0.3", "80") != ["hello"]
        with socket.create_server(("0.0.0.0", 0)) as host:
            port = str(host.getsockname()[1])
            reached = await ask(first, "127.0.0.1", port, "198.19.0.1", port, "8.8.8.8", "53", "127.0.0.1", "80")
        assert "hello" not in reached
        assert "silence" not in reached, "the host, the gateway's usual address, and the outside"
        neighbours = await first.execute(["python3", "-c", SCAN])
        assert 1 < len(neighbours.output.splitlines()) <= 2 + 6, "a group of two has six addresses"
        addresses = (await first.execute("cat /proc/net/if_inet6")).output
        assert "eth0" not in addresses, "the device has no IPv6"
        change = "ip addr add 198.19.0.9/24 dev eth0 || ip link set eth0 down || ip route add default dev eth0"
        assert not (await first.execute(change)).success

    on_each_rung(body)


def test_a_name_can_be_used_again_when_the_group_has_ended(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        for _ in range(3):
            slots = [await backend.create(member("again", number), "a") for number in (2, 3)]
            with pytest.raises(SandboxError, match="number 3"):
                await backend.create(member("again", 3), "the same number")
            async with slots[0].fork() as fork:
                assert await ask(fork, "198.19.0.3", "80") == ["OSError"], "a fork is in no group"
            for slot in slots:
                await backend.destroy(slot)

    on_each_rung(body)


def test_numbers_of_members() -> None:
    assert GroupAddress("a", 3, 2).address == "198.19.0.3"
    for number, members in ((0, 2), (4, 2), (1, 0), (2, 251)):
        with pytest.raises(ConfigError, match="at most 250 slots"):
            GroupAddress("a", number, members)


def test_a_level_without_namespaces_has_no_groups(slot_servers: SlotServers) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        with raises(ConfigError):
            await backend.create(member("a", 2), "a")

    slot_servers.run(body, Rung.CONFINED)


async def test_a_pool_leases_a_group_at_once_and_ends_it_together() -> None:
    async with SlotPool(SlotPoolConfig(max_slots=3), LocalBackend()) as pool:
        single = await pool.acquire("single")
        with raises(ConfigError, 4, 3):
            await pool.acquire("too large", spec=member("a", 2, 4))
        with pytest.raises(AcquireTimeout):
            await pool.acquire("group", spec=member("", 2, 3), timeout_s=0.05)
        waiting = asyncio.ensure_future(pool.acquire("group", spec=member("", 2, 3)))
        await asyncio.sleep(0)
        behind = asyncio.ensure_future(pool.acquire("behind"))
        await pool.release(single)
        first = await waiting
        second = await pool.add(first, 3, SlotSpec(), "second")
        assert pool.available_slots == 0
        assert not behind.done()
        await pool.add(first, 4, SlotSpec(), "third")
        with pytest.raises(ConfigError, match="has its 3 slots already"):
            await pool.add(first, 5, SlotSpec(), "fourth")
        await pool.seal(first)
        with pytest.raises(SandboxError):
            await second.execute("true")
        with pytest.raises(SandboxError, match="has ended"):
            await pool.add(first, 5, SlotSpec(), "fourth")
        await pool.release(await behind)
        assert (pool.available_slots, pool.acquired_slots) == (3, 0)


async def test_a_place_that_no_member_uses_is_lent() -> None:
    async with SlotPool(SlotPoolConfig(max_slots=3), LocalBackend()) as pool:
        first = await pool.acquire("group", spec=member("", 2, 3))
        second = await pool.add(first, 3, SlotSpec(), "second")
        await serve(second)
        for _ in range(2):
            beside = await pool.add(first, None, SlotSpec(), "beside")
            assert await ask(beside, "198.19.0.3", "80") == ["OSError"], "it is not in the group's network"
            with raises(AcquireTimeout):
                await pool.add(first, None, SlotSpec(), "another")
            await pool.release(beside)
        await pool.seal(await pool.add(first, None, SlotSpec(), "sealed"))
        assert pool.available_slots == 0
        assert await ask(first, "198.19.0.3", "80") == ["hello"]
        left = await pool.add(first, None, SlotSpec(), "left")
        await pool.release(first)
        with pytest.raises(SandboxError):
            await left.execute("true")
        await pool.release(left)
        with pytest.raises(AcquireTimeout):
            await pool.add(first, None, SlotSpec(), "late")
        assert (pool.available_slots, pool.acquired_slots) == (3, 0)
        assert pool.backend.stats()["slots"] == 0
