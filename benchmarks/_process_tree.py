"""What all processes below this one use: CPU seconds, memory, and which of them are left over.

`adopt` makes this process the parent of every orphan below it. So also the processes of a docker daemon that this
process has started, and of its containers, stay below it, whatever control group or namespace they are in. A process
that has ended counts with its parent, which has waited for it; one that nobody waits for counts as a zombie.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SAMPLE_S = 0.1

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def adopt() -> None:
    """Become the parent of the orphans below this process. Source: prctl(2)."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _stats() -> Iterator[tuple[int, list[str]]]:
    """Return the pid of each process, and the fields of its `stat` from the state on. Source: proc(5)."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                yield int(name), Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()


def below(without: Collection[int] = ()) -> dict[int, list[str]]:
    """Return the processes below this one, without those given and what is below them."""
    stats = dict(_stats())
    children: dict[int, list[int]] = {}
    for pid, fields in stats.items():
        children.setdefault(int(fields[1]), []).append(pid)
    found, front = {}, [os.getpid()]
    while front:
        front = [pid for parent in front for pid in children.get(parent, ()) if pid not in without]
        found |= {pid: stats[pid] for pid in front}
    return found


def cpu_s(without: Collection[int] = ()) -> float:
    """Return the CPU seconds of all processes below this one, also of those that have ended."""
    ticks = sum(int(each) for fields in below(without).values() for each in fields[11:15])
    ended = os.times()
    return ticks / TICKS_PER_S + ended.children_user + ended.children_system


def alive(without: Collection[int] = ()) -> dict[int, str]:
    """Return the command lines of the processes below this one that have not ended."""
    found = {}
    for pid, fields in below(without).items():
        with contextlib.suppress(OSError):
            if fields[0] != "Z":
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def memory_kb(without: Collection[int] = ()) -> int:
    """Return the proportional set size of all processes below this one: a shared page counts once."""
    total = 0
    for pid in below(without):
        with contextlib.suppress(OSError):
            total += sum(map(int, _PSS.findall(Path(f"/proc/{pid}/smaps_rollup").read_bytes())))
    return total


@contextmanager
def peak_memory(without: Collection[int] = ()) -> Iterator[list[int]]:
    """Yield a list that holds, after the block, by how many kB the memory has grown at its peak."""
    before, ended, found = memory_kb(without), threading.Event(), [0]

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            found[0] = max(found[0], memory_kb(without) - before)

    sampling = threading.Thread(target=sample, daemon=True)
    sampling.start()
    try:
        yield found
    finally:
        ended.set()
        sampling.join()
