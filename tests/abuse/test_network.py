"""The network that is off: nothing answers, nothing is resolved, and no socket of the host's is in reach."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator

import pytest

from abuse.arena import Arena, python, running
from palaestra_slots.core.types import Network
from palaestra_slots.sandbox.slot import Rung, Slot

pytestmark = [pytest.mark.slots, pytest.mark.slow]


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
        async with arena.another() as other, running(slot, bind) as holding:
            taken, held = await python(other, bind), await holding
        if arena.ground.rung is Rung.CONFINED:
            assert (taken.output, held.output) == ("97\n", "97\n")
        else:
            assert (taken.output, held.output) == ("bound\n", "bound\n")

    arena.face(case)


@contextlib.contextmanager
def _everywhere(family: int) -> Iterator[socket.socket]:
    """A service on all addresses of the host."""
    with socket.socket(family) as service:
        service.bind(("", 0))
        service.listen()
        yield service


def _holds(arena: Arena) -> bool:
    """Whether slots with the network on must have one of their own here: where not, the run prints a warning."""
    return arena.contained and os.access("/dev/net/tun", os.R_OK | os.W_OK)


def _own_address() -> str:
    """An address of this host that other machines reach; the loopback's if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@pytest.mark.contained_on("full", "userns")
def test_the_host_is_out_of_reach_with_the_network_on(arena: Arena) -> None:
    """Its loopback, by every spelling, its other addresses, abstract sockets, and datagrams."""

    async def case(slot: Slot) -> None:
        with listening() as (tcp, _, name), _everywhere(socket.AF_INET6) as everywhere:
            port = everywhere.getsockname()[1]
            program = f"""
import socket
places = [(2, (host, port)) for port in ({tcp}, {port}) for host in
          ('127.0.0.1', '127.8.8.8', '0.0.0.0', '127.1', '198.18.0.2', {_own_address()!r}, '255.255.255.255')]
places += [(10, (host, port)) for port in ({tcp}, {port}) for host in
           ('::1', '::', '::ffff:127.0.0.1', '::127.0.0.1', '64:ff9b::7f00:1', '2002:7f00:1::', 'fdc6:1200::2')]
for family, address in [*places, (1, '\\0{name}')]:
    try:
        with socket.socket(family) as s:
            s.settimeout(2)
            s.connect(address)
            print('reached', address)
    except OSError: pass
"""
            async with arena.another(network=Network.ON) as online:
                found = (await python(online, program, timeout_s=90)).output
            assert (found == "") == _holds(arena), found

    arena.face(case)


@pytest.mark.contained_on("full", "userns")
def test_datagrams_do_not_reach_the_host_with_the_network_on(arena: Arena) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as service:
        service.bind(("", 0))
        service.settimeout(0.5)
        port = service.getsockname()[1]
        program = f"""
import socket
for host in ('127.0.0.1', '127.8.8.8', '0.0.0.0', '198.18.0.2', {_own_address()!r}):
    with socket.socket(2, 2) as s:
        try: s.sendto(b'hostile', (host, {port}))
        except OSError: pass  # a container without a network
"""

        async def case(slot: Slot) -> None:
            async with arena.another(network=Network.ON) as online:
                assert (await python(online, program)).output == ""

        arena.face(case)
        try:
            reached = service.recv(100) == b"hostile"
        except TimeoutError:
            reached = False
        assert reached != _holds(arena)


