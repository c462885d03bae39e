"""Stops every process of a slot from outside and lets these processes continue later. This allows a consistent copy of
the slot's files, and keeps processes from acting while the agent does not act.

It uses SIGSTOP and SIGCONT instead of the freezer of control groups. This works at every level, a stopped process can
be killed (a process that a version 1 freezer has frozen cannot), and a killed server leaves nothing to undo. However, a
program in `epoll_wait` or a similar call may see EINTR, as after Ctrl-Z.

Processes that the slot itself had stopped stay stopped. Children continue before their parents, so that no shell sees a
stopped job. The slot's init is not stopped; it acts only on orders.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Generator

from .. import syscalls
from ..rung import CannotMake

PATIENCE_S = 10.0
"""Seconds until a process counts as one that does not stop. A busy machine needs more than two for its turn."""

_STILL = {b"T", b"t", b"Z", b"X"}
_GONE = {b"Z", b"X"}


def freeze_processes(init: int) -> Generator[None, None, list[int]]:
    """Stop all descendants of a slot's init, as a job; returns the pids for `thaw`. If a process does not stop in time,
    lets the stopped processes continue and raises `CannotMake`."""
    stopped: list[int] = []
    asleep: set[int] | None = None
    deadline = time.monotonic() + PATIENCE_S
    try:
        while True:
            table = descendants(init)
            # Only those that were stopped at the beginning stay stopped at the end. Later ones were stopped here.
            if asleep is None:
                asleep = {pid for pid, state in table if state in (b"T", b"t")}
            fresh = [pid for pid, state in table if state not in _GONE and pid not in asleep and pid not in stopped]
            for pid in fresh:
                _signal(pid, signal.SIGSTOP)
            for pid in [pid for pid, state in table if pid in stopped and state not in _STILL]:
                _stop_threads(pid)
            stopped += fresh
            # A process that still ran when the table was read may have forked since, so the slot is still only if a
            # whole table, read after the last signal, has nothing new in it.
            if not fresh and _all_still(table):
                return stopped
            if time.monotonic() > deadline:
                raise CannotMake("a process of the slot does not stop; it may be waiting for the kernel")
            yield
    except BaseException:
        thaw(stopped)
        raise


def thaw(stopped: list[int]) -> None:
    """Let the processes that `freeze_processes` has stopped continue, the youngest generation first."""
    for pid in reversed(stopped):
        _signal(pid, signal.SIGCONT)


def maps_files_shared(init: int) -> bool:
    """Return whether any process of a slot may be able to write to a file through memory, which need not change the
    file's times. A process that cannot be inspected counts as able."""
    return any(_maps_shared(pid) for pid, state in descendants(init) if state not in _GONE)


def _maps_shared(pid: int) -> bool:
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):  # a thread that has ended shows no memory
            with open(f"/proc/{pid}/task/{thread}/maps", "rb") as file:
                modes = [line.split(None, 2)[1] for line in file]
            if modes:
                return any(mode.endswith(b"s") and b"w" in mode for mode in modes)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _stop_threads(pid: int) -> None:
    """Stop each thread of a process, because a main thread that waits in the kernel does not receive a signal that was
    sent to the process."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                syscalls.tgkill(pid, int(thread), signal.SIGSTOP)


def _all_still(table: list[tuple[int, bytes]]) -> bool:
    """Return whether all processes are stopped or have ended. A thread in vfork cannot stop, but cannot act either
    while its child is stopped."""
    states = {state for _, state in table}
    return states - {b"D"} <= _STILL and (b"D" not in states or b"T" in states)


def descendants(init: int) -> list[tuple[int, bytes]]:
    """Return the pids below a process with their states, parents before children."""
    found: list[tuple[int, bytes]] = []
    pending = _children(init)
    while pending:
        pid = pending.pop(0)
        with contextlib.suppress(OSError):
            found.append((pid, _process_state(pid)))
            pending += _children(pid)
    return found


def _process_state(pid: int) -> bytes:
    """Return the state of a process. If its main thread has ended or waits in the kernel, return the state of another
    thread, preferably a running one."""
    state, threads = _stat(f"/proc/{pid}/stat")
    if threads < 2 or state not in (*_GONE, b"D"):
        return state
    states = [state]
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            states.append(_stat(f"/proc/{pid}/task/{thread}/stat")[0])
    return min(states, key=lambda each: (each in _STILL, each in _GONE, each == b"D"))


def _stat(path: str) -> tuple[bytes, int]:
    """Return the state and the number of threads, from proc(5)."""
    with open(path, "rb") as file:
        # The program chooses its name, which comes before this and may contain spaces and brackets.
        fields = file.read().rpartition(b") ")[2].split()
    return fields[0], int(fields[17])


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        # A thread's file lists only the children that this thread has made.
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children += [int(child) for child in file.read().split()]
    return children


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
