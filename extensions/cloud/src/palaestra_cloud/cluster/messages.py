"""The messages between the driver of a run and the workers on its nodes, and how they are framed on a stream.

A worker says `Hello`, gets `WorkerSetup` and answers `Ready` or `NodeRefused`. Then it gets one `PlayGroup` per group,
and returns everything that happens as `Happened`. A frame is its length (4 bytes, big-endian) and a message in
MessagePack. Whatever starts a worker has to carry only two streams of bytes: `ray_launcher.py` carries them through an
actor.

Whoever can write to a worker's stream starts programs there anyway, so `WorkerSetup` and `PlayGroup` may hold pickles.
The driver unpickles nothing that a node sends.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import platform
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import msgspec

from palaestra.rollouts.events import (
    Alive,
    AttemptDiscarded,
    CostSpent,
    Graded,
    GroupEnded,
    GroupStarted,
    Note,
    ReplyReceived,
    RolloutBegun,
    RolloutEnded,
    RolloutResumed,
    TokensSpent,
    TurnTaken,
)
from palaestra.rollouts.resume.state import EarlierWork
from palaestra.rollouts.spec import RunSettings
from palaestra_slots.core.errors import PalaestraError
from palaestra_slots.core.types import JSON, Task
from palaestra_slots.core.user_code import own_folders

LONGEST_FRAME = 1 << 30
"""The maximum size of a frame, in bytes."""

KINDS: tuple[type[msgspec.Struct], ...] = (
    GroupStarted, TurnTaken, ReplyReceived, RolloutResumed, RolloutEnded, AttemptDiscarded, GroupEnded,
    RolloutBegun, Alive, TokensSpent, Graded, Note, CostSpent,
)  # fmt: skip
"""The events that a worker returns. The place of a class in this list is the `kind` of its entries."""

FINISHED, FAILED = 100, 101
"""The kinds of an entry without an event: a group has ended, or an error has ended it, which the entry's data
describe."""


class Hello(msgspec.Struct, tag=True, kw_only=True):
    """The first message of a worker. `build` is a checksum of the package's files."""

    version: str
    build: str
    python: str
    host: str
    pid: int
    cpus: int


class Ready(msgspec.Struct, tag=True):
    """The worker can play groups, with this isolation level and this number of slots."""

    rung: int
    slots: int


class NodeRefused(msgspec.Struct, tag=True):
    """The worker cannot play groups, and ends. `exit_code` is that of the error."""

    reason: str
    exit_code: int = 1


class GroupEntry(msgspec.Struct, array_like=True, gc=False):
    """One event of the play `key` (`PlayGroup`). `index` is the rollout's index in its group, -1 for the group itself.
    `data` is the event in JSON; for a journal event, this is its line in the journal."""

    key: int
    kind: int
    index: int
    data: bytes


class Happened(msgspec.Struct, tag=True):
    """What happened on a node since the last such message, in order."""

    entries: list[GroupEntry]


class Failure(msgspec.Struct):
    """An error that ended a group on a node. `usage` is true for a `ConfigError`, and `disk` for a `DiskError`."""

    text: str
    usage: bool = False
    disk: bool = False


class WorkerSetup(msgspec.Struct, tag=True, kw_only=True):
    """What a worker needs before the first group. `settings` is a pickle of the settings that were set, of the
    environment and of each model server. `script` is the content of the environment's file, if it is one; with
    `compat`, it may import names by their old module paths."""

    reference: str
    script: bytes | None
    compat: bool = False
    folder: str
    settings: bytes
    flush_s: float


class PlayGroup(msgspec.Struct, tag=True):
    """Play a group. `work` is a `GroupWork`, packed by a `Packer`. `unheard` has the kinds of events that the driver
    drops, because they are not in the journal and nothing in the run hears them."""

    key: int
    work: bytes
    unheard: list[int] = []


class Cancel(msgspec.Struct, tag=True):
    """End a group now; what it has done is still recorded."""

    key: int


