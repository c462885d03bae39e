"""The journal, an append-only file of a run's events, and `EventStream`, which writes it and announces events to
subscribers. Invariant D1: the journal is the only record of a run.

Each line is an event (`rollouts/events.py`) as a JSON object; groups files, reports and metrics are made from the
journal.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec

from palaestra.rollouts.events import (
    FIRST_SCHEMA,
    JOURNAL_SCHEMA,
    Alive,
    AnyJournalEvent,
    InFlight,
    JournalEvent,
    MemoryEvent,
    Note,
    RunResumed,
    RunStarted,
    Subscriber,
)
from palaestra_slots.core.config import is_secret
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import UNREADABLE, AppendedFile, lines_of
from palaestra_slots.core.redaction import redacted
from palaestra_slots.core.types import JSON, Label, Message

logger = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyJournalEvent] = msgspec.json.Decoder(AnyJournalEvent)


T = TypeVar("T")
EventT = TypeVar("EventT", bound=JournalEvent)

_DEEPEST = 64


def plain(value: T, depth: int = 0) -> T:
    """Return a copy that JSON can hold.

    Lone surrogates become question marks, and other packages' numeric types become int or float. A value that is nested
    too deeply becomes `…`, and any other object becomes the name of its type.
    """
    copied: JSON = value
    match value:
        # Before `Integral`, because a bool is one and would become 0 or 1.
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
            copied = msgspec.structs.replace(value, **plain(msgspec.structs.asdict(value), depth))
        case Label():
            copied = Label(plain(value.name), plain(value.evidence), value.certain)
        case Mapping():
            copied = {plain(str(key)): plain(each, depth + 1) for key, each in value.items()}
        case tuple():
            copied = tuple(plain([*value], depth))
        case list() | set() | frozenset():
            copied = [plain(each, depth + 1) for each in value]
        case _:
            copied = f"<{type(value).__name__}>"
    return cast("T", copied)


def _value_and_line(value: T) -> tuple[T, bytes]:
    """Return the value and its JSON line, or those of a `plain` copy if JSON cannot hold the value itself."""
    try:
        return value, _encoder.encode(value)
    except (TypeError, ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
        value = plain(value)
        return value, _encoder.encode(value)


def encoded(value: JSON) -> bytes:
    """Return the value as JSON; a `plain` copy of it if JSON cannot hold the value itself."""
    return _value_and_line(value)[1]


def checksum(messages: Sequence[Message]) -> str:
    """Return a checksum (hex) of a conversation."""
    return hashlib.blake2b(_value_and_line(list(messages))[1], digest_size=12).hexdigest()


def line_of(event: EventT, check: Callable[[EventT], None] | None = None) -> tuple[EventT, bytes]:
    """Return the event, or a `plain` copy if JSON cannot hold it, and its line without the line break. Raises
    `ValueError` as `Journal.append` does."""
    event, line = _value_and_line(event)
    if check is not None:
        try:
            check(cast("EventT", _decoder.decode(line)))
        except msgspec.MsgspecError as error:
            raise ValueError(f"its line in the journal cannot be read back: {error}") from None
    return event, line


class Journal:
    """Appends events to one file, which one process at a time owns.

    Raises `ConfigError` if another process owns the file, or if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not truncated and only appended to: until the lock is taken, the file may belong to another process.
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}. Make the folder writable, because a run needs its journal"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"another process is writing {path}; wait for that run to end, or stop it") from None
        except OSError:  # a file system without locks
            logger.warning(
                "%s cannot be locked on this file system; make sure that no other process resumes the run", path
            )
        self.file = AppendedFile(fd, path)

    def append(self, event: EventT, check: Callable[[EventT], None] | None = None) -> EventT:
        """Write one line and return the event that was written.

        The returned event is the event itself, or a `plain` copy if JSON cannot hold it. With a `check`, the line is
        written only if it can be read back and `check` accepts the event; otherwise this raises `ValueError`. Raises
        `DiskError` if the line cannot be written, for example because the disk is full: a run without a journal must
        stop.
        """
        event, line = line_of(event, check)
        self.append_line(line)
        return event

    def append_line(self, line: bytes) -> None:
        """Write a line that `line_of` returned, perhaps in another process of the run, or several such lines with line
        breaks between them. Raises `DiskError`."""
        self.file.append(line + b"\n")

    async def commit(self) -> None:
        """Wait until everything appended so far is on the disk."""
        await self.file.commit()

    def close(self) -> None:
        """Flush and close the file. Idempotent."""
        self.file.close()


