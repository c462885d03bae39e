"""Lists the slot servers on this machine from the process table, which is never out of date.

A server is a process named `slotd`, and a slot is a process named `slot-init`. Each is the first process of a process
namespace; a process inside a slot can take these names, but cannot be the first process of a namespace. Only root sees
servers of other users. Servers at the levels without namespaces are not listed.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """One slot server: its owner, its client, how many slots and processes it has, and its age."""

    pid: int
    uid: int
    client_pid: int
    slots: int
    processes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class _Seen:
    pid: int
    parent: int
    uid: int
    name: str
    first: bool
    started: int


def running_servers() -> list[RunningServer]:
    """Return all servers that this user may see, oldest first."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    table = {seen.pid: seen for seen in map(_seen_process, pids) if seen is not None}
    children: dict[int, list[int]] = {}
    for seen in table.values():
        children.setdefault(seen.parent, []).append(seen.pid)
    found = []
    for server in table.values():
        if server.name == "slotd" and server.first and os.geteuid() in (0, server.uid):
            below = _descendants(server.pid, children)
            slots = sum(table[pid].name == "slot-init" and table[pid].first for pid in below)
            reaper = table.get(server.parent)
            # Start times count from boot and go on while a machine sleeps, unlike CLOCK_MONOTONIC. Source:
            # proc_pid_stat(5).
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - server.started / _TICK
            client = 0 if reaper is None else reaper.parent
            found.append(RunningServer(server.pid, server.uid, client, slots, len(below), round(age_s, 1)))
    return sorted(found, key=lambda server: -server.age_s)


def _descendants(pid: int, children: dict[int, list[int]]) -> list[int]:
    found, pending = [], [pid]
    while pending:
        for child in children.get(pending.pop(), []):
            found.append(child)
            pending.append(child)
    return found


def _seen_process(pid: int) -> _Seen | None:
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
        numbers = status.get("NSpid", "").split()
        # NSpid has the pid in each namespace, the innermost one last.
        first = len(numbers) > 1 and numbers[-1] == "1"
        return _Seen(pid, int(status["PPid"]), int(status["Uid"].split()[0]), status["Name"], first, int(stat[19]))
    return None