class Stop(msgspec.Struct, tag=True):
    """The run stops, for a `reason` of `RunLimits`, at a cost of `spent`."""

    reason: str
    message: str
    spent: float


FromWorker: TypeAlias = Hello | Ready | NodeRefused | Happened
ToWorker: TypeAlias = WorkerSetup | PlayGroup | Cancel | Stop


@dataclass(frozen=True, slots=True)
class GroupWork:
    """One group to play. Playing it again does the rest of the work after `earlier`, which is that of this group."""

    number: int
    task: Task
    settings: RunSettings
    earlier: EarlierWork


class Packer:
    """Pickles the groups of a run. Groups share their settings, and most tasks their limits, so neither is pickled for
    each group: pickling a dataclass takes far longer than pickling its values."""

    def __init__(self) -> None:
        self._settings: tuple[RunSettings, bytes] | None = None

    def pack(self, work: GroupWork) -> bytes:
        """Return the work as bytes. Raises whatever pickling the task's data raises."""
        if self._settings is None or self._settings[0] is not work.settings:
            self._settings = work.settings, pickle.dumps(work.settings)
        task: Task | tuple[JSON, ...] = work.task
        if type(task) is Task:
            pairs = zip(_values(task), _DEFAULTS, strict=True)
            task = tuple([... if value is default else value for value, default in pairs])
        earlier = work.earlier
        begun = earlier.rollouts, earlier.cut_off, earlier.asked
        return pickle.dumps((work.number, task, self._settings[1], begun if any(begun) else None))


def unpacked(work: bytes) -> GroupWork:
    """Return the work that a `Packer` packed. Raises whatever unpickling raises."""
    number, task, settings, begun = pickle.loads(work)  # noqa: S301 - from the driver, which started this process
    if isinstance(task, tuple):
        task = Task(*(default if value is ... else value for value, default in zip(task, _DEFAULTS, strict=True)))
    earlier = EarlierWork()
    if begun is not None:
        earlier.rollouts, earlier.cut_off, earlier.asked = begun
    return GroupWork(number, task, pickle.loads(settings), earlier)  # noqa: S301 - as above


_FIELDS = fields(Task)
_DEFAULTS: tuple[JSON, ...] = tuple(each.default for each in _FIELDS)
_values: Callable[[Task], tuple[JSON, ...]] = attrgetter(*(each.name for each in _FIELDS))


class StreamEnded(PalaestraError):
    """The other end of a stream has gone, or does not speak this protocol."""


_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def framed(message: FromWorker | ToWorker) -> bytes:
    """Return the message as a frame."""
    data = _encoder.encode(message)
    return len(data).to_bytes(4, "big") + data


async def read_frame(stream: asyncio.StreamReader) -> bytes:
    """Return the next message, still encoded. Raises `StreamEnded`."""
    try:
        size = int.from_bytes(await stream.readexactly(4), "big")
        if size > LONGEST_FRAME:
            raise StreamEnded(f"a message of {size} bytes: something else has written to this stream")
        return await stream.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise StreamEnded("the stream has ended") from error


def from_worker(data: bytes) -> FromWorker:
    """Return a message of a worker. Raises `StreamEnded` for anything else."""
    try:
        return _from_worker.decode(data)
    except msgspec.MsgspecError as error:
        raise StreamEnded(f"not a message of a worker: {error}") from None


def to_worker(data: bytes) -> ToWorker:
    """Return a message to a worker. Raises `StreamEnded` for anything else."""
    try:
        return _to_worker.decode(data)
    except msgspec.MsgspecError as error:
        raise StreamEnded(f"not a message to a worker: {error}") from None


@cache
def this_process() -> Hello:
    """Return what this process says about itself."""
    return Hello(
        version=version("palaestra"),
        build=_checksum(path for folder in own_folders() for path in sorted(folder.rglob("*.py"))),
        python=platform.python_version(),
        host=socket.gethostname(),
        pid=os.getpid(),
        cpus=os.cpu_count() or 1,
    )


def _checksum(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