@pytest.mark.contained_on("full", "userns")
def test_slots_with_the_network_on_do_not_reach_each_other(arena: Arena) -> None:
    """Neither ports, nor abstract names, nor the tunnel's own sockets."""
    serve = """
import socket
kept = [socket.create_server(('', 5000)), socket.socket(socket.AF_UNIX)]
kept[1].bind('\\0abuse-online'); kept[1].listen()
print('ready', flush=True)
import time; time.sleep(10)
"""
    ask = """
import re, socket
lines = [line.split() for line in open('/proc/net/tcp').readlines()[1:]]
local = {int(line[1].split(':')[1], 16) for line in lines if line[3] == '0A'}
for host in ('127.0.0.1', '198.18.0.1', '198.18.0.2', '0.0.0.0'):
    for port in (5000, *local):
        try:
            with socket.create_connection((host, port), 2) as s:
                if port == 5000: print('reached', host, port)
                s.settimeout(0.5)
                if s.recv(1): print('answered', host, port)
        except OSError: pass
try: socket.socket(socket.AF_UNIX).connect('\\0abuse-online'); print('name')
except OSError: pass
"""

    async def case(slot: Slot) -> None:
        on = Network.ON
        async with arena.another(network=on) as one, arena.another(network=on) as two, running(one, serve):
            assert ((await python(two, ask)).output == "") == _holds(arena)

    if arena.ground.rung is Rung.CONFINED:
        serve = serve.replace(", socket.socket(socket.AF_UNIX)", "").replace("kept[1]", "#")
    arena.face(case)


@pytest.mark.contained_on("full", "userns")
def test_a_flood_of_packets_leaves_the_neighbour_its_network(arena: Arena) -> None:
    """Datagrams to everywhere, and connections that nobody answers; the addresses are those of documentation."""
    flood = """
import os, random, socket, time
end = time.time() + 5
for _ in range(6):
    if os.fork() == 0:
        with socket.socket(2, 2) as s:
            while time.time() < end:
                try: s.sendto(bytes(1400), (f'198.51.100.{random.randrange(1, 255)}', 9))
                except OSError: pass
        os._exit(0)
print('begun', flush=True)
kept = []
while time.time() < end:
    s = socket.socket()
    s.setblocking(False)
    try: s.connect((f'198.51.100.{random.randrange(1, 255)}', 80))
    except OSError: pass
    kept = [*kept[-30:], s]
"""
    ask = """
import socket, time
begun = time.time()
for _ in range(5):
    try: socket.create_connection(('198.18.0.2', 1), 10)
    except ConnectionRefusedError: pass
print(time.time() - begun < 5)
"""

    async def case(slot: Slot) -> None:
        if not _holds(arena):  # the flood would be the machine's
            return
        on = Network.ON
        async with arena.another(network=on) as one, arena.another(network=on) as two, running(one, flood) as flooding:
            assert (await python(two, ask)).output == "True\n"
            await flooding

    arena.face(case)


@pytest.mark.contained_on("full", "userns")
def test_metadata_addresses_are_refused_with_the_network_on(arena: Arena) -> None:
    refused = ("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254",
               "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe")  # fmt: skip
    program = f"""
import errno, socket
for address in {refused!r}:
    with socket.socket(10 if ':' in address else 2) as s:
        s.settimeout(3)
        try: s.connect((address, 80)); print('reached', address)
        except TimeoutError: print('tried', address)
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.EPERM, errno.ENETUNREACH): print(address, error)
"""

    async def case(hostile: Slot) -> None:
        if not _holds(arena):  # the attack would leave this machine
            return
        async with arena.another(network=Network.ON) as online:
            assert (await python(online, program)).output == ""

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
def connected(one, path): one.connect(path); one.send(b'x')
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, socket.SOCK_SEQPACKET):
    for send in (connected, lambda one, path: one.sendto(b'x', path)):
        try: send(socket.socketpair(socket.AF_UNIX, kind)[0], {place!r} + '/d')
        except OSError: pass
left, right = socket.socketpair()
left.send(b'pair')
print(right.recv(9))
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == "b'pair'\n"
        with pytest.raises(BlockingIOError):
            datagrams.recv(9)

    with socket.socket(socket.AF_UNIX) as service, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        for name, each in (("s", service), ("d", datagrams)):
            each.bind(f"{place}/{name}")
            os.chmod(f"{place}/{name}", 0o777)
        service.listen()
        datagrams.setblocking(False)
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
