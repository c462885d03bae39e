"""Computes how many slots this machine can hold, given its memory and the number of files a process may open.

A slot that waits for the model uses little memory; commands use much more. The initial limit is therefore generous.
Once `unchecked_slots` slots are in use, the pool calls `available_memory` again before it makes each further slot.
"""

from __future__ import annotations

import functools
import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEFAULT_SLOTS = 512
"""The maximum number of slots of a pool that sets no limit."""
SLOT_BYTES = 8 << 20
"""The memory assumed per slot. Measured: 0.4 MiB for an idle slot, 5.6 MiB while a small Python program runs."""
SLOT_FILES = 8
"""The descriptors assumed per slot. Measured per slot: 4 in the slot server (6 during a command), and 4 in this
process."""
OTHER_FILES = 512
"""The descriptors reserved for everything else: connections to the model server, journals and logs."""
RESERVE_BYTES = 512 << 20
"""While less memory than this is available, a pool that has `unchecked_slots` or more slots in use leases no further
slot."""

DEFAULT_STORE_BYTES = 20 << 30
"""The maximum disk space of the prepared workspaces of all runs, if no limit is set."""

_PLENTY_BYTES, _FRESH_S = 4 * RESERVE_BYTES, 0.1
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 60  # a group of version 1 without a limit has the largest number of pages


@dataclass(frozen=True, slots=True)
class SlotLimit:
    """The maximum number of slots, and the reason for that limit."""

    slots: int
    reason: str

    def __str__(self) -> str:
        return f"at most {self.slots} at a time: {self.reason}"


def unchecked_slots() -> int:
    """Return the number of slots that may be leased even if memory is short: four for each processor that this process
    may use, and at least four."""
    return max(4, 4 * len(os.sched_getaffinity(0)))


def slot_limit(wanted: int | None, *, memory: int, files: int) -> SlotLimit:
    """Return the limit for a pool that requests `wanted` slots; None requests as many as the machine can hold, up to
    `DEFAULT_SLOTS`.

    `memory` is the available memory in bytes. It limits the pool only if `wanted` is None, because a caller that sets
    `wanted` knows what its slots need. It never lowers the limit below `unchecked_slots`. `files` is the number of
    descriptors that a process may open.
    """
    found = SlotLimit(wanted or DEFAULT_SLOTS, "as set" if wanted else "the default")
    carried = max(unchecked_slots(), (memory - RESERVE_BYTES) // SLOT_BYTES)
    if wanted is None and carried < found.slots:
        found = SlotLimit(carried, f"{memory >> 20} MiB of memory are available")
    opened = max(1, (files - OTHER_FILES) // SLOT_FILES)
    if opened < found.slots:
        found = SlotLimit(opened, f"a process may open {files} files here (ulimit -Hn)")
    return found


def open_more_files() -> int:
    """Let this process open as many files as its hard limit allows. Returns that limit, or 2**30 if there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


class MemoryGauge:
    """Calls `read` for the available memory, but repeats an answer for a moment if it was plenty: a run that makes a
    hundred slots per second need not read ten files for each. While memory is short, every call reads."""

    def __init__(self, read: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._found, self._until_s = 0, -math.inf

    def __call__(self) -> int:
        """Return the available bytes."""
        now = self._clock()
        if now >= self._until_s:
            self._found = self._read()
            self._until_s = now + (_FRESH_S if self._found >= _PLENTY_BYTES else 0.0)
        return self._found


def available_memory() -> int:
    """Return the bytes of memory that new processes can use: the kernel's MemAvailable, or less in a control group with
    a limit.

    Sources: proc_meminfo(5); the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    found = int(_read_short_file("/proc/meminfo").partition("MemAvailable:")[2].split(None, 1)[0]) << 10
    try:
        groups = _memory_groups(_read_short_file("/proc/self/cgroup"))
    except OSError:
        return found
    return min([found, *(left for group in groups if (left := _left_in(group)) is not None)])


@functools.lru_cache(maxsize=1)
def _memory_groups(lines: str) -> tuple[str, ...]:
    """Return the visible control groups that may limit the memory of this process: its own group and the groups above.
    `lines` is the content of /proc/self/cgroup."""
    found: list[str] = []
    for line in lines.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        group = root / path.lstrip("/")
        found += [str(each) for each in (group, *group.parents) if each.is_relative_to(root)]
    return tuple(found)


def _left_in(group: str) -> int | None:
    """Return the bytes of memory that a control group may still use, including the page cache that it can drop; None if
    the group has no limit."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "\ninactive_file "),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "\ntotal_inactive_file "),
    ):
        try:
            most = _read_short_file(f"{group}/{limit}").strip()
            if most == "max" or int(most) >= _UNLIMITED_BYTES:
                continue
            now, figures = int(_read_short_file(f"{group}/{used}")), f"\n{_read_short_file(f'{group}/memory.stat')}"
            return max(0, int(most) - now + int(figures.partition(cache)[2].partition("\n")[0] or 0))
        except (OSError, ValueError):
            continue
    return None


def _read_short_file(path: str) -> str:
    """Return a short file. Each new slot reads several, and `Path.read_text` would take three times as long."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while more := os.read(descriptor, 1 << 16):
            data += more
        return data.decode()
    finally:
        os.close(descriptor)
