"""Finds the processes of a slot that belong to a command, and kills only them.

A command's tree is its session, all descendants, and processes that have detached since the command started (a double
fork with a session of its own ends as a child of init). Processes older than the command, and their descendants, do not
belong to it. While several commands run, a detached process belongs to every command that is older than the process, so
the timeout of one command may kill a process of another.

The process table is read repeatedly until the tree is dead. If a tree forks faster than it can be killed, everything in
the slot but its init is killed. `native/init.c` follows the same rules.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import freezer

PATIENCE_S = 2.0

Moment = tuple[int, int]  # a time in clock ticks since boot, and the last process id that had been assigned by then
ALWAYS: Moment = (0, 0)
_STOPPED = (b"T", b"t")
_EXITING = 0x4  # PF_EXITING among the flags of `/proc/PID/stat`; source: proc_pid_stat(5)

# A moment, quick to record: the seconds since boot, and the content of `/proc/loadavg`, which ends with the last pid.
Noted = tuple[float, bytes]
KillSlot = Callable[[], None]  # kills every process of a slot except its init
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Command:
    """The main process of a command, and its start time in clock ticks since boot."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    started: int
    zombie: bool


def ticks(seconds_since_boot: float) -> int:
    """Convert seconds to clock ticks, the kernel's unit for a process's start time."""
    return int(seconds_since_boot * _TICK)


def kill_everything() -> None:
    """Kill every process that this process may signal, except itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def note() -> Noted:
    """Return the current moment, with process ids of this process's namespace."""
    return time.clock_gettime(time.CLOCK_BOOTTIME), os.pread(_open_loadavg(), 128, 0)


def moment(noted: Noted) -> Moment:
    """Convert a noted moment to the kernel's units."""
    seconds, load = noted
    return ticks(seconds), int(load.rpartition(b" ")[2])


@functools.cache
def _open_loadavg() -> int:
    return os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)


def inside(init: int, noted: Noted) -> Moment:
    """Convert a moment from this process's namespace to the namespace of a slot's init. The id in a moment serves only
    to order processes that started in the same tick. The result therefore has the id of the youngest living process of
    that tick, or 0 if there is none."""
    started, last = moment(noted)
    before = [_number_inside(pid) for pid, _ in freezer.descendants(init) if pid <= last and _began_in(pid, started)]
    return started, max(before, default=0)


def _began_in(pid: int, tick: int) -> bool:
    with contextlib.suppress(OSError):
        return _process_stat(pid).started == tick
    return False


def _number_inside(pid: int) -> int:
    """Return the number of a process in its innermost namespace; 0 if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    return 0


def kill_tree(
    command: Command,
    others: Sequence[Command],
    reap: Callable[[], None],
    after: Moment = ALWAYS,
    spare: bool = False,
    *,
    kill_slot: KillSlot,
) -> bool:
    """Kill until no process of the command lives. Returns True if only `kill_slot` could end the tree. Processes that
    started up to the moment `after` are spared, with their descendants. If `spare` is true, the main process is also
    spared."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        victims = tree(processes(), command, others, os.getpid(), after) - ({command.pid} if spare else set())
        if not victims:
            return False
        for pid in sorted(victims):  # parents first, so that no shell reports its child's death
            # without namespaces, a process may have become another user
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if not any(not process.zombie for process in processes() if process.pid in victims):
            continue
        time.sleep(0.0005)  # the kernel is still tearing down the killed processes
    kill_slot()
    return True


def tree(
    table: Sequence[ProcessStat], command: Command, others: Sequence[Command], init: int = 1, after: Moment = ALWAYS
) -> set[int]:
    """Return the pids of the living processes that belong to the command. If `after` is given, they include only
    processes that started after that moment, and the main process. Orphans are children of `init`."""
    mains = {other.pid for other in others}
    living = [process for process in table if not process.zombie]
    members = {command.pid}
    foreign = set(mains)
    # A session says nothing about when a process of it has started, so it counts only without `after`.
    begin, session = ((command.started, command.pid), command.pid) if after == ALWAYS else (after, -1)
    for process in living:
        # Start times count in clock ticks (10 ms), in which many processes can start, so the pid decides within a tick.
        age = (process.started, process.pid)
        if process.pid != command.pid and age <= after:
            foreign.add(process.pid)
        elif process.session == session:
            members.add(process.pid)
        elif process.session in mains:
            foreign.add(process.pid)
        elif process.parent == init and process.pid not in mains:
            (members if age > begin else foreign).add(process.pid)
    parents = {process.pid: process.parent for process in living}
    while grown := {pid for pid, parent in parents.items() if parent in members} - members - foreign:
        members |= grown
    return members & parents.keys()


def processes() -> list[ProcessStat]:
    """Return the descendants of this process."""
    table = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            table.append(_process_stat(int(name)))
    return descendants(os.getpid(), table)


def descendants(pid: int, table: Sequence[ProcessStat]) -> list[ProcessStat]:
    """Return the descendants of a process in a process table."""
    children: dict[int, list[ProcessStat]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process)
    found, pending = [], [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += [process.pid for process in below]
    return found


def is_stopped(pid: int) -> bool:
    """Return whether a child of this process is stopped by a signal or a tracer."""
    return _fields(pid)[0] in _STOPPED


def is_exiting(pid: int) -> bool:
    """Return whether a child of this process has begun to end. Its descriptors may be closed long before it is dead, if
    the machine is busy. False if no descriptor is left to find out."""
    with contextlib.suppress(OSError):
        return int(_fields(pid)[6]) & _EXITING != 0
    return False


def held_children(init: int) -> list[int]:
    """Return the children of a slot's init that are stopped before they have executed their programs. The init waits in
    the kernel for such a child, which shares its memory until then (vfork)."""
    try:
        if _fields(init)[0] != b"D":
            return []
        with open(f"/proc/{init}/task/{init}/children", "rb") as file:
            children = [int(child) for child in file.read().split()]
    except OSError:
        return []
    # Until the child executes its program, it has the name of the init.
    return [child for child in children if _is_held(child, _comm(init))]


def _is_held(pid: int, name: bytes) -> bool:
    with contextlib.suppress(OSError):
        return _comm(pid) == name and is_stopped(pid)
    return False


def _comm(pid: int) -> bytes:
    with open(f"/proc/{pid}/comm", "rb") as file:
        return file.read()


def _fields(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name before it can contain anything, also a bracket.
        return file.read().rpartition(b") ")[2].split()


def _process_stat(pid: int) -> ProcessStat:
    fields = _fields(pid)
    ended = fields[0] in (b"Z", b"X") and int(fields[17]) < 2  # with more threads, only the main thread has ended
    return ProcessStat(pid, int(fields[1]), int(fields[3]), int(fields[19]), ended)
