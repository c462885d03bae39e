"""Reads the groups of a run back from its journal, with the scores that `palaestra grade` gave.

Groups come in the order of their numbers, although they are interleaved in the journal. Only one group at a time is in
memory. Groups that a killed run did not finish are counted and left out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from palaestra.rollouts.events import AnyJournalEvent, GroupEnded, GroupStarted, RolloutEnded, RunResumed, RunStarted
from palaestra.rollouts.journal.journal import check_config, check_schema, damaged, event_at
from palaestra.rollouts.journal.views import LineHead, PartHead, decode_head, line_heads
from palaestra.rollouts.records import Group
from palaestra.rollouts.regraded import graded, read_grades
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.io.durable_files import UNREADABLE, lines_of
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from palaestra.rollouts.export.exporter import ExportMeta

JOURNAL_NAME = "journal.jsonl"

RUNS = Path("runs")
"""The default folder of runs."""

BATCHES = Path("data")
"""The folder of named batches, next to `RUNS`."""

LAST = "last"

SET_NAME = "set.json"
"""The file that lists the runs of an evaluation set, in the folder of the set."""

WORLD_NAME = "world.jsonl"
"""The file with the replies of tools that reach outside, in the folder of the run."""

FORK_NAME = "fork.json"
"""The file with what a counterfactual run continues, in the folder of the run."""


class _Place(msgspec.Struct, array_like=True):
    """The file offsets of the lines that start and end a group and, by index, of its rollouts' lines."""

    started: int
    rollouts: dict[int, int] = {}
    ended: int = 0


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Place).decode
_events: msgspec.json.Decoder[AnyJournalEvent] = msgspec.json.Decoder(AnyJournalEvent)


class Recording:
    """An index of one run's journal at the time of creation. It can be iterated over repeatedly.

    Its rollouts have the scores that `palaestra grade` gave (`grades`), where there are any, or if `as_recorded`, those
    of the journal. A run may have very many groups, so the offsets of each finished group are packed into a few bytes.
    """

    def __init__(self, path: Path, *, as_recorded: bool = False) -> None:
        self.path = path
        self.grades = {} if as_recorded else read_grades(path.parent)
        from palaestra.rollouts.export.exporter import ExportMeta  # imported here, because a run reads no recording

        self.meta = ExportMeta()
        self._first: int | None = None
        self._begun: dict[str, _Place] = {}
        self._ended: dict[int, bytes] = {}
        self._index()

    @property
    def finished(self) -> int:
        """The number of finished groups."""
        return len(self._ended)

    @property
    def unfinished(self) -> int:
        """The number of groups that started but did not end."""
        return len(self._begun)

    @property
    def unfinished_tasks(self) -> list[str]:
        """The ids of the tasks whose groups started but did not end."""
        with self.path.open("rb") as file:
            started = [self._event(file, place.started) for place in self._begun.values()]
        return [each.group.task_id for each in started if isinstance(each, GroupStarted)]

    def __iter__(self) -> Iterator[Group]:
        """Yield the finished groups in the order of their numbers, each with its trajectories in index order."""
        with self.path.open("rb") as file:
            for number in sorted(self._ended):
                yield self._group(file, number)

    def tools(self) -> list[dict[str, JSON]]:
        """Return the tool schemas of the group that started first; empty if no group has started."""
        if self._first is None:
            return []
        with self.path.open("rb") as file:
            started = self._event(file, self._first)
        assert isinstance(started, GroupStarted)
        return started.group.tools

    def group(self, group_id: str) -> Group | None:
        """Return the finished group with this id, or None."""
        return self.numbered(self._by_id.get(group_id, -1))

    def numbered(self, number: int) -> Group | None:
        """Return the finished group of the task with this number, or None."""
        if number not in self._ended:
            return None
        with self.path.open("rb") as file:
            return self._group(file, number)

    @property
    def numbers(self) -> Collection[int]:
        """The numbers of the tasks whose groups finished."""
        return self._ended.keys()

    @property
    def last(self) -> int:
        """The highest number of a finished group, or -1."""
        return max(self._ended, default=-1)

    @cached_property
    def _by_id(self) -> dict[str, int]:
        """The number of each finished group by its id, computed on first use, because most readers do not need it."""
        numbers: dict[str, int] = {}
        with self.path.open("rb") as file:
            for number, packed in self._ended.items():
                numbers[self._group_id(file, _unpack(packed))] = number
        return numbers

    def _index(self) -> None:
        """Index every line except a torn last one. Raises `ConfigError` for damage anywhere else."""
        place, torn = 0, (0, "")
        with self.path.open("rb") as file:
            for number, line in enumerate(lines_of(file), 1):
                if torn[0]:
                    raise damaged(self.path, *torn)
                try:
                    self._index_line(decode_head(line), place, line)
                except (*UNREADABLE, ValueError) as error:
                    torn = number, str(error)
                except KeyError as group:
                    torn = number, f"it is about group {group}, which no earlier line starts"
                place += len(line)
        if not self.meta.run_id:
            raise ConfigError(f"{self.path} does not start like a journal: it does not name a run")

    def _index_line(self, head: LineHead, place: int, line: bytes) -> None:
        if head.event == "run" and not self.meta.run_id:
            self.meta = _meta(line, self.path)
        elif head.event == "resume":
            resumed = _events.decode(line)
            check_config(resumed)
            if isinstance(resumed, RunResumed) and resumed.config:  # the settings of the latest part count
                self.meta = replace(self.meta, config=resumed.config)
        elif head.event == "group" and head.group:
            if self._first is None:
                self._first = place
            # A resumed run starts the group again, and rollouts that had finished still count.
            before = self._begun.get(head.group.group_id) or self._reopened(head.group)
            self._begun[head.group.group_id] = _Place(place, before.rollouts)
        elif head.event == "rollout" and head.trajectory:
            self._begun[head.trajectory.group_id].rollouts[head.trajectory.index] = place
        elif head.event == "group_end":
            ended = self._begun.pop(head.group_id)
            ended.ended = place
            if head.number in self._ended:
                raise ValueError(f"group {head.group_id!r} has number {head.number}, which belongs to another group")
            self._ended[head.number] = _pack(ended)

    def _reopened(self, group: PartHead) -> _Place:
        """Return the file offsets of a group that ended and starts again, or empty offsets. Raises `ValueError` if
        another group has its number."""
        packed = self._ended.pop(group.number, None)
        if packed is None:
            return _Place(0)
        before = _unpack(packed)
        with self.path.open("rb") as file:
            was = self._group_id(file, before)
        if was != group.group_id:
            raise ValueError(f"groups {was!r} and {group.group_id!r} have the number {group.number}")
        return before

    def _group_id(self, file: IO[bytes], place: _Place) -> str:
        file.seek(place.ended)
        return decode_head(file.readline()).group_id

    def _group(self, file: IO[bytes], number: int) -> Group:
        place = _unpack(self._ended[number])
        started, ended = self._event(file, place.started), self._event(file, place.ended)
        assert isinstance(started, GroupStarted)
        assert isinstance(ended, GroupEnded)
        group = started.group
        group.error, group.blame = ended.error, ended.blame or group.blame
        for _, at in sorted(place.rollouts.items()):
            event = self._event(file, at)
            assert isinstance(event, RolloutEnded)
            group.trajectories.append(event.trajectory)
        return graded(group, self.grades)

    def _event(self, file: IO[bytes], place: int) -> AnyJournalEvent:
        return event_at(self.path, file, place)


