"""Names this machine and its processes, so that containers and jobs elsewhere can record their owner. A later run ends
the containers and jobs whose owner is gone."""

from __future__ import annotations

import os
from pathlib import Path


def this_host() -> str:
    """Return a name for this machine that changes with each boot and differs between process namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def process_name(pid: int) -> str:
    """Return a name that no other process on this machine has: the process's number and its start time. Source:
    proc_pid_stat(5)."""
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{pid}-{started}"


def is_alive(process: str) -> bool:
    """Return whether the process with that name is running."""
    try:
        return process_name(int(process.partition("-")[0])) == process
    except (OSError, ValueError):
        return False
