"""The network that is off: nothing answers, nothing is resolved, and no socket of the host's is in reach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator

import pytest

from abuse.arena import Arena, python
from palaestra.core.types import Network
from palaestra.sandbox.slot import Rung, Slot, SlotSpec
from palaestra.sandbox.slotd.namespaced import cgroups

pytestmark = [pytest.mark.slots, pytest.mark.long]


@contextlib.contextmanager
def listening() -> Iterator[tuple[int, int, str]]:
    """Something to reach on the host: a TCP and a UDP port of its loopback, and an abstract socket."""
    name = f"abuse-{id(object())}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        abstract.bind(f"\0{name}")
        abstract.listen()
        yield tcp.getsockname()[1], udp.getsockname()[1], name
        with pytest.raises(BlockingIOError):
            udp.recv(100)


@pytest.mark.contained_on("full", "userns", "confined")
def test_nothing_outside_is_reached(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        with listening() as (tcp, udp, name):
            program = f"""
import socket
for family, address in ((2, ('127.0.0.1', {tcp})), (2, ('169.254.169.254', 80)), (2, ('8.8.8.8', 53)),
                        (10, ('::1', {tcp})), (1, '\\0{name}')):
    try:
        with socket.socket(family) as s:
            s.settimeout(2)
            s.connect(address)
            print('reached', address)
    except OSError: pass
for address in (('127.0.0.1', {udp}), ('169.254.169.254', 53), ('255.255.255.255', 67)):
    try:
        with socket.socket(2, 2) as s: s.sendto(b'x', address)
    except OSError: pass
try: print(socket.getaddrinfo('example.com', 80))
except OSError: pass
"""
            assert (await python(slot, program)).output == ""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_no_interface_can_be_made(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        for command in ("ip link add d type dummy", "ip addr add 10.0.0.1/8 dev lo", "ip route add default dev lo"):
            assert not (await slot.execute(command)).success
        raw = "import socket\nfor k in (3,):\n  try: socket.socket(2, k, 1); print('raw')\n  except OSError: pass"
        assert (await python(slot, raw)).output == ""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_names_of_sockets_are_not_shared_between_slots(arena: Arena) -> None:
    """The second slot can take the name that the first one has, or no slot can take a name."""
    bind = """
import socket, time
try:
    with socket.socket(socket.AF_UNIX) as s:
        s.bind('\\0abuse-shared'); print('bound', flush=True); time.sleep(1)
except OSError as error: print(error.errno)
"""

    async def case(slot: Slot) -> None:
        other = await arena.backend.create(SlotSpec(), "other")
        bound = asyncio.Event()
        holding = asyncio.ensure_future(slot.execute(["python3", "-c", bind], on_output=lambda data: bound.set()))
        await asyncio.wait_for(bound.wait(), 10)
        taken, held = await python(other, bind), await holding
        if arena.ground.rung is Rung.CONFINED:
            assert (taken.output, held.output) == ("97\n", "97\n")
        else:
            assert (taken.output, held.output) == ("bound\n", "bound\n")
        await arena.backend.destroy(other)

    arena.face(case)


@pytest.mark.contained_on("full")
def test_metadata_addresses_are_refused_with_the_network_on(arena: Arena) -> None:
    """To connect a datagram socket is to ask the kernel only, so nothing is sent where nothing is refused."""
    refused = ("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254")
    program = f"""
import socket
def tried(address, port, send=False):
    with socket.socket(10 if ':' in address else 2, 2) as s:
        try: return s.sendto(b'', (address, port)) if send else s.connect((address, port))
        except OSError as error: return error.errno
for address in {refused!r}:
    if tried(address, 80) != 1: print(address)
    if tried(address, 53) == 1: print('resolver', address)
if tried('100.100.100.201', 80) == 1: print('neighbour')
if tried('127.0.0.1', 80): print('loopback')
if tried('::ffff:169.254.169.254', 80, send=True) != 1: print('mapped')
"""

    async def case(hostile: Slot) -> None:
        online = await arena.backend.create(SlotSpec(network=Network.ON), "online")
        try:
            guarded = arena.contained and any(hierarchy.version == 2 for hierarchy in cgroups.find())
            if guarded:
                assert (await python(online, program)).output == ""
            else:
                assert (await python(online, program.partition("if tried('::ffff")[0])).output.startswith(refused[0])
        finally:
            await arena.backend.destroy(online)

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_services_with_a_path_are_out_of_reach(arena: Arena) -> None:
    """A socket of the host that everybody may write to, by its path, by a link to it, and by another root."""
    place = tempfile.mkdtemp(dir="/var/tmp")
    os.chmod(place, 0o755)
    program = f"""
import os, socket
os.symlink({place!r}, 'there')
for path in ({place!r} + '/s', 'there/s', '/proc/self/root' + {place!r} + '/s', '/proc/1/root' + {place!r} + '/s'):
    try: socket.socket(socket.AF_UNIX).connect(path); print('reached', path)
    except OSError: pass
try: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', '/dev/log'); print('logged')
except OSError: pass
left, right = socket.socketpair()
left.send(b'pair')
print(right.recv(9))
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == "b'pair'\n"

    with socket.socket(socket.AF_UNIX) as service:
        service.bind(f"{place}/s")
        os.chmod(f"{place}/s", 0o777)
        service.listen()
        try:
            arena.face(case)
        finally:
            shutil.rmtree(place)


@pytest.mark.contained_on("full", "userns", "confined")
def test_accounts_of_the_host_are_out_of_reach(arena: Arena) -> None:
    """A slot with namespaces has three accounts and a name of its own, one without has none."""
    program = """
import pwd
for path in ('/etc/passwd-', '/etc/shadow', '/etc/subuid', '/etc/sudoers', '/etc/ssh/sshd_config', '/etc/machine-id',
             '/etc/fstab', '/etc/crontab', '/etc/pam.d/su', '/etc/gitconfig'):
    try: print(path, len(open(path).read()))
    except OSError: pass
print(len(pwd.getpwall()))
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output in ("0\n", "3\n")

    arena.face(case)
