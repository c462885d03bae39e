"""The host's view of processes, from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from palaestra_slots.sandbox.slotd.namespaced import cgroups


class HostProcess(NamedTuple):
    """One process: its name is what `ps -o comm` shows."""

    pid: int
    parent: int
    name: str


def table() -> list[HostProcess]:
    """All processes that are not zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):  # not their files, whose going away glob() does not bear
        with contextlib.suppress(OSError):
            text = (folder / "stat").read_text(errors="replace")
            name, _, rest = text.partition("(")[2].rpartition(") ")
            if not rest.startswith(("Z", "X")):
                found.append(HostProcess(int(folder.name), int(rest.split()[1]), name))
    return found


def descendants(pid: int) -> list[HostProcess]:
    """Everything below a process."""
    processes, members = table(), {pid}
    while grown := {p.pid for p in processes if p.parent in members} - members:
        members |= grown
    return [process for process in processes if process.pid in members - {pid}]


def share_memory_with_inits() -> None:
    """Let the slots that this process makes from now on have inits in their own control groups, as version 2 has."""
    pids = {str(process.pid) for process in descendants(os.getpid())}
    for hierarchy in cgroups.find():
        for name in os.listdir(hierarchy.parent) if os.path.isdir(hierarchy.parent) else ():
            if name.partition("-")[0] in pids and os.path.isdir(f"{hierarchy.parent}/{name}/inits"):
                os.rmdir(f"{hierarchy.parent}/{name}/inits")


@contextlib.contextmanager
def ignoring(*numbers: int) -> Iterator[None]:
    """This process, and what it starts meanwhile, ignore these signals."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
