"""The journal: the append-only record of everything that happened in a run, and the only truth on disk (invariant D1).

One JSON object per line; `appending` says how a line gets to the disk. JSONL files, reports and metrics are projections
of it. A torn last line, which a power cut can leave, is ignored by `read_journal`.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, StrEnum
from numbers import Integral, Real
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from palaestra.core.config import is_secret
from palaestra.core.errors import ConfigError
from palaestra.core.io.append_file import AppendedFile
from palaestra.core.types import JSON, Message
from palaestra.inference.ledger import SampledTurn
from palaestra.rollouts.records import Group, Trajectory

logger = logging.getLogger(__name__)

JOURNAL_SCHEMA = "palaestra.journal/2"

FIRST_SCHEMA = "palaestra.journal/1"
"""Its turns have messages and nothing else, so no rollout of it can be taken up again."""


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event"):
    """One thing that happened. `at` is seconds since the epoch."""

    at: float = 0.0


class RunStarted(Event, tag="run", kw_only=True, omit_defaults=False):
    """The first line: what is being run, and with which configuration. It is written whole, so that it always names
    its schema."""

    schema: str = JOURNAL_SCHEMA
    run_id: str
    env: str
    model: str
    seed: int
    config: dict[str, JSON] = {}


class RunResumed(Event, tag="resume", kw_only=True):
    """The run goes on from here in another process. `torn` tells whether the last line before had been cut off."""

    schema: str = FIRST_SCHEMA
    torn: bool = False
    config: dict[str, JSON] = {}


class GroupStarted(Event, tag="group", kw_only=True):
    """A group's tools and preparation; its trajectories are still empty. A later one of the same group replaces it:
    that is how a resumed run takes a half-done group up again. Rollouts that have ended stay, until they end again."""

    group: Group


class Messages(Event, tag="messages", kw_only=True):
    """Messages that a rollout's conversation grew by, and all else that is needed to take it up again after them.

    `turn` 0 is what it started from. `tokens` are those of the prompt and of the reply, as the engine counted them,
    `seconds` those of the model and of the tools. `sampled` are the model calls since the last such event, those of
    sub-agents too, where the server gives tokens. `cost` is that of `tokens`, where prices are known; where `recalled`,
    it was paid before, in a part of the run that was killed during the turn.
    """

    rollout_id: str
    turn: int
    messages: list[Message]
    finish_reason: str | None = None
    tokens: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)
    sampled: list[SampledTurn] = []
    cost: float | None = None
    recalled: bool = False


class Replied(Event, tag="reply", kw_only=True):
    """A reply of the model in a turn that gives work to sub-agents, which is long: written as soon as it is there.

    `branch` is the number of the sub-agent, or 0 for the rollout's own reply, which stands here until the turn's
    `Messages` has it too. It answers the conversation with the checksum `asked`. Where the server gives tokens, they
    are in `sampled` and `message` is empty.
    """

    rollout_id: str
    branch: int = 0
    asked: str = ""
    message: Message = {}
    finish_reason: str | None = None
    tokens: tuple[int, int] = (0, 0)
    cost: float | None = None
    sampled: list[SampledTurn] = []


class RolloutTakenUp(Event, tag="taken_up", kw_only=True):
    """A rollout that had been cut off goes on after its first `turns` turns, and with the first `replies` replies of
    the turn after them. Where `anew` says why, it does not: it begins again, and those are worth nothing."""

    rollout_id: str
    turns: int
    replies: int = 0
    anew: str = ""


class RolloutEnded(Event, tag="rollout", kw_only=True):
    """A rollout's complete record."""

    trajectory: Trajectory


class AttemptDiscarded(Event, tag="discarded", kw_only=True):
    """The record of an attempt that the world broke and that was tried again on a fresh slot."""

    trajectory: Trajectory


class GroupEnded(Event, tag="group_end", kw_only=True):
    """Every rollout of the group has ended; `error` tells why there were none."""

    group_id: str
    number: int
    error: str = ""


class RunEnded(Event, tag="end", kw_only=True):
    """The last line of a run that was not killed. `reason` is done, failed or interrupted."""

    reason: str


