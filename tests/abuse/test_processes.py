"""Processes: too many, too hungry, too clever to die."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from abuse.arena import Arena, python
from palaestra_slots.core.errors import SlotLost
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec

pytestmark = [pytest.mark.slots, pytest.mark.slow]


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_fork_bomb_stops_at_the_limit(arena: Arena) -> None:
    bomb = """
import os, time
end = time.monotonic() + 1
while time.monotonic() < end:
    try: os.fork()
    except OSError as error: os.write(1, f'{error.errno}\\n'.encode()); time.sleep(0.01)
"""

    async def case(slot: Slot) -> None:
        result = await python(slot, bomb, timeout_s=5.0)
        assert set(result.output.split()) == {"11"}
        await slot.execute("kill -9 -1")
        assert (await slot.execute("echo usable", timeout_s=10)).output == "usable\n"

    arena.face(case, memory_bytes=1 << 30)


@pytest.mark.contained_on("full", "userns", "confined")
def test_threads_count_as_processes(arena: Arena) -> None:
    threads = """
import threading
try:
    for n in range(200): threading.Thread(target=threading.Event().wait, daemon=True).start()
except RuntimeError: print('refused', n < 64)
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, threads)).output == "refused True\n"

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_one_greedy_process_gets_no_more_memory(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        result = await python(slot, "x = bytearray(400 << 20); print(len(x))")
        assert not result.success
        assert result.metadata["oom"] or "MemoryError" in result.output
        assert (await slot.execute("echo usable")).output == "usable\n"

    arena.face(case)


@pytest.mark.contained_on("full")
def test_many_processes_share_one_memory_limit(arena: Arena) -> None:
    """Without control groups every process has the limit for itself; 4 × 40 MiB shows it, and harms nobody."""
    hog = """
import os, sys, time
x = bytearray(40 << 20)
x[::4096] = b"x" * len(x[::4096])
open(f"filled.{sys.argv[1]}", "w").close()
while not os.path.exists("killed"):
    if sum(name.startswith("filled.") for name in os.listdir()) == 4:
        sys.exit(print("alive with all four filled"))
    time.sleep(0.01)
"""
    together = "for i in 1 2 3 4; do { python3 hog.py $i || : > killed; } & done; wait"

    async def case(slot: Slot) -> None:
        await slot.write_text("hog.py", hog)
        result = await slot.execute(together, timeout_s=60.0)
        assert (result.output.count("alive with all four filled") < 4) == arena.contained

    arena.face(case)


@pytest.mark.contained_on("full")
def test_memory_taken_as_files_counts_too(arena: Arena) -> None:
    """tmpfs is memory. A slot that fills its own ends itself; without control groups only the disk limit bounds it."""

    async def case(slot: Slot) -> None:
        shared = "/dev/shm" if arena.ground.rung > Rung.CONFINED else "~"  # which has one limit with /tmp
        fill = "head -c 60000000 /dev/zero > x; "
        fill += f"for d in ${{TMPDIR:-/tmp}} {shared}; do head -c 30000000 /dev/zero > $d/x; done; "
        fill += f"du -cb x ${{TMPDIR:-/tmp}}/x {shared}/x"
        try:
            filled = (await slot.execute(fill)).output.endswith("120000000\ttotal\n")
        except SlotLost:
            filled = False
        assert filled != arena.contained

    arena.face(case, disk_bytes=64 << 20)


@pytest.mark.contained_on("full")
def test_a_busy_loop_gets_its_share_of_a_processor(arena: Arena) -> None:
    # On a busy machine a loop without a limit may get a sixth of a processor too, so the limit is far below.
    spin = """
import time
begun, end = time.process_time(), time.monotonic() + 2.5
while time.monotonic() < end and time.process_time() - begun < 0.25: pass
print(time.process_time() - begun)
"""

    async def case(slot: Slot) -> None:
        result = await python(slot, spin)
        assert (float(result.output) < 0.25) == arena.contained

    arena.face(case, cpus=0.05)


@pytest.mark.contained_on("full", "userns", "confined")
def test_killing_everything_kills_only_oneself(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        for signal in ("KILL", "STOP", "TERM"):
            await slot.execute(f"kill -{signal} 1; kill -{signal} -1; :")
        assert (await slot.execute("echo usable; kill -0 1")).output.startswith("usable\n")

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_the_first_process_cannot_be_read_or_traced(arena: Arena) -> None:
    trace = """
import ctypes, os
c = ctypes.CDLL(None, use_errno=True)
print(c.ptrace(16, 1, 0, 0), c.ptrace(0x4206, 1, 0, 0))
for name in ('mem', 'environ', 'maps', 'auxv', 'stack', 'syscall'):
    try: print(name, open(f'/proc/1/{name}', 'rb').read(1))
    except OSError: pass
for name in ('root', 'cwd', 'exe', *(f'fd/{n}' for n in range(16))):
    try: print(name, os.readlink(f'/proc/1/{name}'))
    except OSError: pass
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, trace)).output == "-1 -1\n"

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_the_program_of_pid_1_cannot_be_overwritten(arena: Arena) -> None:
    """The runc class of escapes: a way from inside to the executable that the outside will run again."""
    overwrite = """
import os
for path in ('/proc/1/exe', '/proc/1/root/proc/1/exe', '/proc/1/cwd'):
    try: os.open(path, os.O_WRONLY); print('open', path)
    except OSError: pass
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, overwrite)).output == ""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_timeout_takes_what_has_cut_itself_loose(arena: Arena) -> None:
    loose = """
import os, signal, time
for number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            while True: time.sleep(0.01)
        os._exit(0)
print('out', flush=True)
time.sleep(60)
"""

    async def case(slot: Slot) -> None:
        result = await python(slot, loose, timeout_s=2.0)
        assert result.metadata["timeout"]
        assert result.output == "out\n"
        assert (await slot.execute("pgrep -c -U $EUID python3")).output == "0\n"

    arena.face(case)


