"""The kernel's own doors: calls, devices, settings, and what is not contained by a namespace."""

from __future__ import annotations

import os
import platform
import socket

import pytest

from abuse.arena import Arena, python
from palaestra_slots.sandbox.slot import Slot

pytestmark = [pytest.mark.slots, pytest.mark.slow]

X86_ONLY = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")


@X86_ONLY
@pytest.mark.contained_on("full", "userns", "confined")
def test_calls_outside_the_contract_are_refused(arena: Arena) -> None:
    calls = {
        "io_uring_setup": 425, "io_uring_enter": 426, "bpf": 321, "userfaultfd": 323, "perf_event_open": 298,
        "add_key": 248, "request_key": 249, "keyctl": 250, "open_by_handle_at": 304, "kexec_load": 246,
        "init_module": 175, "finit_module": 313, "delete_module": 176, "reboot": 169, "swapon": 167, "acct": 163,
        "syslog": 103, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "setns": 308,
        "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "mount_setattr": 442, "clone3": 435,
        "process_vm_writev": 311, "iopl": 172, "ioperm": 173, "clock_settime": 227, "settimeofday": 164,
        "fanotify_init": 300, "quotactl": 179, "kcmp": 312, "io_uring_register": 427, "fsconfig": 431, "fspick": 433,
        "quotactl_fd": 443, "open_tree_attr": 467, "kexec_file_load": 320, "swapoff": 168, "adjtimex": 159,
        "clock_adjtime": 305, "lookup_dcookie": 212, "migrate_pages": 256, "move_pages": 279,
    }  # fmt: skip
    program = f"""
import ctypes
c = ctypes.CDLL(None, use_errno=True)
for name, number in {calls!r}.items():
    c.syscall(number, 0, 0, 0, 0, 0, 0)
    if ctypes.get_errno() not in (1, 38): print(name, ctypes.get_errno())
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == ""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_nothing_is_taken_from_a_process_of_somebody_elses(arena: Arena) -> None:
    """By its descriptor: its own descriptors, its memory, its namespaces; nor is a file opened by its handle."""
    program = """
import ctypes, fcntl, os
c = ctypes.CDLL(None, use_errno=True)
for pid in [int(name) for name in os.listdir('/proc') if name.isdigit()]:
    if pid == os.getpid(): continue
    try: process = os.pidfd_open(pid)
    except OSError: continue
    for number in range(16):
        if c.syscall(438, process, number, 0) >= 0: print('descriptor', pid, number)
    for request in range(1, 11):
        try: print('namespace', pid, fcntl.ioctl(process, 0xFF00 | request, 0))
        except OSError: pass
    data = ctypes.create_string_buffer(8)
    ways = (ctypes.c_uint64 * 4)(ctypes.addressof(data), 8, 0x400000, 8)
    if c.process_vm_readv(pid, ctypes.byref(ways, 0), 1, ctypes.byref(ways, 16), 1, 0) >= 0: print('memory', pid)
    if ctypes.get_errno() not in (1, 3): print('memory', pid, ctypes.get_errno())
handle = (ctypes.c_char * 136)(128)
for path in (b'/', b'/usr', b'/proc/1'):
    if c.name_to_handle_at(-100, path, handle, ctypes.byref(ctypes.c_int()), 0) == 0: print('handle', path)
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == ""

    arena.face(case)


@X86_ONLY
@pytest.mark.contained_on("full", "userns", "confined")
def test_no_way_makes_a_namespace(arena: Arena) -> None:
    program = """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
for bit in (17, 25, 26, 27, 28, 29, 30):
    if c.unshare(1 << bit) == 0: print('unshare', bit)
    pid = c.syscall(56, (1 << bit) | 17, 0, 0, 0, 0)
    if pid == 0: c._exit(0)
    if pid > 0: print('clone', bit)
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == ""

    arena.face(case)


@X86_ONLY
@pytest.mark.contained_on("full", "userns", "confined")
def test_foreign_call_tables_are_closed(arena: Arena) -> None:
    """x32 numbers are unknown; a 32-bit call (`int 0x80`) kills its process before the kernel acts on it."""
    program = """