AnyEvent = (
    RunStarted
    | RunResumed
    | GroupStarted
    | Messages
    | Replied
    | RolloutTakenUp
    | RolloutEnded
    | AttemptDiscarded
    | GroupEnded
    | RunEnded
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


T = TypeVar("T")
EventT = TypeVar("EventT", bound=Event)

_DEEPEST = 64


def plain(value: T, depth: int = 0) -> T:
    """A copy that JSON can hold: half surrogate pairs become question marks, numbers of other packages numbers, other
    objects the names of their types."""
    copied: JSON = value
    match value:
        case None | bool() | bytes() | StrEnum():
            return value
        case Enum():
            copied = plain(value.value, depth + 1)
        case Integral():
            copied = int(value)
        case Real():
            copied = float(value)
        case str():
            copied = value.encode(errors="replace").decode()
        case _ if depth > _DEEPEST:
            copied = "…"
        case msgspec.Struct():
            fields = {name: plain(getattr(value, name), depth + 1) for name in value.__struct_fields__}
            copied = msgspec.structs.replace(value, **fields)
        case Mapping():
            copied = {plain(str(key)): plain(each, depth + 1) for key, each in value.items()}
        case tuple():
            copied = tuple(plain(each, depth + 1) for each in value)
        case list() | set() | frozenset():
            copied = [plain(each, depth + 1) for each in value]
        case _:
            copied = f"<{type(value).__name__}>"
    return cast("T", copied)


def _written(value: T) -> tuple[T, bytes]:
    """What is written, `plain` where need be, and how."""
    try:
        return value, _encoder.encode(value)
    except (TypeError, ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
        value = plain(value)
        return value, _encoder.encode(value)


def encoded(value: JSON) -> bytes:
    """The value as JSON; something plain stands in it for what JSON cannot hold."""
    return _written(value)[1]


class Journal:
    """Appends events to one file. Owned by one event loop, and the file by one process at a time.

    Raises `ConfigError` while another process has it, and where it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; a run needs its journal") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                f"{path} is being written: another process has this run; wait for it, or end it"
            ) from None
        except OSError:  # a file system without locks
            logger.warning("%s cannot be locked here: see that no other process goes on with the same run", path)
        self.file = AppendedFile(fd, path)

    def append(self, event: EventT, check: Callable[[EventT], None] | None = None) -> EventT:
        """Hand one event to the kernel, and say what was written: the event, or, where JSON cannot hold what an
        environment or a tool has put into it, a copy with something plain in its place.

        With a `check` nothing is written that could not be read again, or that the check, given the event as it will be
        read, raises for. Raises ValueError for the former, and `DiskError` when the disk is full: a run without a
        journal must stop.
        """
        event, line = _written(event)
        if check is not None:
            try:
                check(cast("EventT", _decoder.decode(line)))
            except msgspec.MsgspecError as error:
                raise ValueError(f"it cannot be read again: {error}") from None
        self.file.append(line + b"\n")
        return event

    async def commit(self) -> None:
        """Return once everything appended so far is on the disk."""
        await self.file.commit()

    def close(self) -> None:
        """Flush and close. Idempotent."""
        self.file.close()


def is_whole(line: bytes) -> bool:
    """Whether a line of a journal was written to its end and can be read."""
    try:
        _decoder.decode(line)
    except msgspec.MsgspecError:
        return False
    return line.endswith(b"\n")


def damaged(path: Path, number: int, error: object) -> ConfigError:
    """The error for a journal with a damaged line that is not its last."""
    if number == 1:
        return ConfigError(f"{path} does not begin as a journal does: {error}")
    return ConfigError(
        f"{path}: line {number} is damaged: {error}. Get the file from a backup; or keep what stands before that line "
        f"(head -n {number - 1}), and --resume rolls the rest out again"
    )


def read_journal(path: Path) -> Iterator[AnyEvent]:
    """The events of a journal. A torn last line is left out; damage anywhere else raises `ConfigError`."""
    with path.open("rb") as lines:
        torn: tuple[int, Exception] | None = None
        for number, line in enumerate(lines, 1):
            if torn is not None:
                raise damaged(path, *torn)
            try:
                event = _decoder.decode(line)
            except msgspec.MsgspecError as error:
                torn = (number, error)
                continue
            if isinstance(event, RunStarted):
                check_schema(event.schema, path)
            yield event


def check_schema(schema: str, path: Path) -> None:
    """Raises `ConfigError` for a journal of a form that this version does not read."""
    if schema not in (JOURNAL_SCHEMA, FIRST_SCHEMA):
        raise ConfigError(
            f"{path} is a journal of the form {schema!r}; this version reads {JOURNAL_SCHEMA!r} and older"
        )


def read_groups(path: Path) -> list[Group]:
    """The finished groups of a journal, in item order, with their trajectories."""
    groups: dict[str, Group] = {}
    rollouts: dict[str, dict[int, Trajectory]] = {}
    ended: dict[int, Group] = {}
    for event in read_journal(path):
        match event:
            case GroupStarted(group=group):
                groups[group.group_id] = group
                rollouts.setdefault(group.group_id, {})
                ended.pop(group.number, None)
            case RolloutEnded(trajectory=trajectory):
                rollouts[trajectory.group_id][trajectory.index] = trajectory
            case GroupEnded(group_id=group_id, number=number, error=error):
                groups[group_id].error = error
                ended[number] = groups[group_id]
            case _:
                pass
    for group in ended.values():
        of_group = rollouts[group.group_id]
        group.trajectories = [of_group[index] for index in sorted(of_group)]
    return [ended[number] for number in sorted(ended)]


def without_secrets(values: Mapping[str, JSON]) -> dict[str, JSON]:
    """A configuration as the journal keeps it: the values of secrets are replaced, at any depth."""
    return {key: "***" if value and is_secret(key) else _cleaned(value) for key, value in values.items()}


def _cleaned(value: JSON) -> JSON:
    if isinstance(value, Mapping):
        return without_secrets(value)
    return [_cleaned(entry) for entry in value] if isinstance(value, list) else value