@pytest.mark.contained_on("full")
@pytest.mark.parametrize("kind", ["written", "allocated", "mapped once"])
def test_memory_that_no_process_maps_counts_too(arena: Arena, kind: str) -> None:
    """Files without a name, open in one process: its own limit counts only what it maps. 160 MiB harm nobody."""
    program = f"""
import mmap, os
for number in range(20):
    file = os.memfd_create("x")
    if {kind!r} == "written":
        os.write(file, bytes(8 << 20))
    elif {kind!r} == "allocated":
        os.posix_fallocate(file, 0, 8 << 20)
    else:
        os.ftruncate(file, 8 << 20)
        with mmap.mmap(file, 8 << 20) as memory:
            memory[:] = bytes(8 << 20)
print("all taken")
"""

    async def case(slot: Slot) -> None:
        assert ("all taken" in (await python(slot, program)).output) != arena.contained

    arena.face(case)


@pytest.mark.contained_on("full", "confined")
def test_segments_of_shared_memory_count_too(arena: Arena) -> None:
    """They outlive the process that made them, so that no process has them. `confined` has none."""
    program = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for number in range(20):
    segment = libc.shmget(0, 8 << 20, 0o1600)
    place = libc.shmat(segment, None, 0)
    if segment < 0 or place in (None, 2**64 - 1):
        raise SystemExit("refused")
    ctypes.memset(place, 1, 8 << 20)
    libc.shmdt(ctypes.c_void_p(place))
print("all taken")
"""

    async def case(slot: Slot) -> None:
        assert ("all taken" in (await python(slot, program)).output) != arena.contained

    arena.face(case)


@pytest.mark.contained_on("full", "confined")
@pytest.mark.parametrize("kind", ["connections", "datagrams"])
def test_data_on_its_way_counts_too(arena: Arena, kind: str) -> None:
    """Nobody reads it. The kernel holds up to 4 MiB for each connection, and up to `net.core.rmem_max` for each UDP
    socket, in memory that no process has. `confined` has neither while the network is off."""
    program = """
