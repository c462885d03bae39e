"""What outlives a slot, or is shared with neighbours, without being a file: page cache, locks, watches, times."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from abuse.arena import Arena, python, running
from palaestra_slots.sandbox.slot import Slot

pytestmark = [pytest.mark.slots, pytest.mark.slow]

PREFIX = os.path.realpath(sys.base_prefix)
SHARED = os.path.join(PREFIX, os.path.relpath(os.path.realpath(os.__file__), PREFIX))  # a file of the interpreter
MOUNTED = pytest.mark.skipif(PREFIX.startswith("/usr"), reason="the interpreter is in /usr, so it is not mounted")
X86_ONLY = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")


_LOCK = """
import fcntl, os, sys, time
for path in sys.argv[2:]:
    try: fd = os.open(path, os.O_RDONLY)
    except PermissionError: continue
    try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError: print('locked', path)
print('done', flush=True)
time.sleep(float(sys.argv[1]))
"""

_WATCH = """
import ctypes, os, select, sys
c = ctypes.CDLL(None)
fd = c.inotify_init1(0)
for path in sys.argv[1:]: c.inotify_add_watch(fd, path.encode(), 0x3b)
print('ready', flush=True)
print(len(os.read(fd, 65536)) if select.select([fd], [], [], 1.5)[0] else 'nothing')
"""


async def _try_locks(arena: Arena, slot: Slot, *paths: str) -> None:
    """Lock files in two slots at the same time."""
    async with arena.another() as other, running(slot, _LOCK, "2", *paths) as holding:
        found = (await other.execute(["python3", "-c", _LOCK, "0", *paths])).output
        assert (await holding).output == "done\n"
    assert (found == "done\n") == arena.contained


@X86_ONLY
@pytest.mark.contained_on("full", "userns", "confined")
def test_the_page_cache_cannot_be_asked(arena: Arena) -> None:
    """Which pages of a shared file are in memory is readable memory that outlives the slot."""
    program = f"""
import ctypes, os
c = ctypes.CDLL(None, use_errno=True)
try: fd = os.open({SHARED!r}, os.O_RDONLY)
except PermissionError: fd = os.open('/usr/bin/env', os.O_RDONLY)
c.mmap.restype = ctypes.c_void_p
address = ctypes.c_void_p(c.mmap(None, ctypes.c_size_t(8192), 1, 1, fd, ctypes.c_long(0)))
seen = ctypes.create_string_buffer(64)
size = ctypes.c_size_t(8192)
span = (ctypes.c_uint64 * 2)(0, 8192)
vector = (ctypes.c_uint64 * 2)(ctypes.addressof(seen), 16)
tries = dict(
    mincore=lambda: c.syscall(27, address, size, seen),
    cachestat=lambda: c.syscall(451, fd, span, seen, 0),
    read_if_cached=lambda: c.syscall(327, fd, vector, 1, ctypes.c_long(0), ctypes.c_long(0), 8),
    drop=lambda: c.syscall(221, fd, ctypes.c_long(0), size, 4),
    fill=lambda: c.syscall(221, fd, ctypes.c_long(0), size, 3),
    readahead=lambda: c.syscall(187, fd, ctypes.c_long(0), size),
    page_out=lambda: c.syscall(28, address, size, 21),
    cold=lambda: c.syscall(28, address, size, 20),
    of_a_process=lambda: c.syscall(440, os.pidfd_open(os.getpid()), vector, ctypes.c_size_t(1), 21, 0),
    asynchronously=lambda: c.syscall(206, 8, seen),
)
for name, attempt in tries.items():
    if attempt() >= 0: print(name)
try: os.preadv(fd, [bytearray(16)], 0, os.RWF_NOWAIT); print('preadv')
except OSError: pass
print(os.preadv(fd, [bytearray(16)], 0), c.syscall(28, address, size, 4))
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == "16 0\n"

    arena.face(case)


@MOUNTED
@pytest.mark.contained_on("full", "userns", "confined")
def test_the_interpreter_belongs_to_nobody_inside(arena: Arena) -> None:
    """Its owner may ask the kernel more about a file: leases, reads that leave no time."""
    program = f"""
import fcntl, os
try: owner = os.stat({SHARED!r}).st_uid
except PermissionError: raise SystemExit  # on confined, which shows only system directories
if owner == os.getuid(): print('owned')
try: os.open({SHARED!r}, os.O_RDONLY | os.O_NOATIME); print('quiet')
except PermissionError: pass
try: fcntl.fcntl(os.open({SHARED!r}, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK); print('leased')
except OSError: pass
"""

    async def case(slot: Slot) -> None:
        assert ((await python(slot, program)).output == "") == arena.contained

    arena.face(case)


@MOUNTED
@pytest.mark.contained_on("full", "userns")
def test_a_lock_on_a_shared_file_is_the_slots_own(arena: Arena) -> None:

    async def case(slot: Slot) -> None:
        await _try_locks(arena, slot, SHARED, PREFIX, "/usr/bin/env", "/etc/passwd", "/usr")

    arena.face(case)


