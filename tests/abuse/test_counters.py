"""What the kernel counts per user: a slot that takes all it can get leaves the neighbour and the host theirs."""

from __future__ import annotations

import ctypes
import os
import platform

import pytest

from abuse.arena import Arena, python, running
from palaestra_slots.core.types import Limits
from palaestra_slots.sandbox.slot import Rung, Slot

pytestmark = [pytest.mark.slots, pytest.mark.slow]

X86_ONLY = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")

# Takes instances in many processes, so that no limit of one process is in the way; holds them until it is killed.
_HOG = """
import ctypes, os, sys, time
c = ctypes.CDLL(None, use_errno=True)
for _ in range(12):
    if os.fork() == 0:
        while True:
            if c.inotify_init1(0) < 0: break
        while True: time.sleep(60)
time.sleep(1)
print('full', flush=True)
time.sleep(60)
"""

_WATCHES = """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
print(sum(c.inotify_init1(0) >= 0 for _ in range(16)))
"""


async def _while_hogged(arena: Arena, hostile: Slot, hog: str, then: str) -> str:
    """What a program prints in a neighbour while a hostile slot takes all it can get."""
    async with arena.another() as other, running(hostile, hog, timeout_s=20):
        return (await python(other, then)).output


@pytest.mark.contained_on("full", "userns", "confined")
def test_inotify_instances(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        assert await _while_hogged(arena, slot, _HOG, _WATCHES) == "16\n"
        libc = ctypes.CDLL(None)
        made = [libc.inotify_init1(0) for _ in range(8)]
        for fd in made:
            os.close(fd)
        assert min(made) >= 0

    arena.face(case)


@pytest.mark.contained_on("full")
def test_queued_signals(arena: Arena) -> None:
    """Each timer takes one of the signals that its user may have queued."""
    hog = """
import ctypes, os, time
c = ctypes.CDLL(None, use_errno=True)
for _ in range(4):
    if os.fork() == 0:
        timer = ctypes.c_int()
        while c.syscall(222, 1, None, ctypes.byref(timer)) == 0: pass
        while True: time.sleep(60)
time.sleep(3)
print('full', flush=True)
time.sleep(60)
"""
    timers = """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
timer = ctypes.c_int()
print(sum(c.syscall(222, 1, None, ctypes.byref(timer)) == 0 for _ in range(32)))
"""

    async def case(slot: Slot) -> None:
        if arena.contained:
            assert await _while_hogged(arena, slot, hog, timers) == "32\n"

    arena.face(case, memory_bytes=512 << 20)


@X86_ONLY
@pytest.mark.contained_on("full", "userns", "confined")
def test_queues_asynchronous_calls_keys_and_pipes_are_refused(arena: Arena) -> None:
    program = """
import ctypes, fcntl, os
c = ctypes.CDLL(None, use_errno=True)
if c.syscall(240, b'abuse', os.O_CREAT | os.O_RDWR, 0o600, None) >= 0: print('queue')
if c.syscall(206, 1024, ctypes.byref(ctypes.c_ulong())) >= 0: print('aio')
for call in (248, 249, 250):
    if c.syscall(call, b'user', b'abuse', b'x', 1, -2) >= 0: print('key', call)
reader, writer = os.pipe()
for fd in (reader, writer, 1):
    try: fcntl.fcntl(fd, 1031, 1 << 20); print('pipe', fd)
    except OSError as error: assert error.errno in (1, 9), error
if c.syscall(447, 0) >= 0: print('secret memory')
if c.syscall(300, 0, 0) >= 0: print('fanotify')
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == ""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_processes_and_sockets(arena: Arena) -> None:
    hog = """
import os, socket, time
for _ in range(12):
    if os.fork() == 0:
        held = []
        try:
            while True: held.append(socket.socketpair(socket.AF_UNIX))
        except OSError: pass
        while True: time.sleep(60)
try:
    while os.fork(): pass
except OSError: print('full', flush=True)
time.sleep(60)
"""
    use = """
import os, socket
pairs = [socket.socketpair() for _ in range(64)]
for _ in range(16):
    if os.fork() == 0: os._exit(0)
left, right = pairs[0]
socket.send_fds(left, [b'x'], [2] * 8)
print(len(pairs), len(socket.recv_fds(right, 1, 8)[1]))
"""

    async def case(slot: Slot) -> None:
        assert await _while_hogged(arena, slot, hog, use) == "64 8\n"

    arena.face(case)


@pytest.mark.contained_on("full", "userns")
def test_pipes_of_a_neighbour_still_work(arena: Arena) -> None:
    """The pages of pipes are counted per user, and slots share one: a neighbour's pipes get small, and no less."""
    hog = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        held = []
        try:
            while True: held.append(os.pipe())
        except OSError: pass
        while True: time.sleep(60)
time.sleep(1)
print('full', flush=True)
time.sleep(60)
"""
    use = "import os; r, w = os.pipe(); os.write(w, b'x' * 4096); print(len(os.read(r, 8192)))"

    async def case(slot: Slot) -> None:
        assert await _while_hogged(arena, slot, hog, use) == "4096\n"

    arena.face(case)


@pytest.mark.contained_on("full", "userns")
def test_terminals(arena: Arena) -> None:
    """The kernel has one number of terminals for the whole machine."""
    hog = """
import os, time
for _ in range(40):
    if os.fork() == 0:
        held = []
        try:
            while True: held.append(os.open('/dev/ptmx', os.O_RDWR))
        except OSError: pass
        while True: time.sleep(60)
time.sleep(2)
print('full', flush=True)
time.sleep(60)
"""
    use = "import os; print(len([os.openpty() for _ in range(16)]))"

    async def case(slot: Slot) -> None:
        few = Limits(open_files=256)
        async with (
            arena.another(limits=few) as one,
            arena.another(limits=few) as two,
            running(one, hog),
            running(two, hog),
        ):
            found = (await python(slot, use)).output
        assert (found == "16\n") == arena.contained

    arena.face(case)


@pytest.mark.contained_on("full")
def test_watches(arena: Arena) -> None:
    """Inotify watches: on `userns` without root, the user's are all slots'."""
    hog = """
import ctypes, os, time
c = ctypes.CDLL(None)
for n in range(4000): os.mkdir(f'/tmp/{n}')
for _ in range(24):
    if os.fork() == 0:
        fd = c.inotify_init1(0)
        for n in range(4000): c.inotify_add_watch(fd, b'/tmp/%d' % n, 2)
        while True: time.sleep(60)
time.sleep(3)
print('full', flush=True)
time.sleep(60)
"""
    use = """
import ctypes, os
c = ctypes.CDLL(None)
fd = c.inotify_init1(0)
for n in range(100): os.mkdir(f'/tmp/{n}')
print(sum(c.inotify_add_watch(fd, b'/tmp/%d' % n, 2) >= 0 for n in range(100)))
"""

    async def case(slot: Slot) -> None:
        if arena.contained:
            assert await _while_hogged(arena, slot, hog, use) == "100\n"

    arena.face(case, memory_bytes=1 << 30)


@pytest.mark.contained_on("full", "userns", "confined")
def test_locks_and_leases_and_descriptors_of_events(arena: Arena) -> None:
    """Record locks, leases, dnotify, timers, epoll instances: all that a slot's processes may hold."""
    hog = """
import fcntl, os, select, struct, time
for child in range(16):
    if os.fork() == 0:
        path = f"{os.environ.get('TMPDIR', '/tmp')}/{child}"
        fd = os.open(path, os.O_CREAT | os.O_RDWR)
        held = []
        try:
            for n in range(20000): fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2 * n)
        except OSError: pass
        try:
            while True: held.append(select.epoll())
        except OSError: pass
        while True: time.sleep(60)
time.sleep(2)
print('full', flush=True)
time.sleep(60)
"""
    use = """
import fcntl, os, select
fd = os.open('mine', os.O_CREAT | os.O_RDWR)
for n in range(1000): fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2 * n)
polls = [select.epoll() for _ in range(16)]
for each in polls: each.register(0, select.EPOLLIN)
print(len(polls))
"""

    async def case(slot: Slot) -> None:
        assert await _while_hogged(arena, slot, hog, use.replace("register(0", "register(os.pipe()[0]")) == "16\n"

    arena.face(case, memory_bytes=512 << 20)


@X86_ONLY
@pytest.mark.contained_on("full", "userns", "confined")
def test_huge_pages_are_refused(arena: Arena) -> None:
    """They come from one pool of the machine, and no limit of a slot counts them."""
    program = """
import ctypes, errno, mmap
c = ctypes.CDLL(None, use_errno=True)
c.mmap.restype = ctypes.c_void_p
if c.syscall(319, b'abuse', 4) >= 0: print('a file of huge pages')
if c.syscall(319, b'abuse', 4 | 21 << 26) >= 0: print('a file of huge pages of a size')
if c.syscall(319, b'plain', 0) < 0: print('no file of pages')
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000
if c.mmap(None, 2 << 20, 3, flags, -1, 0) != 2**64 - 1: print('mapped')
if c.syscall(29, 0, 2 << 20, 0o5600) >= 0: print('a segment of huge pages')
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == ""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_segments_and_semaphores(arena: Arena) -> None:
    """The kernel has one number of System V objects for each namespace, and they outlive their process."""
    hog = """
import ctypes, time
c = ctypes.CDLL(None)
for _ in range(5000):
    if c.shmget(0, 4096, 0o1666) < 0: break
for _ in range(33000):
    if c.semget(0, 1, 0o1666) < 0: break
print('full', flush=True)
time.sleep(60)
"""
    use = "import ctypes; c = ctypes.CDLL(None); print(sum(c.shmget(0, 4096, 0o1600) >= 0 for _ in range(16)))"

    async def case(slot: Slot) -> None:
        libc = ctypes.CDLL(None)
        expected = "0\n" if arena.ground.rung is Rung.CONFINED else "16\n"
        assert await _while_hogged(arena, slot, hog, use) == expected
        made = libc.shmget(0, 4096, 0o1600)
        assert made >= 0
        assert libc.shmctl(made, 0, None) == 0

    arena.face(case, memory_bytes=256 << 20)
