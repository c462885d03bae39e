"""Reads from a run's journal the work that its earlier parts have done, so that a resumed run does not repeat it.

Finished groups are kept unchanged, and so are the finished rollouts of unfinished groups. A rollout that was cut off,
by the end of the run or by a failure of the model server, counts as missing; its recorded turns are in a `CutOff`, from
which it can continue.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from palaestra.agent.tool_calls import NOT_FINISHED
from palaestra.rollouts.events import (
    JOURNAL_SCHEMA,
    AnyJournalEvent,
    AttemptDiscarded,
    GroupEnded,
    GroupStarted,
    ReplyReceived,
    RolloutEnded,
    RolloutResumed,
    RunResumed,
    RunStarted,
    TurnTaken,
)
from palaestra.rollouts.journal.journal import event_at, is_whole, placed_events
from palaestra.rollouts.records import CUT_OFF, Beside, Group, Trajectory
from palaestra.rollouts.regraded import Grade, read_grades, with_grade
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import lines_of
from palaestra_slots.core.types import JSON, Blame, Outcome, Prices

_NOT_FINISHED = str(json.loads(NOT_FINISHED)["error"])


@dataclass(slots=True)
class CutOff:
    """An unfinished rollout: its turns and the hash of its tools.

    `replies` has the replies recorded in turns with sub-agents, each with the index of its turn in `events`. `ended` is
    the record of the latest attempt, or None if the run was killed before that record was written. In a counterfactual
    rollout, `events` begins with the `shared` turns of a rollout of another run.
    """

    tools_hash: str
    events: list[TurnTaken] = field(default_factory=list)
    replies: list[tuple[int, ReplyReceived]] = field(default_factory=list)
    ended: Trajectory | None = None
    shared: int = 0

    @property
    def own(self) -> list[TurnTaken]:
        """The turns that the rollout itself took."""
        first = self.shared + 1 if self.shared else 0
        return [event for event in self.events if event.turn >= first]

    def add(self, event: TurnTaken) -> None:
        """Add a turn, which replaces an earlier attempt at the same turn and all turns after that one. Opening messages
        replace nothing."""
        while event.turn and self.events and self.events[-1].turn >= event.turn:
            self.events.pop()
        # Their turns may just have been removed; they then belong to the turn that replaces these.
        self.replies = [(min(place, len(self.events)), reply) for place, reply in self.replies]
        self.events.append(event)

    @property
    def pending(self) -> list[ReplyReceived]:
        """The replies of the turn that was cut off."""
        return [reply for place, reply in self.replies if place >= len(self.events)]

    @property
    def model_calls(self) -> dict[str, float]:
        """The calls of models that the rollout's environment has made."""
        return next((event.model_calls for event in reversed(self.own) if event.model_calls), {})

    def paid(self) -> list[tuple[int, int]]:
        """Return the tokens read and written for each reply that the rollout itself got from the model."""
        others = [reply for place, reply in self.replies if reply.branch or place >= len(self.events)]
        return [event.tokens for event in self.own if event.turn] + [reply.tokens for reply in others]

    def record(self, rollout_id: str, group: Group, index: int, prices: Prices | None) -> Trajectory:
        """Return the record of an attempt that will not be continued, with its messages and its cost."""
        prompt_tokens, completion_tokens = map(sum, zip((0, 0), *self.paid(), strict=True))
        return Trajectory(
            rollout_id=rollout_id,
            group_id=group.group_id,
            task_id=group.task_id,
            index=index,
            messages=[message for event in self.events for message in event.messages],
            outcome=Outcome.CANCELLED,
            reward=None,
            blame=Blame.RUN,
            error="the run was killed",
            metrics=self.model_calls,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=prices.cost(prompt_tokens, completion_tokens) if prices else None,
            beside=Beside(started_at=(self.own or self.events)[0].at),
        )