import os, socket, sys, time
reader, writer = os.pipe()
for _ in range(6):
    if os.fork() == 0:
        os.close(reader)
        server, ends = socket.create_server(('127.0.0.1', 0)), []
        for _ in range(50 if sys.argv[1] == 'datagrams' else 0):
            ends.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            ends[-1].bind(('127.0.0.1', 0))
            ends[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
            for _ in range(14): ends[-1].sendto(bytes(60000), ends[-1].getsockname())
        time.sleep(3 if ends else 0)  # until all children hold what they hold
        for end in ends:
            try:
                while size := len(end.recv(1 << 16, socket.MSG_DONTWAIT)): os.write(writer, b'%d\\n' % size)
            except BlockingIOError: pass
        for _ in range(12 if sys.argv[1] == 'connections' else 0):
            ends.append(socket.create_connection(server.getsockname()))
            ends.append(server.accept()[0])
            ends[-2].setblocking(False)
            try:
                while size := ends[-2].send(bytes(1 << 20)): os.write(writer, b'%d\\n' % size)
            except BlockingIOError: pass
        os.close(writer)
        time.sleep(60)
        os._exit(0)
os.close(writer)
sizes = open(reader).read().split()
if sum(map(int, sizes)) > 160 << 20: print('all taken')
"""

    async def case(slot: Slot) -> None:
        try:
            found = (await slot.execute(["python3", "-c", program, kind])).output
        except SlotLost:
            found = ""
        assert ("all taken" in found) != arena.contained

    arena.face(case)


# The main thread ends, and the kernel shows a zombie; another thread goes on.
_HEADLESS = """
import ctypes, sys, threading, time
def work():
    while True:
        with open('beat', 'a') as file: file.write('.')
        time.sleep(0.002)
threading.Thread(target=work).start()
while True:
    try: open('beat').close(); break
    except FileNotFoundError: pass
print('out', flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60}.get(__import__('platform').machine(), 93), 0)
"""


async def _beats(slot: Slot) -> bool:
    """Whether the thread still writes."""
    before = len(await slot.read_bytes("beat"))
    await asyncio.sleep(0.3)
    return len(await slot.read_bytes("beat")) > before


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_timeout_takes_a_process_without_its_main_thread(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        result = await python(slot, _HEADLESS, timeout_s=2.0)
        assert result.metadata["timeout"]
        assert not await _beats(slot)

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_detached_process_without_its_main_thread_is_found(arena: Arena) -> None:
    """It has left the command's session and lost its parent."""
    program = "import os\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n" + _HEADLESS

    async def case(slot: Slot) -> None:
        await slot.write_text("headless.py", program)
        result = await slot.execute("python3 headless.py > out; while :; do :; done", timeout_s=2.0)
        assert result.metadata["timeout"]
        assert not await _beats(slot)

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
@pytest.mark.parametrize("how", ["timeout", "freeze"])
def test_a_family_without_main_threads_is_found(arena: Arena, how: str) -> None:
    """Threads of dead leaders start processes that do the same, in sessions of their own, under names that read as the
    state of a zombie, deaf to signals and without descriptors."""
    program = """
import ctypes, os, platform, signal, sys, threading, time
libc = ctypes.CDLL(None)
EXIT = 60 if platform.machine() == 'x86_64' else 93
def work(depth):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    libc.prctl(15, b') Z 0 0 ', 0, 0, 0)
    libc.prctl(4, 0, 0, 0, 0)
    if depth and os.fork() == 0:
        os.setsid()
        os.closerange(0, 3)
        threading.Thread(target=work, args=(depth - 1,)).start()
        libc.prctl(15, b') Z 0 0 ', 0, 0, 0)
        libc.syscall(EXIT, 0)
    if not depth:
        open('ready', 'w').close()
    while True:
        with open(f'beat{depth}', 'a') as file: file.write('.')
        time.sleep(0.002)
threading.Thread(target=work, args=(3,)).start()
libc.syscall(EXIT, 0)
"""

    async def lengths(slot: Slot) -> list[int]:
        return [len(await slot.read_bytes(f"beat{depth}")) for depth in range(4)]

    async def beat(slot: Slot) -> None:
        """Until all four have written again."""
        before = await lengths(slot)
        async with asyncio.timeout(30):
            while not all(new > old + 30 for new, old in zip(await lengths(slot), before, strict=True)):  # noqa: ASYNC110 - processes in the slot write
                await asyncio.sleep(0.1)

    async def case(slot: Slot) -> None:
        await slot.write_text("family.py", program)
        if how == "timeout":
            result = await slot.execute("python3 family.py; while :; do :; done", timeout_s=5.0)
            assert result.metadata["timeout"]
        else:
            begun = "setsid python3 family.py < /dev/null > /dev/null 2>&1 & while ! [ -e ready ]; do sleep 0.05; done"
            assert (await slot.execute(begun, timeout_s=30.0)).success
            await beat(slot)
        before = await lengths(slot)
        if how == "freeze":
            assert await slot.freeze() == 4
        await asyncio.sleep(0.5)
        assert all(new < old + 30 for new, old in zip(await lengths(slot), before, strict=True))
        if how == "timeout":
            assert await lengths(slot) == before

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_process_without_its_main_thread_freezes(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        await slot.write_text("headless.py", _HEADLESS)
        assert (await slot.execute("python3 headless.py > out & while ! grep -q out out; do :; done")).success
        assert await _beats(slot)
        frozen = await slot.freeze()
        before = len(await slot.read_bytes("beat"))
        await slot.freeze()
        await asyncio.sleep(0.5)
        assert (frozen, len(await slot.read_bytes("beat")) - before < 30) == (1, True)

    arena.face(case)


_SYSCALLS = """
import ctypes, os, platform, signal, sys, threading, time
libc = ctypes.CDLL(None)
amd64 = platform.machine() == 'x86_64'
EXIT, VFORK = (60, 58) if amd64 else (93, None)
def beat():
    while True:
        with open('beat', 'a') as file: file.write('.')
        time.sleep(0.002)
"""


_CHANGES = {
    "siblings": "for _ in range(3):\n if libc.syscall(CLONE, 0x8000 | 17, 0, 0, 0, 0) == 0: os.setsid(); beat()",
    "a program": "os.execv('/bin/sh', ['sh', '-c', 'while :; do printf . >> beat; sleep 0.002; done'])",
    "orphans": "for _ in range(2):\n if os.fork() == 0: os.setsid(); os.fork() or beat()",
}
"""What a thread can do after its main thread has ended: Linux gives it new siblings, another program, or the orphans of
its children (PR_SET_CHILD_SUBREAPER)."""


@pytest.mark.contained_on("full", "userns", "confined")
@pytest.mark.parametrize("change", _CHANGES)
@pytest.mark.parametrize("how", ["timeout", "freeze"])
def test_a_thread_that_stays_is_found_in_whatever_it_becomes(arena: Arena, how: str, change: str) -> None:
    program = (
        f"{_SYSCALLS}CLONE = 56 if amd64 else 220\nlibc.prctl(36, 1, 0, 0, 0)\n"
        f"threading.Thread(target=lambda: (time.sleep(0.2), exec({_CHANGES[change]!r}))).start()\nlibc.syscall(EXIT, 0)"
    )

    async def case(slot: Slot) -> None:
        await slot.write_text("stays.py", program)
        if how == "timeout":
            assert (await slot.execute("python3 stays.py; while :; do :; done", timeout_s=3.0)).metadata["timeout"]
            assert not await _beats(slot)
        else:
            begun = "setsid python3 stays.py < /dev/null > /dev/null 2>&1 & while ! [ -s beat ]; do sleep 0.05; done"
            assert (await slot.execute(begun, timeout_s=30.0)).success
            before = len(await slot.read_bytes("beat"))
            assert await slot.freeze() >= 1
            await asyncio.sleep(1.0)
            assert len(await slot.read_bytes("beat")) - before < 100

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_no_name_of_a_process_hides_it(arena: Arena) -> None:
    """Names that look like the rest of a line in /proc, or are no text."""
    program = """
import ctypes, os, time
c = ctypes.CDLL(None)
for number, name in enumerate((b') Z 1 1 1', b'\\xff\\xfe) Z 0', b'a b) T 0\\n', b'(', b'))))\\n Z')):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        c.prctl(15, name, 0, 0, 0)
        beat = os.open(f'beat-{number}', os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        while True:
            os.write(beat, b'.')
            time.sleep(0.02)
time.sleep(60)
"""

    async def beats(slot: Slot) -> list[str]:
        return (await slot.execute("wc -c beat-*")).output.splitlines()

    async def case(slot: Slot) -> None:
        assert (await python(slot, program, timeout_s=3)).metadata["timeout"]
        before = await beats(slot)
        assert len(before) == 6, before
        await asyncio.sleep(0.3)
        assert await beats(slot) == before
        (started,) = [await slot.spawn(["python3", "-c", program])]
        await asyncio.sleep(2)
        assert await slot.freeze() >= 5
        await started.forget()

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_timeout_takes_processes_that_are_stopped_or_traced(arena: Arena) -> None:
    """A stopped process does not act on signals, and one that is traced belongs to its tracer; both wake later."""
    program = (
        _SYSCALLS
        + """
for kind in ('stopped', 'traced'):
    if os.fork() == 0:
        os.setsid()
        if kind == 'traced': libc.ptrace(0, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        beat()
time.sleep(0.2)
if os.fork() == 0:
    os.setsid()
    time.sleep(3)
    os.kill(-1, signal.SIGCONT)
    os._exit(0)
open('beat', 'w').write('.')
time.sleep(60)
"""
    )

    async def case(slot: Slot) -> None:
        assert (await python(slot, program, timeout_s=2.0)).metadata["timeout"]
        await asyncio.sleep(2.0)
        assert not await _beats(slot)
        assert (await slot.execute("pgrep -c -U $EUID python3")).output == "0\n"

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_timeout_takes_a_thread_that_starts_programs_without_its_main_thread(arena: Arena) -> None:
    """Each program that the thread starts is in a session of its own, and starts the next one."""
    program = (
        _SYSCALLS
        + """
def run():
    while True:
        if os.fork() == 0:
            os.setsid()
            os.execv('/bin/sh', ['sh', '-c', 'printf . >> beat; sleep 0.01; printf . >> beat'])
        time.sleep(0.02)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
threading.Thread(target=run).start()
time.sleep(0.1)
libc.syscall(EXIT, 0)
"""
    )

    async def case(slot: Slot) -> None:
        assert (await python(slot, program, timeout_s=2.0)).metadata["timeout"]
        assert not await _beats(slot)

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_process_that_waits_for_a_child_of_vfork_freezes_and_dies(arena: Arena) -> None:
    """The parent sleeps in the kernel, where a signal does not reach it, until its child ends."""
    program = (
        _SYSCALLS
        + """
def tell():
    while True:
        with open('beat', 'a') as file: file.write(f'{time.monotonic()}\\n')
        time.sleep(0.01)
threading.Thread(target=tell, daemon=True).start()
if VFORK is None or libc.syscall(VFORK) == 0:
    libc.sleep(1000)
"""
    )

    async def case(slot: Slot) -> None:
        await slot.write_text("waiting.py", program)
        await slot.execute("setsid python3 waiting.py > out 2>&1 & while [ ! -s beat ]; do :; done", timeout_s=20)
        await slot.freeze()
        await asyncio.sleep(3.0)
        await slot.execute("n=$(wc -l < beat); while [ $(wc -l < beat) = $n ]; do :; done", timeout_s=20)
        times = [float(line) for line in (await slot.read_text("beat")).splitlines()]
        assert max(later - earlier for earlier, later in pairwise(times)) > 2.5
        await arena.backend.destroy(slot)

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_process_that_forks_away_from_its_killer_dies(arena: Arena) -> None:
    runner = """
import os
while True:
    if os.fork(): os._exit(0)
    os.setsid()
"""

    async def case(slot: Slot) -> None:
        await python(slot, runner, timeout_s=0.5)
        await slot.execute("true", timeout_s=0.2)
        await arena.backend.destroy(slot)

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_daemon_holds_nobody_up(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        result = await slot.execute("setsid sleep 1000 & echo done", timeout_s=10)
        assert result.output == "done\n"
        assert result.metadata["duration_s"] < 5

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_orphans_are_reaped(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        await slot.execute("for i in $(seq 300); do (true &) ; done")
        zombies = "ps -U $EUID -o stat= | grep -c Z"
        assert (
            await slot.execute(f"for i in $(seq 50); do n=$({zombies}); [ $n = 0 ] && break; done; echo $n")
        ).output == "0\n"

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_process_is_gone_before_its_workspace_is_sealed(arena: Arena) -> None:
    """A daemon that waits for the grader finds that it is dead, however it hid."""
    tamper = "for i in 1 2 3 4 5 6; do setsid sh -c 'while :; do echo tampered > result; done' & done; echo x > result"

    async def case(slot: Slot) -> None:
        victim = await arena.backend.create(SlotSpec(), "sealed")
        await victim.execute(tamper)
        sealed = await arena.backend.seal(victim)
        with pytest.raises(PermissionError):
            await victim.execute("true")
        grading = await arena.backend.create(SlotSpec(), "grading", sealed)
        first = await grading.execute("echo fresh > result; pgrep -c sh; cat result")
        assert first.output.endswith("fresh\n")
        again = await grading.execute("cat result")
        assert again.output == "fresh\n"
        await arena.backend.destroy(grading)
        await arena.backend.forget(sealed)

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_the_end_of_the_first_process_is_the_end_of_the_slot(arena: Arena) -> None:
    """Nothing inside can end it; that it ends by the kernel's hand is told to everybody who waits."""

    async def case(slot: Slot) -> None:
        victim = await arena.backend.create(SlotSpec(), "victim")
        await victim.execute("kill -SEGV 1; kill -QUIT 1; kill -TERM 1; :")
        assert (await victim.execute("echo on")).output == "on\n"
        await arena.backend.destroy(victim)
        with pytest.raises((PermissionError, SlotLost)):
            await victim.execute("true")

    arena.face(case)
