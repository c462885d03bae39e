"""What people say about the rollouts of a run: tags, notes, and a verdict such as `hack` or `grader_mistake`.

Annotations are in a file of their own in the run's folder, so the journal stays as it was. The file is append-only:
each line adds to what the earlier lines say, and names its author and time. Concurrent writers may add lines; a torn or
damaged line is counted and left out. A run's folder may come from another person, so a link or a device is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from palaestra.rollouts.journal.journal import encoded
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import UNREADABLE, lines_of, open_regular, writing
from palaestra_slots.core.types import JSON

ANNOTATIONS_NAME = "annotations.jsonl"
ANNOTATION_SCHEMA = "palaestra.annotation/1"

VERDICTS: Mapping[str, str] = {
    "hack": "The reward was not earned: the rollout games the check.",
    "grader_mistake": "The check is wrong about this rollout.",
    "task_mistake": "The task itself is wrong or unclear.",
    "correct": "Somebody has looked at the rollout, and its reward is right.",
}
"""The verdicts of people, with their meaning."""

NO_VERDICT = "none"
"""Withdraws the verdict."""

MOST_NOTE_CHARS, MOST_TAGS = 10_000, 20
_MOST_BYTES = 64 << 20
_TAG = re.compile(r"[\w.:+-]{1,60}")


class Annotation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line: what an author added about a rollout. `untag` takes tags back; `verdict` replaces the earlier one, and
    is `none` to withdraw it. `at` is in seconds since the epoch."""

    schema: str
    at: float
    author: str
    rollout_id: str
    tags: list[str] = []
    untag: list[str] = []
    note: str = ""
    verdict: str = ""


class JudgementNote(msgspec.Struct, frozen=True):
    """A note with its author and time."""

    text: str
    author: str
    at: float


@dataclass(slots=True)
class Judgement:
    """All that people have said about one rollout. `author` and `at` are those of the latest line."""

    tags: list[str] = field(default_factory=list)
    verdict: str = ""
    verdict_author: str = ""
    notes: list[JudgementNote] = field(default_factory=list)
    author: str = ""
    at: float = 0.0

    def take(self, line: Annotation) -> None:
        """Add one line."""
        self.tags = [tag for tag in self.tags if tag not in line.untag]
        self.tags += [tag for tag in dict.fromkeys(line.tags) if tag not in self.tags]
        if line.note:
            self.notes.append(JudgementNote(line.note, line.author, line.at))
        if line.verdict:
            self.verdict = "" if line.verdict == NO_VERDICT else line.verdict
            self.verdict_author = line.author if self.verdict else ""
        self.author, self.at = line.author, line.at

    def to_dict(self) -> dict[str, JSON]:
        """Return what the lines say as JSON data, without empty parts."""
        notes = [msgspec.to_builtins(note) for note in self.notes]
        found = {"tags": self.tags, "verdict": self.verdict, "verdict_author": self.verdict_author, "notes": notes}
        return {name: value for name, value in found.items() if value}


@dataclass(slots=True)
class Judgements:
    """The judgements of a run by rollout id. `damaged` counts the lines that cannot be read."""

    by_rollout: dict[str, Judgement] = field(default_factory=dict)
    damaged: int = 0


def read_annotations(folder: Path) -> Judgements:
    """Return the judgements of the run in this folder. Raises `ConfigError` if the file cannot be read."""
    found = Judgements()
    for line in appended_lines(folder / ANNOTATIONS_NAME):
        _add_line(found, line)
    return found


def _add_line(found: Judgements, line: bytes) -> None:
    try:
        said = _lines.decode(line)
    except UNREADABLE:
        found.damaged += 1
        return
    if said.schema != ANNOTATION_SCHEMA or annotation_problem(said):
        found.damaged += 1
        return
    found.by_rollout.setdefault(said.rollout_id, Judgement()).take(said)


_lines = msgspec.json.Decoder(Annotation)


