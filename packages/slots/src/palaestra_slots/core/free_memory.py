"""Reads how much memory this process and its children may still use."""

from __future__ import annotations

import functools
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 60  # a group of version 1 without a limit has the largest number of pages


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
