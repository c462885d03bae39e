"""Network namespaces that a later slot gets from a dead one: what the first slot did there never shows in the next."""

from __future__ import annotations

import os

import pytest

from palaestra_slots.core.types import AllowList
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot, SlotSpec
from palaestra_slots.sandbox.slotd.namespaced.namespaces import is_real_root
from sandbox.bodies import WithSlot

pytestmark = [
    pytest.mark.slots,
    pytest.mark.skipif(not is_real_root(), reason="only a server of root keeps network namespaces"),
]

NAMES = "dev snmp snmp6 netstat ip6_flowlabel igmp igmp6 tcp tcp6 udp udp6 raw icmp unix route ipv6_route if_inet6 arp"
LOOK = f"cd /proc/net; for name in {NAMES}; do echo == $name; cat $name 2>/dev/null; done; head -1 sockstat"

LEAVES_TRACES = {
    "datagram": "s = socket.socket(2, 2); s.sendto(b'x', ('127.0.0.1', 9))",
    "datagram over IPv6": "s = socket.socket(10, 2); s.sendto(b'x', ('::1', 9))",
    "connection that waits": """
l = socket.create_server(('127.0.0.1', 4000)); c = socket.create_connection(('127.0.0.1', 4000)); a = l.accept()[0]
c.close(); a.close(); l.close()""",
    "no route": """
try: socket.create_connection(('10.9.8.7', 80), 1)
except OSError: pass""",
    "member of a multicast group": """
import time
def counters(): return open('/proc/net/snmp').read()
s, before, end = socket.socket(2, 2), counters(), time.monotonic() + 10
s.setsockopt(0, 35, socket.inet_aton('224.0.0.9') + socket.inet_aton('127.0.0.1'))
while counters() == before and time.monotonic() < end: time.sleep(0.01)  # the kernel reports it after a random time""",
    "flow label": """
import struct
s = socket.socket(10, 2)
s.setsockopt(41, 32, struct.pack('=16sIBBHHHI', b'\\0' * 15 + b'\\1', socket.htonl(0x1234), 0, 1, 1, 0, 60, 0))""",
}
"""Programs whose traces in the namespace outlive them. Source of the flow label's struct: linux/in6.h."""

LEAVES_NOTHING = {
    "nothing": "",
    "listeners": """
a = socket.create_server(('127.0.0.1', 4000)); b = socket.socket(1); b.bind('\\0name'); b.listen()
c = socket.socket(2, 2); c.bind(('', 4000)); os.kill(os.getpid(), 9)""",
}
"""Programs that use sockets without a trace after their end."""

FORBIDDEN = """
import fcntl, struct
s = socket.socket(2, 2)
tries = [
    lambda: fcntl.ioctl(s, 0x8914, struct.pack('16sH22x', b'lo', 0)),
    lambda: fcntl.ioctl(s, 0x8916, struct.pack('16sHH4s8x', b'lo', 2, 0, bytes([127, 0, 0, 2]))),
    lambda: fcntl.ioctl(s, 0x890b, bytes(120)),
    lambda: open('/proc/sys/net/ipv4/ip_local_port_range', 'w').write('2000 3000'),
    lambda: open('/proc/sys/net/core/somaxconn', 'w').write('7'),
    lambda: socket.socket(17, 3),
]
for number, attempt in enumerate(tries):
    try: attempt()
    except OSError: pass
    else: print('worked', number)
"""


async def _namespace(slot: Slot) -> str:
    return (await slot.execute(["readlink", "/proc/self/ns/net"])).output


async def _play(slot: Slot, program: str) -> str:
    return (await slot.execute(["python3", "-c", f"import os, socket\n{program}"])).output


async def _next(backend: LocalBackend, slot: Slot) -> Slot:
    await backend.destroy(slot)
    return await backend.create(SlotSpec(), "next")


@pytest.mark.parametrize("program", LEAVES_TRACES.values(), ids=LEAVES_TRACES.keys())
def test_a_used_namespace_is_not_used_again(on_each_rung: WithSlot, program: str) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        unused = (await slot.execute(LOOK)).output
        assert await _play(slot, program) == ""
        assert (await slot.execute(LOOK)).output != unused
        after = await _next(backend, slot)
        assert (await after.execute(LOOK)).output == unused

    on_each_rung(body)


@pytest.mark.parametrize("program", LEAVES_NOTHING.values(), ids=LEAVES_NOTHING.keys())
def test_a_namespace_in_which_nothing_was_sent_is_used_again_and_is_as_new(
    on_each_rung: WithSlot, program: str
) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        unused, before = (await slot.execute(LOOK)).output, await _namespace(slot)
        await _play(slot, program)
        after = await _next(backend, slot)
        assert await _namespace(after) == before
        assert (await after.execute(LOOK)).output == unused
        assert await _play(after, "socket.create_server(('', 4000)); print('listens')") == "listens\n"

    on_each_rung(body)


def test_sockets_that_pass_each_other_are_not_handed_on(on_each_rung: WithSlot) -> None:
    """The kernel frees sockets that wait in each other's queues later than their processes."""
    program = """
import array
a, b = socket.socketpair()
l = socket.create_server(('127.0.0.1', 4000))
fds = array.array('i', [a.fileno(), b.fileno(), l.fileno()])
a.sendmsg([b'x'], [(1, 1, fds)]); b.sendmsg([b'x'], [(1, 1, fds)])"""

    async def body(backend: LocalBackend, slot: Slot) -> None:
        unused = (await slot.execute(LOOK)).output
        await _play(slot, program)
        after = await _next(backend, slot)
        assert (await after.execute(LOOK)).output == unused

    on_each_rung(body)


def test_a_slot_cannot_configure_its_namespace(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert await _play(slot, FORBIDDEN) == ""

    on_each_rung(body)


def test_live_slots_have_separate_namespaces(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        host = os.readlink("/proc/self/ns/net") + "\n"
        for _ in range(2):
            slots = [await backend.create(SlotSpec(), f"live {number}") for number in range(6)]
            found = {await _namespace(each) for each in [slot, *slots]}
            assert len(found) == 7
            assert host not in found
            for each in slots:
                await backend.destroy(each)

    on_each_rung(body)


def test_slots_with_a_list_of_hosts_neither_get_nor_leave_a_namespace(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        before = await _namespace(slot)
        await backend.destroy(slot)
        connected = await backend.create(SlotSpec(network=AllowList(("example.org",))), "connected")
        between = await _namespace(connected)
        after = await _next(backend, connected)
        assert between != before
        assert await _namespace(after) == before

    on_each_rung(body)
