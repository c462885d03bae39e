"""Gives the slots of one server their users, and counts and kills the processes of these users.

A slot's user owns only the slot, so ordinary permissions protect everything else. A server's range of users does not
overlap the ranges of other servers in the same container, since each server has its own directory, which is named after
the range (`server_directory.py`). The range is drawn at random because the kernel counts limits per user on the whole
machine, across containers.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import deque

from ..exec import process_tree

RANGE = 1024
_LOWEST, _HIGHEST = 10_000, 0x7FFFF000
# Where ranges lie if every uid exists: below those of namespaces (0x70000000), above those in common use.
_USUAL = 0x60000000


_CHOWN, _DAC_OVERRIDE, _FOWNER, _KILL, _SETGID, _SETUID, _SETPCAP = 0, 1, 3, 5, 6, 7, 8
# The capabilities that are needed to give slots users; every container's root has them unless they were removed.
_NEEDED = (_CHOWN, _DAC_OVERRIDE, _FOWNER, _KILL, _SETGID, _SETUID, _SETPCAP)


def can_become() -> bool:
    """Return whether this process may become other users and act on their processes and files."""
    with open("/proc/self/status") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return os.geteuid() == 0 and all(effective >> capability & 1 for capability in _NEEDED)


def starts() -> list[int]:
    """Return uids at which a range may start here, in random order; [] if this process cannot become other users."""
    if not can_become():
        return []
    found: list[int] = []
    for inside, count in _mapped("uid") & _mapped("gid"):
        low, high = max(inside, _LOWEST), min(inside + count, _HIGHEST)
        if low <= _USUAL < high:
            low = _USUAL
        found += [low + RANGE * random.randrange((high - low) // RANGE) for _ in range(64) if high - low >= RANGE]
    return found


def _mapped(kind: str) -> set[tuple[int, int]]:
    with open(f"/proc/self/{kind}_map") as file:
        return {(int(fields[0]), int(fields[2])) for fields in map(str.split, file)}


class Users:
    """The users of one server. Each user belongs to at most one slot at a time. A new slot gets the user that has been
    unused for longest."""

    def __init__(self, start: int) -> None:
        self._free = deque(range(start + 1, start + RANGE))

    def take(self) -> int:
        """Return a user that owns nothing. Raises OSError if all users are taken."""
        if not self._free:
            raise OSError(11, f"all {RANGE - 1} users of this server have a slot; end a slot first")
        return self._free.popleft()

    def give_back(self, uid: int) -> None:
        """Free a user whose processes and files are gone."""
        self._free.append(uid)


def kill(uid: int) -> None:
    """Kill all processes of a user in one call, which no fork escapes. A child of this process becomes the user and
    makes the call."""
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def living(first: int, count: int = 1) -> int:
    """Return the number of living processes of these users. Children of this process that have ended are reaped."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            alive, parent, uid = _process_status(int(name))
            if not first <= uid < first + count:
                continue
            if alive:
                found += 1
            elif parent == os.getpid():
                os.waitpid(int(name), os.WNOHANG)
    return found


def _process_status(pid: int) -> tuple[bool, int, int]:
    """Return whether any thread of a process is alive, its parent and its real uid, from proc(5)."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        wanted = ("State:", "PPid:", "Uid:", "Threads:")
        fields = dict(line.split(":", 1) for line in file if line.startswith(wanted))
    alive = fields["State"].split()[0] not in "ZX" or int(fields["Threads"]) > 1
    return alive, int(fields["PPid"]), int(fields["Uid"].split()[0])


def kill_orphans(spare: set[int]) -> int:
    """Kill all inherited processes except `spare` and their descendants, for slots without users of their own. Returns
    the number of processes that are still alive. Processes that have become another user are not counted; only the
    level `none` allows that, for example with sudo."""
    table = [process for process in process_tree.processes() if process.pid not in spare]
    kept = {process.pid for pid in spare for process in process_tree.descendants(pid, table)}
    living = 0
    for process in (process for process in table if process.pid not in kept):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
            living += not process.zombie
        # Orphans become children of this process, and a zombie keeps its pid until its parent has waited for it.
        if process.zombie and process.parent == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    return living