import ctypes, mmap, os
c = ctypes.CDLL(None, use_errno=True)
print(c.syscall(0x40000000 + 39), ctypes.get_errno())
pid = os.fork()
if pid == 0:
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) < 0)
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == "-1 38\nTrue\n"

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_sockets_that_no_namespace_contains(arena: Arena) -> None:
    program = """
import socket
for family in (40, 38, 17, 44, 31, 29, 16 + 100, 21, 41):
    for kind in (1, 2, 3, 5):
        try: socket.socket(family, kind); print(family, kind)
        except OSError: pass
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == ""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_no_filter_is_attached_to_a_socket(arena: Arena) -> None:
    """The memory of compiled filters has one limit for the whole machine, and each socket may have 40 KiB of it."""
    program = """
import ctypes, socket, struct
code = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 1))
filter = struct.pack('HxxxxxxQ', 1, ctypes.addressof(code))
ours, theirs = socket.socketpair()
for option in (26, 50, 51, 52):
    try: ours.setsockopt(socket.SOL_SOCKET, option, filter); print(option)
    except PermissionError: pass
ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 5000)
"""

    async def case(slot: Slot) -> None:
        result = await python(slot, program)
        assert (result.exit_code, result.output) == (0, "")

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_settings_of_the_machine_are_out_of_reach(arena: Arena) -> None:
    program = """
import os
paths = ['/proc/sys/kernel/core_pattern', '/proc/sys/kernel/hostname', '/proc/sys/vm/overcommit_memory',
         '/proc/sys/kernel/modprobe', '/proc/sysrq-trigger', '/proc/irq/0/smp_affinity',
         '/proc/sys/kernel/ns_last_pid', '/sys/kernel/uevent_helper', '/sys/fs/cgroup/cgroup.procs']
for path in paths:
    try: os.close(os.open(path, os.O_WRONLY)); print('writes', path)
    except OSError: pass
for path in ('/proc/kcore', '/proc/kmsg', '/dev/kmsg', '/dev/mem', '/proc/keys', '/dev/vda',
             '/dev/sda', '/proc/timer_list', '/proc/slabinfo', '/sys/kernel/debug', '/sys/firmware'):
    try:
        if os.path.isdir(path): print('lists', path, os.listdir(path)); continue
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if os.read(fd, 16): print('reads', path)
    except OSError: pass
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == ""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_the_clock_and_the_name_of_the_machine_stay(arena: Arena) -> None:
    name = os.uname().nodename

    async def case(slot: Slot) -> None:
        assert not (await slot.execute("date -s 2001-01-01")).success
        assert not (await slot.execute("hostname taken")).success

    arena.face(case)
    assert os.uname().nodename == name