def _meta(line: bytes, path: Path) -> ExportMeta:
    from palaestra.rollouts.export.exporter import ExportMeta  # imported here, as above

    started = _events.decode(line)
    assert isinstance(started, RunStarted)
    check_schema(started.schema, path)
    check_config(started)
    return ExportMeta(
        run_id=started.run_id,
        env=started.env,
        model=started.model,
        seed=started.seed,
        started_at=started.at,
        config=started.config,
    )


def open_recording(run: str | Path) -> Recording:
    """Return the recording of a run, named as in `find_run`. Raises `ConfigError` if there is none."""
    return Recording(journal_of(run))


def journal_of(run: str | Path) -> Path:
    """Return the journal of a run that is named as in `find_run`, or `run` itself if it is a journal. Raises
    `ConfigError`."""
    folder = find_run(run)
    path = folder / JOURNAL_NAME if folder.is_dir() else folder
    if (folder / SET_NAME).is_file():
        runs = ", ".join(run_name(each) for each in reversed(list_runs(folder))) or "none has begun"
        raise ConfigError(f"{folder} is an evaluation set: name one of its runs, {runs}")
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {JOURNAL_NAME}{_latest(folder)}")
    return path


def find_rollout(journal: Path, rollout: str) -> str:
    """Return the id of the one rollout of a journal that has ended with this id, or whose id begins with it, or ends
    with it after the number of the task. Raises `ConfigError` if there is none, or more than one."""
    heads = (head for head in line_heads(journal) if head.event == "rollout")
    found = dict.fromkeys(head.trajectory.rollout_id for head in heads if head.trajectory is not None)
    if rollout in found:
        return rollout
    # Ids are long; a person types their beginning, or the end that the viewer shows.
    near = [each for each in found if each.startswith(rollout) or each.endswith((f"/{rollout}", f"-{rollout}"))]
    if len(near) == 1:
        return near[0]
    named = f"{', '.join([*(near or found)][:5])}{', …' if len(near or found) > 5 else ''}"
    if near:
        raise ConfigError(f"{rollout!r} names {plural(len(near), 'rollout')}: {named}")
    raise ConfigError(
        f"{journal.parent} has no rollout {rollout!r} that has ended{f'; it has {named}' if found else ''}"
    )