class FinishedRollouts(Mapping[int, Trajectory]):
    """The finished rollouts of a group by index. Those of a journal are read from it whenever they are asked for, since
    the rollouts of a long run need more memory than a machine has."""

    def __init__(
        self,
        path: Path | None = None,
        found: Mapping[int, Trajectory | int] = MappingProxyType({}),
        grades: Mapping[str, Grade] = MappingProxyType({}),
    ) -> None:
        self._path = path
        self._grades = grades
        """The scores that `palaestra grade` gave to rollouts of the journal."""
        self._found = dict(found)
        """A rollout, or the file offset of its line."""

    def __getitem__(self, index: int) -> Trajectory:
        found = self._found[index]
        if isinstance(found, Trajectory):
            return found
        assert self._path is not None
        with self._path.open("rb") as journal:
            event = event_at(self._path, journal, found)
        if not isinstance(event, RolloutEnded):
            raise ConfigError(f"{self._path}: the line at byte {found} has changed: it ends no rollout any more")
        return with_grade(event.trajectory, self._grades)

    def __iter__(self) -> Iterator[int]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __reduce__(self) -> tuple[type[FinishedRollouts], tuple[None, dict[int, Trajectory]]]:
        return FinishedRollouts, (None, dict(self))  # the journal is not there on another machine

    def put(self, rollout: Trajectory, place: int | None) -> None:
        """Add a rollout, whose line begins at this offset of the journal."""
        self._found[rollout.index] = rollout if place is None else place

    def remove(self, index: int) -> None:
        """Remove a rollout, if it is there."""
        self._found.pop(index, None)


@dataclass(slots=True)
class EarlierWork:
    """The work of a run so far: `ended` by group number, `rollouts` by group id and index, `cut_off` by rollout id.

    The groups of `ended` are without their rollouts; `whole` adds them.

    `asked` has a checksum of each group's prompt by group id, and `tasks` has each task's id by its number. `run`
    is None for a new run.
    """

    run: RunStarted | None = None
    ended: dict[int, Group] = field(default_factory=dict)
    rollouts: dict[str, FinishedRollouts] = field(default_factory=dict)
    cut_off: dict[str, CutOff] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    tasks: dict[int, str] = field(default_factory=dict)

    def whole(self, number: int) -> Group:
        """Return an ended group with its rollouts, in the order of their indices."""
        group = self.ended[number]
        rollouts = self.rollouts[group.group_id]
        return msgspec.structs.replace(group, trajectories=[rollouts[index] for index in sorted(rollouts)])


def read_finished(path: Path) -> EarlierWork:
    """Return the work that a journal records. Raises `ConfigError` if the journal does not begin with a run, is
    damaged, or lacks lines."""
    events = placed_events(path)
    _, run = next(events, (0, None))
    if run is None:
        raise ConfigError(f"{path} is empty, so there is no run to resume")
    if not isinstance(run, RunStarted):
        raise ConfigError(f"{path} is not the journal of a run: its first line does not start one")
    reader = _Reader(EarlierWork(run), path)
    try:
        for place, event in events:
            reader.take(event, place)
    except KeyError as group:
        raise ConfigError(
            f"{path}: lines are missing: no line starts group {group}. Restore the file from a backup"
        ) from None
    return reader.settled()


def work_after(before: EarlierWork, events: Iterable[AnyJournalEvent]) -> EarlierWork:
    """Return the work of a part of a run that continued `before`, of which nothing else is used any more."""
    reader = _Reader(before)
    for event in events:
        reader.take(event)
    return reader.settled()