@pytest.mark.contained_on("full", "userns", "confined")
def test_no_key_is_typed_into_a_terminal(arena: Arena) -> None:
    program = """
import fcntl, os, pty
master, slave = pty.openpty()
for request in (0x5412, 0x541C):
    try: fcntl.ioctl(slave, request, b'x'); print(hex(request))
    except OSError as error: assert error.errno == 1, error
"""

    async def case(slot: Slot) -> None:
        result = await python(slot, program)
        assert result.output == "" or "out of pty devices" in result.output

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_descriptors_run_out_for_oneself_only(arena: Arena) -> None:
    hog = """
import os
made = []
try:
    while len(made) < 5000: made.append(os.pipe())
except OSError as error: print(error.errno, len(made) < 64)
"""
    watches = """
import ctypes, os
c = ctypes.CDLL(None, use_errno=True)
count = 0
while count < 5000 and c.inotify_init() >= 0: count += 1
print(count < 64)
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, hog)).output == "24 True\n"
        assert (await python(slot, watches)).output == "True\n"

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_netlink_carries_nothing_of_the_machine(arena: Arena) -> None:
    """Events of devices, audit, generic and user-made protocols; and no socket of the host's is listed."""
    name = f"abuse-netlink-{os.getpid()}"
    program = f"""
import socket, struct
for protocol in range(1, 32):
    for kind in (2, 3):
        try: socket.socket(16, kind, protocol); made = protocol != 4
        except OSError: made = False
        if made: print('protocol', protocol)
try:
    diag = socket.socket(16, 3, 4)
    diag.settimeout(1)
    diag.send(struct.pack('=IHHIIBBHIIIII', 40, 20, 0x301, 1, 0, 1, 0, 0, 0xFFFFFFFF, 0, 0xFF, 0xFFFFFFFF, 0xFFFFFFFF))
    while {name!r}.encode() not in (found := diag.recv(1 << 20)):
        if struct.unpack_from('=IH', found)[1] in (2, 3): break
    else: print('listed')
except OSError: pass
"""

    async def case(slot: Slot) -> None:
        with socket.socket(socket.AF_UNIX) as hosts:
            hosts.bind(f"\0{name}")
            assert (await python(slot, program)).output == ""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_no_protocol_loads_a_module(arena: Arena) -> None:
    program = """
import socket
for family in (2, 10):
    for protocol in (33, 46, 50, 51, 103, 132, 136, 255, 262):
        for kind in (1, 2, 3, 5, 6):
            try: socket.socket(family, kind, protocol); print(family, kind, protocol)
            except OSError: pass
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == ""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_crash_starts_no_program_of_the_host(arena: Arena) -> None:
    """`core_pattern` may name a program, which the kernel runs as the host's root unless the limit is 1 (core(5))."""

    async def case(slot: Slot) -> None:
        limit = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"
        assert (await python(slot, limit)).output == "(1, 1)\n"
        crashed = await slot.execute("python3 -c 'import ctypes; ctypes.string_at(0)'; ls core* 2>/dev/null | wc -l")
        assert crashed.output.endswith("\n0\n") or crashed.output == "0\n"

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_priorities_of_others_stay(arena: Arena) -> None:
    """Limits, niceness, processors and scheduling of every process that can be named, of its group and its user."""
    program = """
import ctypes, os, resource
c = ctypes.CDLL(None, use_errno=True)
own = {os.getpid(), os.getppid()}
for pid in [1, *(int(name) for name in os.listdir('/proc') if name.isdigit())]:
    if pid in own: continue
    try:
        if os.stat(f'/proc/{pid}').st_uid == os.getuid() and pid != 1: continue
    except OSError: continue
    try: resource.prlimit(pid, resource.RLIMIT_NOFILE, (16, 16)); print('limit', pid)
    except OSError: pass
    try: os.sched_setaffinity(pid, {0}); print('processors', pid)
    except OSError: pass
    try: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)); print('scheduler', pid)
    except OSError: pass
    try: os.setpriority(os.PRIO_PROCESS, pid, 19); print('nice', pid)
    except OSError: pass
for scheduler in (os.SCHED_FIFO, os.SCHED_RR):
    try: os.sched_setscheduler(0, scheduler, os.sched_param(1)); print('real time')
    except OSError: pass
try: os.setpriority(os.PRIO_PROCESS, 0, -5); print('first')
except OSError: pass
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, program)).output == ""

    arena.face(case)


@X86_ONLY
@pytest.mark.contained_on("full", "userns", "confined")
def test_no_descriptor_leads_out(arena: Arena) -> None:
    """Every descriptor that a command has, opened again, followed, and used as the start of a path."""
    program = """
import os, stat
for name in os.listdir('/proc/self/fd'):
    link = f'/proc/self/fd/{name}'
    try: target, kind = os.readlink(link), os.stat(link).st_mode
    except OSError: continue
    if stat.S_ISDIR(kind):
        if int(name) == 199 and target.endswith('/workspace'): continue  # the slot's own
        if target != '/proc/self/fd' and not target.startswith('/proc/'): print('directory', name, target)
    elif int(name) > 2 and not stat.S_ISREG(kind): print('open', name, target)
    for path in (f'{link}/..', f'{link}/../../etc/shadow', f'{link}/root'):
        try: os.open(path, os.O_RDONLY); print('beyond', path)
        except OSError: pass
for place in ('root/etc/shadow', 'cwd/etc/shadow', 'ns/net', 'ns/mnt', 'ns/user', 'map_files', 'task/1/mem', 'net/unix',
              'fdinfo/3', 'mountinfo', 'environ', 'auxv'):
    place = f'/proc/1/{place}'
    try: print(place, os.read(os.open(place, os.O_RDONLY), 16) if not os.path.isdir(place) else os.listdir(place))
    except OSError: pass
"""

    async def case(slot: Slot) -> None:
        found = (await python(slot, program)).output
        allowed = ("/proc/1/mountinfo", "/proc/1/net/unix")  # of the slot itself, if it has namespaces
        lines = [line for line in found.splitlines() if not line.startswith(allowed)]
        assert lines == []

    arena.face(case)