def annotation(
    rollout_id: str,
    author: str,
    *,
    tags: Sequence[str] = (),
    untag: Sequence[str] = (),
    note: str = "",
    verdict: str = "",
) -> Annotation:
    """Return a line that says this now. Raises `ConfigError` for a wrong tag or verdict, or if it says nothing."""
    said = Annotation(
        schema=ANNOTATION_SCHEMA,
        at=time.time(),
        author=author,
        rollout_id=rollout_id,
        tags=[*tags],
        untag=[*untag],
        note=note.strip(),
        verdict=verdict,
    )
    if wrong := annotation_problem(said):
        raise ConfigError(wrong)
    if not (said.tags or said.untag or said.note or said.verdict):
        raise ConfigError("the annotation is empty: give it a tag, a note or a verdict")
    return said


def is_tag(text: str) -> bool:
    """Return whether a text can be a tag."""
    return _TAG.fullmatch(text) is not None


def annotation_problem(said: Annotation) -> str:
    """Return the reason why a line is not an annotation; empty if it is one."""
    for tag in (*said.tags, *said.untag):
        if not is_tag(tag):
            return f"{tag[:80]!r} is not a tag: a tag has 1 to 60 letters, digits and the characters _ . : + -"
    if len(said.tags) + len(said.untag) > MOST_TAGS:
        return f"an annotation can have at most {MOST_TAGS} tags"
    if len(said.note) > MOST_NOTE_CHARS:
        return f"a note can have at most {MOST_NOTE_CHARS} characters, and this one has {len(said.note)}"
    if said.verdict not in ("", NO_VERDICT, *VERDICTS):
        return f"{said.verdict[:80]!r} is not a verdict; use {', '.join(VERDICTS)}, or {NO_VERDICT} to withdraw it"
    if not 0 < len(said.author) <= 200:
        return "an annotation needs the name of its author, with at most 200 characters"
    return ""


def write_annotations(folder: Path, said: Sequence[Annotation]) -> None:
    """Append lines to the file of the run in this folder. Other processes may write at the same time. Raises
    `ConfigError` if the file is a link, a device or too large, and `DiskError` if it cannot be written."""
    append_lines(folder / ANNOTATIONS_NAME, b"".join(encoded(each) + b"\n" for each in said))


def appended_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that `append_lines` writes; none if the file does not exist. Raises `ConfigError` if it
    cannot be read."""
    try:
        with open_regular(path) as file:
            yield from lines_of(file)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def append_lines(path: Path, lines: bytes) -> None:
    """Append whole lines to a file that other processes append to as well. A torn last line of another writer is
    ended first. Raises `ConfigError` if the file is a link, a device or too large, and `DiskError` if it cannot be
    written."""
    # For reading too, because the last byte is looked at. O_NONBLOCK and O_NOCTTY: a FIFO or a terminal in a folder of
    # another person must neither hang the process nor become its terminal.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    # For the hint in the message: O_NOFOLLOW refuses a link too, also one that appears only now.
    if path.is_symlink():
        raise ConfigError(f"{path} is a link, so it is not written: remove it")
    with writing(path):
        fd = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"{path} is not a regular file, so it is not written: remove it")
        with writing(path):
            with contextlib.suppress(OSError):  # a file system without locks; short appends are whole there too
                fcntl.flock(fd, fcntl.LOCK_EX)
            size = os.fstat(fd).st_size
            if size + len(lines) > _MOST_BYTES:
                raise ConfigError(
                    f"{path} would have more than {_MOST_BYTES >> 20} MiB; move it away to start a new one"
                )
            torn = size and os.pread(fd, 1, size - 1) != b"\n"
            _write_all(fd, b"\n" + lines if torn else lines, size)
            os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes, size: int) -> None:
    """Write all bytes, or none of them."""
    written = 0
    try:
        while written < len(data):
            written += os.write(fd, data[written:])
    except OSError:
        os.ftruncate(fd, size)
        raise
