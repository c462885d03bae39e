"""`status.json`: a run's rollouts in flight, for other processes to read.

The file has only the stages of the rollouts, because the journal has everything else. It also identifies the process
that wrote it, so that a reader can check whether that process is alive. The file is replaced atomically, at most once a
second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import islice
from pathlib import Path

import msgspec

from palaestra.rollouts.events import GroupsPlanned, Handlers, InFlight
from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.io.durable_files import UNREADABLE, private, read_regular, unfinished_name

logger = logging.getLogger(__name__)

STATUS_NAME = "status.json"
STATUS_SCHEMA = "palaestra.status/1"
WRITE_EVERY_S = 1.0

LONGEST_LISTED = 50
"""The maximum number of rollouts in flight that are listed by name, longest idle first. All are counted."""


class Idle(msgspec.Struct):
    """A rollout or group in flight, and the time (seconds since the epoch) of its last sign of life."""

    name: str
    stage: str
    since: float


class StagesNow(msgspec.Struct, kw_only=True):
    """The rollouts in flight. `host`, `pid` and `started` (in clock ticks since boot) identify the writing process."""

    schema: str = STATUS_SCHEMA
    host: str
    pid: int
    started: int
    at: float
    stages: dict[str, int]
    idle: list[Idle]
    planned: int | None = None
    """The number of tasks of the run, once it is known."""


class StatusFile:
    """Writes the stages of rollouts and groups in flight to the file."""

    def __init__(self, in_flight: InFlight, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._in_flight = in_flight
        self._written: InFlight | None = None
        self._planned: int | None = None
        self._me = socket.gethostname(), os.getpid(), started_ticks(os.getpid()) or 0

    def handlers(self) -> Handlers:
        return {GroupsPlanned: self._on_planned}

    def _on_planned(self, event: GroupsPlanned) -> None:
        self._planned, self._written = event.total, None

    def now(self) -> StagesNow:
        """Return the current stages."""
        host, pid, started = self._me
        first = [Idle(name, *at) for name, at in islice(self._in_flight.items(), LONGEST_LISTED)]
        return StagesNow(
            host=host,
            pid=pid,
            started=started,
            at=self._clock.wall(),
            stages=dict(Counter(stage for stage, _ in self._in_flight.values())),
            idle=first,
            planned=self._planned,
        )

    def write(self, path: Path) -> None:
        """Write the file if its content has changed. Errors are only logged, because on a full disk the journal ends
        the run."""
        current = dict(self._in_flight)
        if current == self._written:
            return
        unfinished = unfinished_name(path)
        try:
            with open(unfinished, "xb", opener=private) as file:
                file.write(msgspec.json.encode(self.now()) + b"\n")
            unfinished.replace(path)
        except OSError as error:
            logger.debug("cannot write %s: %s", path, error)
        else:
            self._written = current

    @asynccontextmanager
    async def written(self, folder: Path) -> AsyncIterator[None]:
        """Keep `status.json` up to date while the block runs. The file is kept afterwards."""
        path = folder / STATUS_NAME
        self.write(path)
        writing = asyncio.create_task(self._write_again(path), name="status")
        try:
            yield
        finally:
            writing.cancel()
            with suppress(asyncio.CancelledError):
                await writing
            self.write(path)

    async def _write_again(self, path: Path) -> None:
        while True:
            await self._clock.sleep(WRITE_EVERY_S)
            self.write(path)


def read_stages(folder: Path) -> StagesNow | None:
    """Return the last stages that a run wrote; None if there is no readable file."""
    try:
        found = msgspec.json.decode(read_regular(folder / STATUS_NAME), type=StagesNow)
    except (OSError, *UNREADABLE):
        return None
    return found if found.schema == STATUS_SCHEMA else None


def tasks_planned(folder: Path) -> int:
    """Return the number of tasks of the run in this folder; 0 if it is unknown."""
    found = read_stages(folder)
    return 0 if found is None else found.planned or 0


def is_alive(found: StagesNow) -> bool | None:
    """Return whether the process that wrote the file is alive; None if it ran on another host."""
    # A pid alone may belong to a later process.
    return started_ticks(found.pid) == found.started if found.host == socket.gethostname() else None


def started_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if it has ended. Source: proc(5), field
    22."""
    try:
        # The second field is the program's name, which may have spaces and parentheses of its own.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