class EventStream:
    """Writes the journal events of a run to the journal, and hands every event to the subscribers in the order of
    subscription."""

    def __init__(self, journal: Journal, *subscribers: Subscriber) -> None:
        self.journal = journal
        self.in_flight: InFlight = {}
        self._handlers: dict[type, list[Callable[[Any], None]]] = {}
        self._reported: set[str] = set()
        for each in subscribers:
            self.subscribe(each)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Add a subscriber after the existing ones."""
        for kind, handler in subscriber.handlers().items():
            self._handlers.setdefault(kind, []).append(handler)

    def emit(self, event: JournalEvent | MemoryEvent) -> None:
        """Write the event if it is a journal event, and announce it. Raises `DiskError` if the event cannot be
        written."""
        if isinstance(event, JournalEvent):
            event = self.journal.append(event)
        self.announce(event)

    def announce(self, event: JournalEvent | MemoryEvent) -> None:
        """Hand an event to the subscribers without writing it to the journal."""
        for handler in self._handlers.get(type(event), ()):
            handler(event)

    def hears(self, kind: type) -> bool:
        """Return whether a subscriber handles events of this class."""
        return bool(self._handlers.get(kind))

    def alive(self, event: Alive) -> None:
        """Update `in_flight` and announce the sign of life."""
        self.in_flight.pop(event.name, None)  # moves the entry to the end, so that the longest idle comes first
        if event.stage:
            self.in_flight[event.name] = event.stage, time.time()
        self.announce(event)

    def unreported(self, names: Iterable[str]) -> list[str]:
        """Return the names that no earlier call has returned, so that each name is reported only once per run."""
        fresh = [name for name in names if name not in self._reported]
        self._reported.update(fresh)
        return fresh

    def note(self, text: str) -> None:
        """Announce a `Note`."""
        self.announce(Note(text))


def is_whole(line: bytes) -> bool:
    """Return whether a line of a journal is complete and readable."""
    try:
        _decoder.decode(line)
    except UNREADABLE:
        return False
    return line.endswith(b"\n")


def damaged(path: Path, number: int, error: object) -> ConfigError:
    """Return the error for a journal in which a line other than the last is damaged."""
    if number == 1:
        return ConfigError(f"{path} does not start like a journal: {error}")
    return ConfigError(
        f"{path}: line {number} is damaged: {error}. Restore the file from a backup, or keep only the lines before the "
        f"damage (head -n {number - 1}) and roll out the rest again with --resume"
    )


def read_journal(path: Path) -> Iterator[AnyJournalEvent]:
    """Yield the events of a journal, without a torn last line. Raises `ConfigError` for damage anywhere else."""
    return (event for _, event in placed_events(path))


def placed_events(path: Path) -> Iterator[tuple[int, AnyJournalEvent]]:
    """Yield what `read_journal` does, each event with the file offset of its line, in bytes."""
    with path.open("rb") as lines:
        torn: tuple[int, Exception] | None = None
        place, following = 0, 0
        for number, line in enumerate(lines_of(lines), 1):
            if torn is not None:
                raise damaged(path, *torn)
            place, following = following, following + len(line)
            try:
                event = _decoder.decode(line)
            except UNREADABLE as error:
                torn = (number, error)
                continue
            if isinstance(event, RunStarted):
                check_schema(event.schema, path)
            yield place, event


def event_at(path: Path, lines: IO[bytes], place: int) -> AnyJournalEvent:
    """Return the event whose line begins at this offset of a journal that is open as `lines`. Raises `ConfigError`."""
    lines.seek(place)
    try:
        return _decoder.decode(lines.readline())
    except UNREADABLE as error:
        raise ConfigError(f"{path}: the line at byte {place} cannot be read, or has changed: {error}") from error


def check_schema(schema: str, path: Path) -> None:
    """Raise `ConfigError` for a journal in a format that this version does not read."""
    if schema not in (JOURNAL_SCHEMA, FIRST_SCHEMA):
        raise ConfigError(
            f"{path} is a journal in the format {schema!r}; this version reads {JOURNAL_SCHEMA!r} and older"
        )


class _Settings(msgspec.Struct):
    group_size: int | None = None


class _Config(msgspec.Struct):
    """The form of recorded settings, as far as readers of a run rely on it."""

    command: str | None = None
    environment: str | None = None
    folder: str | None = None
    env: _Settings | None = None
    openai: list[dict[str, Any]] | None = None
    sources: dict[str, str] | None = None
    provenance: dict[str, Any] | None = None


_LATEST = 1 << 37  # the year 6325; readers show times as dates


def check_config(event: JournalEvent) -> None:
    """Raise `ValueError` if the settings or the time of the first line of a run, or of one of its parts, are not in the
    form that runs write."""
    if not 0 <= event.at < _LATEST:
        raise ValueError(f"its time is {event.at}")
    if isinstance(event, RunStarted | RunResumed):
        msgspec.convert(event.config, _Config)


def without_secrets(values: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the configuration with the values of secret settings replaced by `***` and secrets in other strings
    redacted, at any depth."""
    return {key: "***" if value and is_secret(key) else _cleaned(value) for key, value in values.items()}


def _cleaned(value: JSON) -> JSON:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list):
        return [_cleaned(entry) for entry in value]
    return redacted(value) if isinstance(value, str) else value
