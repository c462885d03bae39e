"""Reads the groups of a run back from its journal.

Groups come in item order, although they are interleaved in the journal, and only one at a time is in memory. Groups
that a killed run did not finish are counted and left out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.exits import plural
from palaestra.core.types import JSON
from palaestra.rollouts.events import AnyJournalEvent, GroupEnded, GroupStarted, RolloutEnded, RunResumed, RunStarted
from palaestra.rollouts.export.exporter import ExportMeta
from palaestra.rollouts.journal.journal import check_schema, damaged
from palaestra.rollouts.records import Group

JOURNAL_NAME = "journal.jsonl"

RUNS = Path("runs")
"""The default folder of runs."""

BATCHES = Path("data")
"""The folder of batches that their users named, next to `RUNS`."""

LAST = "last"


class _Part(msgspec.Struct):
    group_id: str = ""
    index: int = 0


class _Head(msgspec.Struct):
    """The fields of a line that the index needs."""

    event: str = ""
    group_id: str = ""
    number: int = 0
    group: _Part | None = None
    trajectory: _Part | None = None


@dataclass(slots=True)
class _Place:
    """The offsets of a group's lines in the file."""

    started: int
    rollouts: dict[int, int] = field(default_factory=dict)
    ended: int | None = None
    number: int = 0


_heads = msgspec.json.Decoder(_Head)
_events: msgspec.json.Decoder[AnyJournalEvent] = msgspec.json.Decoder(AnyJournalEvent)