@MOUNTED
@pytest.mark.contained_on("full", "userns")
def test_a_watch_sees_no_other_slot(arena: Arena) -> None:
    """Neither does it see what the host reads."""
    watched = (PREFIX, os.path.dirname(SHARED), SHARED, "/usr/bin", "/usr/bin/env", "/etc")

    async def case(slot: Slot) -> None:
        async with arena.another() as other, running(slot, _WATCH, *watched) as watching:
            Path(SHARED).read_bytes()
            await other.execute(["cat", SHARED, "/usr/bin/env", "/etc/passwd"])
            await other.execute(["ls", PREFIX, "/usr/bin"])
            seen = (await watching).output
        assert (seen == "ready\nnothing\n") == arena.contained

    arena.face(case)


@pytest.mark.contained_on("full", "userns")
def test_a_read_leaves_no_time(arena: Arena) -> None:
    """Older than a day, so that a read would renew it."""
    before = os.stat(SHARED)
    if os.access(SHARED, os.W_OK):
        os.utime(SHARED, ns=(before.st_atime_ns - 7 * 86400 * 10**9, before.st_mtime_ns))
    aged = os.stat(SHARED).st_atime_ns

    async def case(slot: Slot) -> None:
        assert (await slot.execute(["cat", SHARED])).success or not arena.contained

    arena.face(case)
    if arena.contained:
        assert os.stat(SHARED).st_atime_ns == aged


@pytest.mark.contained_on("full", "userns")
def test_counters_of_the_machine_are_hidden(arena: Arena) -> None:
    paths = ("vmstat", "diskstats", "locks", "pressure/memory", "pressure/io", "sys/fs/file-nr", "sys/fs/inode-nr",
             "sys/fs/inode-state", "sys/fs/dentry-state", "slabinfo", "keys", "key-users", "interrupts", "timer_list",
             "cgroups", "pagetypeinfo", "kpagecount", "kpageflags", "vmallocinfo", "kmsg", "kcore")  # fmt: skip
    read = "cat " + " ".join(paths)
    write = "find bus fs irq -type f -perm /222 -exec sh -c ': >> $0 && echo $0' {} \\;"

    async def case(slot: Slot) -> None:
        found = await slot.execute(f"cd /proc; {{ {read}; {write}; }} 2>/dev/null")
        assert (found.output == "") == arena.contained

    arena.face(case)


DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev")


@pytest.mark.contained_on("full", "userns")
def test_a_lock_on_a_device_is_the_slots_own(arena: Arena) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root, a slot's devices are the host's")

    async def case(slot: Slot) -> None:
        await _try_locks(arena, slot, *DEVICES)

    arena.face(case)


@pytest.mark.contained_on("full", "userns")
def test_a_watch_on_a_device_sees_no_other_slot(arena: Arena) -> None:
    """Every program opens /dev/null, so a watch on the host's would show when others work."""
    if os.geteuid() != 0:
        pytest.skip("without root, a slot's devices are the host's")

    async def case(slot: Slot) -> None:
        async with arena.another() as other, running(slot, _WATCH, *DEVICES) as watching:
            for _ in range(3):
                Path("/dev/null").write_text("x")
                await other.execute("head -c 9 /dev/urandom > /dev/null; ls -l /dev")
            seen = (await watching).output
        assert (seen == "ready\nnothing\n") == arena.contained

    arena.face(case)


@pytest.mark.contained_on("full", "userns")
def test_no_number_of_proc_counts_what_other_slots_do(arena: Arena) -> None:
    """Open files, pipes, terminals, AIO, quota, allocations: read before and after a neighbour takes many."""
    read = """
import os
for place, folders, files in os.walk('/proc/sys'):
    if place.startswith('/proc/sys/net'): continue
    for name in files:
        try: print(place, name, open(f'{place}/{name}').read().split())
        except (OSError, UnicodeDecodeError): pass
for name in ('buddyinfo', 'softirqs', 'schedstat', 'locks', 'slabinfo', 'fs/jbd2', 'fs/ext4'):
    try: print(name, os.listdir(f'/proc/{name}') if os.path.isdir(f'/proc/{name}') else open(f'/proc/{name}').read())
    except OSError: pass
"""
    use = """
import os, time
kept = [os.openpty() for _ in range(20)], [os.open(f'/tmp/{n}', os.O_CREAT | os.O_RDWR) for n in range(500)]
print('full', flush=True)
time.sleep(10)
"""

    async def case(slot: Slot) -> None:
        async with arena.another() as other:
            before = set((await python(slot, read)).output.splitlines())
            async with running(other, use):
                after = set((await python(slot, read)).output.splitlines())
        changed = {line.split()[1] for line in before ^ after} - {"uuid", "entropy_avail", "ns_last_pid", "hostname"}
        assert (changed == set()) == arena.contained, changed

    arena.face(case)
