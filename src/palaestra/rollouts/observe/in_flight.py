"""What is in flight in this process, and `status.json`, where other processes read it.

Not a record: the journal is. The file is a projection of what is in memory, written at most once a second and put in
place whole; it holds no more than the stages, because everything else can be read from the journal. Whoever reads it
learns from it which process wrote it, and so whether that still lives.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from palaestra.core.clock import Clock, SystemClock
from palaestra.rollouts.observe.console import NullObserver
from palaestra.rollouts.records import Group, Trajectory

logger = logging.getLogger(__name__)

STATUS_NAME = "status.json"
STATUS_SCHEMA = "palaestra.status/1"
WRITE_EVERY_S = 1.0

LONGEST_LISTED = 50
"""How many of those in flight are listed by name, the longest idle first; all are counted."""


class Idle(msgspec.Struct):
    """A rollout or group in flight, and since when (seconds since the epoch) it has shown no sign of life."""

    name: str
    stage: str
    since: float


class StagesNow(msgspec.Struct, kw_only=True):
    """What is in flight at a moment. `started` is the process's start in clock ticks since boot: with its number and
    host it means one process for ever."""

    schema: str = STATUS_SCHEMA
    host: str
    pid: int
    started: int
    at: float
    stages: dict[str, int]
    idle: list[Idle]


class InFlight(NullObserver):
    """An observer that knows the stage of everything in flight."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._at: dict[str, tuple[str, float]] = {}
        self._changed = True
        self._me = socket.gethostname(), os.getpid(), started_ticks(os.getpid()) or 0

    def stage(self, rollout_id: str, stage: str) -> None:
        self._changed = True
        if stage:
            self._at.pop(rollout_id, None)  # goes to the end: what is first was there the longest
            self._at[rollout_id] = stage, self._clock.wall()
        else:
            self._at.pop(rollout_id, None)

    def rollout_finished(self, trajectory: Trajectory) -> None:
        self._at.pop(trajectory.rollout_id, None)
        self._changed = True

    def group_finished(self, group: Group) -> None:
        self._at.pop(group.group_id, None)
        self._changed = True

    def now(self) -> StagesNow:
        """What is in flight."""
        host, pid, started = self._me
        first = [
            Idle(name, *at) for name, at, _ in zip(self._at, self._at.values(), range(LONGEST_LISTED), strict=False)
        ]
        return StagesNow(
            host=host,
            pid=pid,
            started=started,
            at=self._clock.wall(),
            stages=dict(Counter(stage for stage, _ in self._at.values())),
            idle=first,
        )

    def write(self, path: Path) -> None:
        """Put the file in place, if something has changed since. Where the disk does not take it, the run goes on: that
        is the journal's to notice."""
        if not self._changed:
            return
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            unfinished.write_bytes(msgspec.json.encode(self.now()) + b"\n")
            unfinished.replace(path)
        except OSError as error:
            logger.debug("cannot write %s: %s", path, error)
        else:
            self._changed = False

    @asynccontextmanager
    async def written(self, folder: Path) -> AsyncIterator[None]:
        """Keep `status.json` in the folder for as long as the block runs. It stays: it says who wrote last."""
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
    """What a run last said was in flight; None where it said nothing, or nothing that can be read."""
    try:
        found = msgspec.json.decode((folder / STATUS_NAME).read_bytes(), type=StagesNow)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found.schema == STATUS_SCHEMA else None


def is_alive(found: StagesNow) -> bool | None:
    """Whether the process that wrote it lives; None where that is another host's to know."""
    return started_ticks(found.pid) == found.started if found.host == socket.gethostname() else None


def started_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None for one that is not there. Source: proc(5), field 22."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