class Recording:
    """An index of one run's journal at the time of creation. It can be iterated over repeatedly."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta = ExportMeta()
        self._places: dict[str, _Place] = {}
        self._numbers: dict[int, str] = {}
        self._index()

    @property
    def finished(self) -> int:
        """The number of finished groups."""
        return sum(place.ended is not None for place in self._places.values())

    @property
    def unfinished(self) -> int:
        """The number of groups that started and did not end."""
        return len(self._places) - self.finished

    def __iter__(self) -> Iterator[Group]:
        """The finished groups, in item order, each with its trajectories in index order."""
        finished = [place for place in self._places.values() if place.ended is not None]
        with self.path.open("rb") as file:
            for place in sorted(finished, key=lambda each: each.number):
                yield self._group(file, place)

    def tools(self) -> list[dict[str, JSON]]:
        """The tool schemas of the group that started first; empty without any group."""
        if not self._places:
            return []
        with self.path.open("rb") as file:
            started = self._event(file, min(place.started for place in self._places.values()))
        assert isinstance(started, GroupStarted)
        return started.group.tools

    def group(self, group_id: str) -> Group | None:
        """The finished group with this id, or None."""
        place = self._places.get(group_id)
        if place is None or place.ended is None:
            return None
        with self.path.open("rb") as file:
            return self._group(file, place)

    def numbered(self, number: int) -> Group | None:
        """The finished group of the task with this number, or None."""
        return self.group(self._numbers.get(number, ""))

    @property
    def numbers(self) -> Mapping[int, str]:
        """The ids of the finished groups by the numbers of their tasks."""
        return self._numbers

    @property
    def last(self) -> int:
        """The highest number of a finished group, or -1."""
        return max(self._numbers, default=-1)

    def _index(self) -> None:
        """Index every line except a torn last one. Raises `ConfigError` for damage anywhere else."""
        place, torn = 0, (0, "")
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if torn[0]:
                    raise damaged(self.path, *torn)
                try:
                    self._note(_heads.decode(line), place, line)
                except msgspec.MsgspecError as error:
                    torn = number, str(error)
                except KeyError as group:
                    torn = number, f"it is about group {group}, which no earlier line starts"
                place += len(line)
        if not self.meta.run_id:
            raise ConfigError(f"{self.path} does not start like a journal: it names no run")

    def _note(self, head: _Head, place: int, line: bytes) -> None:
        if head.event == "run" and not self.meta.run_id:
            self.meta = _meta(line, self.path)
        elif head.event == "resume":
            resumed = _events.decode(line)
            if isinstance(resumed, RunResumed) and resumed.config:  # the run was extended
                self.meta = replace(self.meta, config=resumed.config)
        elif head.event == "group" and head.group:
            before = self._places.get(head.group.group_id)
            if before is not None and self._numbers.get(before.number) == head.group.group_id:
                del self._numbers[before.number]
            self._places[head.group.group_id] = _Place(place, before.rollouts if before is not None else {})
        elif head.event == "rollout" and head.trajectory:
            self._places[head.trajectory.group_id].rollouts[head.trajectory.index] = place
        elif head.event == "group_end":
            ended = self._places[head.group_id]
            ended.ended, ended.number = place, head.number
            self._numbers[head.number] = head.group_id

    def _group(self, file: IO[bytes], place: _Place) -> Group:
        started, ended = self._event(file, place.started), self._event(file, place.ended or 0)
        assert isinstance(started, GroupStarted)
        assert isinstance(ended, GroupEnded)
        group = started.group
        group.error = ended.error
        for _, at in sorted(place.rollouts.items()):
            event = self._event(file, at)
            assert isinstance(event, RolloutEnded)
            group.trajectories.append(event.trajectory)
        return group

    def _event(self, file: IO[bytes], place: int) -> AnyJournalEvent:
        file.seek(place)
        try:
            return _events.decode(file.readline())
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.path}: the line at byte {place} cannot be read: {error}") from error


def _meta(line: bytes, path: Path) -> ExportMeta:
    started = _events.decode(line)
    assert isinstance(started, RunStarted)
    check_schema(started.schema, path)
    return ExportMeta(
        run_id=started.run_id,
        env=started.env,
        model=started.model,
        seed=started.seed,
        started_at=started.at,
        config=started.config,
    )


def open_recording(run: str | Path) -> Recording:
    """The recording of a run, named as in `find_run`. Raises `ConfigError` if there is none."""
    return Recording(journal_of(run))


def journal_of(run: str | Path) -> Path:
    """The journal of a run that is named as in `find_run`, or `run` itself if it is a journal. Raises `ConfigError`."""
    folder = find_run(run)
    path = folder / JOURNAL_NAME if folder.is_dir() else folder
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {JOURNAL_NAME}{_latest(folder)}")
    return path


def find_run(run: str | Path, *, root: str | Path = RUNS) -> Path:
    """The folder of a run: a path, `last`, `last:2` for the one before, the name of a batch, or the beginning or end of
    an id. Raises `ConfigError` if no run or several match, and for a folder with FIFOs or devices."""
    text = str(run)
    if Path(text).exists():
        return _of_files(Path(text))
    folders = list_runs(root)
    if text == LAST or text.startswith(f"{LAST}:"):
        place = text.removeprefix(LAST).removeprefix(":") or "1"
        if not place.isdecimal() or not 1 <= int(place) <= len(folders):
            raise ConfigError(f"{text!r} names no run: there are {len(folders)} in {Path(root).resolve()}")
        return folders[int(place) - 1]
    found = [each for each in folders if each.name == text] or [each for each in folders if _is_called(each, text)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(str(each) for each in found[:5])
        raise ConfigError(f"{text!r} names {plural(len(found), 'run')}: {names}{', …' if len(found) > 5 else ''}")
    raise ConfigError(f"there is no run folder {text}: name the folder of a run, its id or `last`{_latest(Path())}")


def _of_files(path: Path) -> Path:
    """The path, if no file in it is a FIFO or a device, which would block a reader. Raises `ConfigError` otherwise."""
    for entry in path.glob("*") if path.is_dir() else ():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise ConfigError(f"{entry} is neither a file nor a directory, so no run wrote it")
    return path


def list_runs(root: str | Path = RUNS) -> list[Path]:
    """The folders of the runs below `root`, the latest first. Below `RUNS`, named batches are included."""
    journals = [*Path(root).glob(f"*/*/{JOURNAL_NAME}")]
    if Path(root) == RUNS:
        journals += BATCHES.glob(f"*/{JOURNAL_NAME}")
    return sorted((path.parent for path in journals), key=_began, reverse=True)


def _began(folder: Path) -> tuple[str, float]:
    """The sort key by start time: the second in the run's id, then the time of its settings file."""
    path = folder / "config.json"
    written = path.stat().st_mtime if path.is_file() else 0.0
    second = folder.name[:16]
    if not re.fullmatch(r"\d{8}T\d{6}Z", second):
        second = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(written))
    return second, written


def _is_called(folder: Path, text: str) -> bool:
    long = f"{folder.parent.name}/{folder.name}"
    return folder.name.startswith(text) or long.startswith(text) or folder.name.endswith(f"-{text}")


def _latest(folder: Path) -> str:
    """A hint for an error message: the latest run below `folder`."""
    found = [
        *folder.glob(f"*/{JOURNAL_NAME}"),
        *folder.glob(f"*/*/{JOURNAL_NAME}"),
        *folder.glob(f"*/*/*/{JOURNAL_NAME}"),
    ]
    if not found:
        return ""
    return f". The latest below is {max(found, key=lambda path: path.stat().st_mtime).parent}"