def find_run(run: str | Path, *, root: str | Path = RUNS) -> Path:
    """Return the folder of a run. A run is named by a path, by `last` (or `last:2` for the run before the last), by the
    name of a batch, by the beginning or the end of its id, or by SET/RUN in an evaluation set; a set is named by the
    beginning of its name. An existing path is returned as it is.

    Raises `ConfigError` if no run matches, if several do, or if `run` is the path of a folder that contains FIFOs or
    devices."""
    text = str(run)
    # A path first, so that a folder called `last`, or like another run's id, can be named.
    if Path(text).exists():
        return _of_files(Path(text))
    folders = list_runs(root)
    if text == LAST or text.startswith(f"{LAST}:"):
        return _latest_run(text, folders, root)
    sets = [each.parent for each in sorted(Path(root).glob(f"*/{SET_NAME}")) if each.parent.name.startswith(text)]
    if len(sets) == 1 and text.startswith("set--"):
        return sets[0]
    # Runs of two evaluation sets may have the same name; their names with that of the set differ.
    found = (
        [each for each in folders if _long_name(each) == text]
        or [each for each in folders if each.name == text]
        or [each for each in folders if _is_called(each, text)]
    )
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(map(run_name, found[:5]))
        raise ConfigError(f"{text!r} matches {plural(len(found), 'run')}: {names}{', …' if len(found) > 5 else ''}")
    raise ConfigError(f"there is no run folder {text}; specify the folder of a run, its id or `last`{_latest(Path())}")


def _latest_run(text: str, folders: Sequence[Path], root: str | Path) -> Path:
    """Return the run that `last` or `last:N` names. Raises `ConfigError` if there are fewer runs."""
    place = text.removeprefix(LAST).removeprefix(":") or "1"
    if not place.isdecimal() or not 1 <= int(place) <= len(folders):
        raise ConfigError(f"{text!r} does not name a run: {Path(root).resolve()} has {plural(len(folders), 'run')}")
    return folders[int(place) - 1]


def _of_files(path: Path) -> Path:
    """Return the path unchanged. Raises `ConfigError` if a file in it is a FIFO or a device, which would block a
    reader."""
    for entry in path.glob("*") if path.is_dir() else ():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise ConfigError(f"{entry} is neither a file nor a directory, so no run wrote it. Remove it")
    return path


def list_runs(root: str | Path = RUNS) -> list[Path]:
    """Return the folders of the runs below `root`, the latest first. If `root` is `RUNS`, the named batches in
    `BATCHES` are included."""
    # A run whose folder was chosen with `--out` may lie beside the folders of environments, as in an evaluation set.
    journals = [*Path(root).glob(f"*/{JOURNAL_NAME}"), *Path(root).glob(f"*/*/{JOURNAL_NAME}")]
    if Path(root) == RUNS:
        journals += BATCHES.glob(f"*/{JOURNAL_NAME}")
    return sorted((path.parent for path in journals), key=_began, reverse=True)


def _began(folder: Path) -> tuple[str, float]:
    """Return the sort key by start time: the second in the run's id, or that of the settings file if the id has none,
    and then the time of the settings file."""
    path = folder / "config.json"
    written = path.stat().st_mtime if path.is_file() else 0.0
    second = folder.name[:16]
    if not re.fullmatch(r"\d{8}T\d{6}Z", second):
        second = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(written))
    return second, written


def began(folder: Path) -> str:
    """Return the second in which the run in a folder began, as in its id."""
    return _began(folder)[0]


def run_name(folder: Path) -> str:
    """Return the name by which commands find a run: that of its folder, after the name of the evaluation set that the
    run is in."""
    return _long_name(folder) if (folder.parent / SET_NAME).is_file() else folder.name


def _long_name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _is_called(folder: Path, text: str) -> bool:
    return folder.name.startswith(text) or _long_name(folder).startswith(text) or folder.name.endswith(f"-{text}")


def _latest(folder: Path) -> str:
    """Return a hint for an error message: the latest run below `folder`; empty if there is none."""
    found = [
        *folder.glob(f"*/{JOURNAL_NAME}"),
        *folder.glob(f"*/*/{JOURNAL_NAME}"),
        *folder.glob(f"*/*/*/{JOURNAL_NAME}"),
    ]
    if not found:
        return ""
    return f". The latest run found is {max(found, key=lambda path: path.stat().st_mtime).parent}"