class _Reader:
    """Collects the work from the events of one run, which continue `work`. With a `path`, they are those of a
    journal."""

    def __init__(self, work: EarlierWork, path: Path | None = None) -> None:
        self._work = work
        self._path = path
        self._grades: Mapping[str, Grade] = {} if path is None else read_grades(path.parent)
        self._begun: dict[str, Group] = {}
        self._missing: dict[str, set[int]] = {}
        """The indices of rollouts that were cut off, by the id of their group."""
        self._tools: dict[str, list[dict[str, JSON]]] = {}
        """The tools of groups, by their hash: most groups have the same ones."""
        self._schema = JOURNAL_SCHEMA if work.run is None else work.run.schema

    def take(self, event: AnyJournalEvent, place: int | None = None) -> None:
        work, cut_off = self._work, self._work.cut_off
        match event:
            case RunResumed(schema=schema, config=config):
                if config and work.run is not None:  # the settings of the latest part
                    work.run = msgspec.structs.replace(work.run, config=config)
                if self._schema != JOURNAL_SCHEMA:
                    cut_off.clear()  # turns in the older format lack fields
                self._schema = schema
            case GroupStarted(group=group):
                self._take_group(group)
            case TurnTaken():
                self._take_turn(event)
            case ReplyReceived(rollout_id=rollout_id) if rollout_id in cut_off:
                cut_off[rollout_id].replies.append((len(cut_off[rollout_id].events), event))
            case RolloutResumed(rollout_id=rollout_id, anew=anew):
                if anew:
                    cut_off.pop(rollout_id, None)
                elif rollout_id in cut_off:
                    cut_off[rollout_id].ended = None  # the continued rollout now has its cost
            case AttemptDiscarded(trajectory=trajectory):
                cut_off.pop(trajectory.rollout_id, None)
            case RolloutEnded(trajectory=trajectory):
                self._take_end(trajectory, place)
            case GroupEnded(group_id=group_id, number=number):
                group = self._begun[group_id]
                group.error, group.blame = event.error, event.blame or group.blame
                work.ended[number] = group

    def _take_group(self, group: Group) -> None:
        work = self._work
        self._begun[group.group_id] = group
        if group.tools_hash:  # it is empty in a group that failed before it had tools
            group.tools = self._tools.setdefault(group.tools_hash, group.tools)
        work.asked[group.group_id] = group.asked
        work.tasks[group.number] = group.task_id
        work.rollouts.setdefault(group.group_id, FinishedRollouts(self._path, grades=self._grades))
        work.ended.pop(group.number, None)

    def _take_turn(self, event: TurnTaken) -> None:
        cut_off, name = self._work.cut_off, event.rollout_id
        begun = self._begun.get(name.rpartition("/")[0])
        # The opening messages have number 0. Without them, as after an older format, no turn can continue the rollout.
        if name not in cut_off and event.turn == 0 and begun is not None:
            cut_off[name] = CutOff(begun.tools_hash)
        if name in cut_off:
            cut_off[name].add(event)

    def _take_end(self, trajectory: Trajectory, place: int | None) -> None:
        cut_off, rollouts = self._work.cut_off, self._work.rollouts[trajectory.group_id]
        missing = self._missing.setdefault(trajectory.group_id, set())
        if trajectory.blame not in CUT_OFF:
            rollouts.put(trajectory, place)
            missing.discard(trajectory.index)
            cut_off.pop(trajectory.rollout_id, None)
            return
        rollouts.remove(trajectory.index)
        missing.add(trajectory.index)
        if trajectory.rollout_id in cut_off:
            cut_off[trajectory.rollout_id].ended = trajectory

    def settled(self) -> EarlierWork:
        """Return the work. A rollout that was cut off counts as missing, and its group as unfinished."""
        work = self._work
        for number, group in list(work.ended.items()):
            if self._missing.get(group.group_id):
                del work.ended[number]
        if self._schema != JOURNAL_SCHEMA:
            work.cut_off.clear()
        for cut_off in work.cut_off.values():
            # Nobody knows how far its call came, so the turn is taken again.
            if _in_the_middle(cut_off.events[-1]):
                cut_off.events.pop()
        return work


def taken_until(events: Sequence[TurnTaken], turn: int) -> list[TurnTaken]:
    """Return the events of the opening messages and of the turns up to `turn`."""
    return [event for event in events if event.turn <= turn]


def _in_the_middle(event: TurnTaken) -> bool:
    """Return whether a turn was cut off during a call, whose answer is then the marker `NOT_FINISHED`. The marker is
    searched for in the text of every message, because some agents write calls and answers as text."""
    return any(_NOT_FINISHED in str(message.get("content")) for message in event.messages)


def repair(path: Path) -> bool:
    """Remove a torn or damaged last line, since lines appended after it could not be read. Returns whether it removed
    one."""
    with path.open("r+b") as file:
        size, last = 0, b"\n"
        for line in lines_of(file):
            size, last = size + len(line), line
        if not size or is_whole(last):
            return False
        file.truncate(size - len(last))
    return True
