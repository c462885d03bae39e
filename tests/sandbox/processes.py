"""The host's view of processes, from /proc."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


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


@contextlib.contextmanager
def ignoring(*numbers: int) -> Iterator[None]:
    """This process, and what it starts meanwhile, ignore these signals."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
