"""Files of other programs as runs: a file is read once, in slices, into a journal of its own, which is then indexed.

The journal is in a folder of its own in the user's cache, below that of the indexes, or in a temporary folder. What
people have said about the rollouts, in the file and in the viewer, is next to it. So a rollout of a large log is found
by its offset like those of a run, and the second time the log opens without being read. The folder's name depends on
the file's path, size and time, so a file that has changed is read again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from palaestra.rollouts.annotations import ANNOTATIONS_NAME, append_lines
from palaestra.rollouts.events import AnyJournalEvent, GroupEnded, GroupStarted, RolloutEnded, RunEnded, RunStarted
from palaestra.rollouts.export.atropos import encode_line
from palaestra.rollouts.journal.journal import encoded
from palaestra.rollouts.journal.reader import JOURNAL_NAME
from palaestra.rollouts.records import Group
from palaestra.rollouts.regraded import GRADES_NAME
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import private, unfinished_name
from palaestra_slots.core.types import JSON
from palaestra_view.imports.files import log_files, open_source
from palaestra_view.imports.source import Imported, Source
from palaestra_view.run_index import COMMAND, IMPORTS, RunIndex

_FORMAT = "2"
_MOST_SAID_BYTES = 16 << 20
_UNREADABLE = b"\x00\n"
"""A line that the index counts as damaged: it stands for a record that could not be read."""


class ImportedIndex(RunIndex):
    """The index of a file or folder of another program. `store` is as in `RunIndex`. Raises `ConfigError` if the format
    is unknown, and `OSError`."""

    def __init__(self, path: Path, store: Path | None = None) -> None:
        if store is None:
            folder = Path(tempfile.mkdtemp(prefix="palaestra-view-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        else:
            folder = store / IMPORTS / _import_name(path)
        journal = folder / JOURNAL_NAME
        self._writer: _Writer | None = None
        if not journal.is_file():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writer = _Writer(path, journal)
        super().__init__(self._writer.path if self._writer else journal, None if self._writer else store)
        self.folder = path

    def close(self) -> None:
        """Close the database, and remove a journal that is not complete. Idempotent."""
        super().close()
        if self._writer is not None:
            self._writer.discard()

    def update(self, seconds: float = 0.1) -> bool:
        """Read more of the file, for about `seconds`, and index it. Returns whether there was anything to read. Raises
        `ConfigError` if nothing in the file can be read."""
        reading = self._writer is not None
        if self._writer is not None and self._writer.write(seconds):
            self.path = self._writer.finish()
            self._writer = None
        return super().update(seconds) or reading

    @property
    def progress(self) -> tuple[int, int]:
        """How many bytes of the file are read, and how many it has."""
        if self._writer is None:
            return super().progress
        return self._writer.source.place, self._writer.source.size


class _Writer:
    """Writes the journal of a source. `path` is its name until it is complete."""

    def __init__(self, source: Path, journal: Path) -> None:
        self.source: Source = open_source(source)
        self.path = unfinished_name(journal)
        self._final = journal
        self._shown = source
        self._said, self._grades = bytearray(), bytearray()
        facts = self.source.facts()
        config: dict[str, JSON] = {
            "command": COMMAND,
            "env": {"group_size": facts.group_size},
            "provenance": {"file": str(source), "format": facts.format, **facts.provenance},
        }
        self._file = open(self.path, "xb", opener=private)  # noqa: SIM115 - closed in `finish` and `discard`
        started = RunStarted(
            at=facts.started_at, run_id=facts.run_id, env=facts.env, model=facts.model, seed=0, config=config
        )
        self._write_event(started)
        self._file.flush()
        self._events = self._read_events()

    def write(self, seconds: float) -> bool:
        """Write for about `seconds`, and return whether the journal is complete."""
        end = time.monotonic() + seconds
        for event in self._events:
            if isinstance(event, bytes):
                self._file.write(event)
            else:
                self._write_event(event)
            if time.monotonic() > end:
                self._file.flush()
                return False
        return True

    def finish(self) -> Path:
        """Give the journal its name, and return it."""
        self._file.close()
        if not self._final.exists():  # another viewer may have been faster
            for name, lines in ((ANNOTATIONS_NAME, self._said), (GRADES_NAME, self._grades)):
                if lines:
                    append_lines(self._final.with_name(name), bytes(lines))
        self.path.replace(self._final)
        return self._final

    def discard(self) -> None:
        """Remove the journal, and its folder if there is nothing else in it. Idempotent."""
        self._file.close()
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def _read_events(self) -> Iterator[AnyJournalEvent | bytes]:
        """Yield the events. Raises `ConfigError` if no rollout can be read."""
        groups, problem, count = _Groups(), "", 0
        for each in self.source.rollouts():
            if isinstance(each, str):
                problem = problem or each
                yield _UNREADABLE
                continue
            started = groups.place(each)
            self._judge(each)
            if started is not None:
                yield GroupStarted(group=started)
            count += 1
            yield RolloutEnded(trajectory=each.trajectory)
        if not count:
            raise ConfigError(f"{self._shown} has nothing that can be shown{': ' if problem else ''}{problem}")
        for number, group_id in enumerate(groups.numbers):
            yield GroupEnded(group_id=group_id, number=number)
        yield RunEnded(reason="done")

    def _judge(self, one: Imported) -> None:
        """Keep what the file says about the judgements of a rollout."""
        for line in one.said:
            line.rollout_id = one.trajectory.rollout_id
            if len(self._said) < _MOST_SAID_BYTES:
                self._said += encoded(line) + b"\n"
        if one.grade is not None and len(self._grades) < _MOST_SAID_BYTES:
            one.grade.rollout_id = one.trajectory.rollout_id
            self._grades += encoded(one.grade) + b"\n"

    def _write_event(self, event: AnyJournalEvent) -> None:
        self._file.write(encode_line(msgspec.to_builtins(event)))


class _Groups:
    """Gives each rollout its group, index and id. Rollouts of the same task are a group, unless the file names its
    groups. `numbers` has the number of each group."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._of_task: dict[str, str] = {}
        self._taken: dict[str, set[int]] = {}

    def place(self, one: Imported) -> Group | None:
        """Fill in the fields that the file did not give, and return the group if it is new."""
        trajectory = one.trajectory
        given = trajectory.group_id
        trajectory.task_id = trajectory.task_id or given or "conversation"
        if not given:
            given = self._of_task.setdefault(trajectory.task_id, f"{len(self.numbers):06}-{trajectory.task_id}")
        trajectory.group_id = given
        fresh = given not in self.numbers
        number = self.numbers.setdefault(given, len(self.numbers))
        taken = self._taken.setdefault(given, set())
        if trajectory.index < 0 or trajectory.index in taken:
            trajectory.index = next(each for each in range(len(taken) + 1) if each not in taken)
        taken.add(trajectory.index)
        trajectory.rollout_id = f"{given}/{trajectory.index}"
        if not fresh:
            return None
        return Group(group_id=given, number=number, task_id=trajectory.task_id, tools=one.tools)


def _import_name(path: Path) -> str:
    """Return a name for the journal of a file in its present state."""
    made = hashlib.blake2b(digest_size=16)
    made.update(f"{_FORMAT}\0".encode() + os.fsencode(path.resolve()))
    for each in [path] if path.is_file() else log_files(path):
        facts = each.stat()
        made.update(f"\0{facts.st_size} {facts.st_mtime_ns}".encode())
    return made.hexdigest()
