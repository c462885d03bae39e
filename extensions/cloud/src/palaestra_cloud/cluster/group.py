"""One group that a node plays. The driver writes what happens to the journal, and plays the group elsewhere if its node
is lost.

A group that moves is continued as `palaestra resume` continues a run: finished rollouts are kept, and the others
continue after their last turn in the journal. So a lost node costs no rollout, and scores none.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from palaestra.rollouts.environment import Environment
from palaestra.rollouts.events import (
    AnyJournalEvent,
    GroupBegun,
    GroupEnded,
    GroupStarted,
    JournalEvent,
    MemoryEvent,
    Note,
    RolloutEnded,
    RolloutKept,
    TokensSpent,
)
from palaestra.rollouts.records import CUT_OFF, Group, Trajectory
from palaestra.rollouts.resume.state import EarlierWork, work_after
from palaestra.rollouts.schedule import Places
from palaestra.rollouts.spec import RunContext
from palaestra_cloud.cluster.launcher import NodeLost
from palaestra_cloud.cluster.messages import KINDS, Failure, GroupEntry, GroupWork, Packer
from palaestra_cloud.cluster.placement import Room
from palaestra_slots.core.errors import ConfigError, PalaestraError, TaskError
from palaestra_slots.core.types import JSON, Blame, Task
from palaestra_slots.core.user_code import told

MOST_NODES = 6
"""A group that has lost this many nodes, with no rollout finished in between, fails: perhaps it is what kills them.
Where a node lasts for 100 minutes and a rollout takes 5, one group in a million loses so many by chance."""

_decoders: list[msgspec.json.Decoder[Any]] = [msgspec.json.Decoder(kind) for kind in KINDS]
_failures = msgspec.json.Decoder(Failure)
_ENDED, _GROUP_ENDED = (KINDS.index(each) for each in (RolloutEnded, GroupEnded))
JOURNALLED = frozenset(place for place, kind in enumerate(KINDS) if issubclass(kind, JournalEvent))
"""The kinds of entries that are lines of the journal."""

COMMITTED = frozenset({_ENDED, _GROUP_ENDED})
"""The kinds of entries that must be on the disk before anything else hears of them."""

PASSED_ON = JOURNALLED - COMMITTED - {KINDS.index(GroupStarted)}
"""The kinds of entries that the driver writes and need not read."""


class _StartedGroup(Group):
    """A `Group` that starts. Its tools stay encoded, because most groups of a run have the same."""

    tools: msgspec.Raw = msgspec.Raw(b"[]")  # type: ignore[assignment]


class _Started(msgspec.Struct):
    """A `GroupStarted`."""

    group: _StartedGroup
    at: float = 0.0


_started = msgspec.json.Decoder(_Started)


@lru_cache(maxsize=64)
def _shared_tools(encoded: bytes) -> list[dict[str, JSON]]:
    """Return the tools of groups, one list for all groups that have the same."""
    tools: list[dict[str, JSON]] = msgspec.json.decode(encoded)
    return tools


class Nodes(Protocol):
    """What a group needs of the nodes; `Driver` implements it."""

    packer: Packer

    def earlier_of(self, run: RunContext, group_id: str) -> EarlierWork: ...

    async def play(self, group: RemoteGroup) -> None: ...

    def freed(self, group: RemoteGroup) -> None: ...


@dataclass(slots=True)
class Playing:
    """A group on a node: the room that it has taken there, in rollouts, and how it ends there."""

    group: RemoteGroup
    room: Room
    taken: int
    done: asyncio.Future[None]


class RemoteGroup:
    """A group of a run on a cluster; see `GroupPlay`."""

    def __init__(
        self, nodes: Nodes, env: Environment, run: RunContext, number: int, task: Task, places: Places | None
    ) -> None:
        self.env = env
        self.run_context = run
        self.number = number
        self.task = task
        self.group = Group(group_id=f"{number:06d}-{task.id}", number=number, task_id=task.id)
        self.begun = False
        self.placed: Playing | None = None
        """The room that the group has on a node."""
        self.reserved = run.settings.group_size
        events = run.events
        self.heard = frozenset(place for place, kind in enumerate(KINDS) if events.hears(kind))
        """The kinds of entries that somebody in the run hears."""
        self._nodes = nodes
        self._places = places
        self._earlier = nodes.earlier_of(run, self.group.group_id)
        self._lines: dict[int, list[tuple[int, bytes]]] = {}
        self._counted: Counter[int] = Counter()
        """For each rollout that moved, the number of its model calls whose tokens have been counted and will be
        announced again."""

    @property
    def needs(self) -> str:
        """What a node should have prepared for the group."""
        try:
            shared = self.env.shared_setup(self.task)
        except Exception:  # it may expect a resolved task; the node asks again and reports the error
            shared = None
        return shared or self.task.image or ""

    async def run(self) -> Group:
        """Return the finished group, already in the journal. Raises only on cancellation, for bugs, and for errors that
        end the run."""
        group, events = self.group, self.run_context.events
        events.announce(GroupBegun(group))
        for _, trajectory in sorted(self._earlier.rollouts.get(group.group_id, {}).items()):
            group.trajectories.append(trajectory)
            events.announce(RolloutKept(trajectory))
        lost = 0
        while True:
            finished = self._finished()
            try:
                await self._nodes.play(self)
                break
            except NodeLost as error:
                lost = lost + 1 if self._finished() == finished else 1
                if lost == MOST_NODES:
                    await self._give_up(
                        f"{lost} nodes in a row were lost before another rollout of this group ended: {error}"
                    )
                    break
                self._move()
        group.trajectories.sort(key=lambda trajectory: trajectory.index)
        await self.env.ended(self.task, group)
        return group

    def work(self) -> bytes:
        """Return the pickled work that is left. Raises `TaskError` for a task that cannot be sent."""
        try:
            work = GroupWork(self.number, self.task, self.run_context.settings, self._earlier)
            return self._nodes.packer.pack(work)
        except Exception as error:
            raise TaskError(
                f"task {self.task.id} cannot be sent to a node: {told(error)}. Keep plain data in `data`, `answer` and "
                "`solution`"
            ) from error

    async def give_up_on(self, error: PalaestraError) -> None:
        """Record a group that cannot be sent to any node."""
        await self._give_up(str(error), Blame.TASK)

    def take(self, entry: GroupEntry) -> JournalEvent | MemoryEvent | None:
        """Take note of an entry, and return the event to announce, if anybody hears it. The caller writes its line."""
        kind = entry.kind
        if kind not in JOURNALLED:
            return self._heard(entry) if kind in self.heard else None
        event: JournalEvent
        if kind in PASSED_ON:
            self._lines.setdefault(entry.index, []).append((kind, entry.data))
            if kind not in self.heard:
                return None
            event = _decoders[kind].decode(entry.data)
        elif kind == _ENDED:
            event = ended = _decoders[kind].decode(entry.data)
            self._add(ended.trajectory)
            if ended.trajectory.blame in CUT_OFF:
                self._lines.setdefault(entry.index, []).append((kind, entry.data))
        elif kind == _GROUP_ENDED:
            event = last = _decoders[kind].decode(entry.data)
            self.group.error, self.group.blame = last.error, last.blame
        else:
            event = self._take_group(_started.decode(entry.data))
        return event if kind in self.heard else None

    def _take_group(self, started: _Started) -> GroupStarted:
        for name in Group.__struct_fields__:
            if name != "trajectories":  # those of earlier parts of the run stay
                value = getattr(started.group, name)
                setattr(self.group, name, _shared_tools(bytes(value)) if name == "tools" else value)
        self.begun = True
        return GroupStarted(at=started.at, group=self.group)

    def _heard(self, entry: GroupEntry) -> MemoryEvent | None:
        event: MemoryEvent = _decoders[entry.kind].decode(entry.data)
        if isinstance(event, TokensSpent) and self._counted[entry.index] > 0:
            self._counted[entry.index] -= 1
            return None
        if isinstance(event, Note) and not self.run_context.events.unreported([event.text]):
            return None
        return event

    def failure(self, entry: GroupEntry) -> PalaestraError:
        """Return the error that ended the group on its node. `NodeLost` means that the node is to blame."""
        failure = _failures.decode(entry.data)
        if failure.disk:
            return NodeLost(failure.text)
        if failure.usage:
            return ConfigError(failure.text)
        return PalaestraError(f"{self.group.group_id} failed on its node: {failure.text}")

    def _add(self, trajectory: Trajectory) -> None:
        others = [each for each in self.group.trajectories if each.index != trajectory.index]
        again = len(others) < len(self.group.trajectories)
        self.group.trajectories[:] = [*others, trajectory]
        if trajectory.blame not in CUT_OFF:
            self._lines.pop(trajectory.index, None)
        if not again and self.reserved > 1:
            self.reserved -= 1
            self._nodes.freed(self)
            if self._places is not None:
                self._places.free(1)

    def _finished(self) -> int:
        return sum(each.blame not in CUT_OFF for each in self.group.trajectories)

    def _move(self) -> None:
        """Prepare to continue the group on another node."""
        group = self.group
        self._earlier = work_after(self._earlier, self._events())
        self._lines.clear()
        group.trajectories[:] = [each for each in group.trajectories if each.blame not in CUT_OFF]
        for rollout_id, cut_off in self._earlier.cut_off.items():
            if cut_off.ended is None:
                self._counted[int(rollout_id.rpartition("/")[2])] = len(cut_off.paid())

    def _events(self) -> Iterator[AnyJournalEvent]:
        """Yield the events since the group was sent, but only the last one of each finished rollout."""
        group = msgspec.structs.replace(self.group, trajectories=[])
        if self.begun:
            yield GroupStarted(group=group)
        for trajectory in self.group.trajectories:
            if trajectory.blame not in CUT_OFF:
                yield RolloutEnded(trajectory=trajectory)
        for _, lines in sorted(self._lines.items()):
            for kind, line in lines:
                yield _decoders[kind].decode(line)

    async def _give_up(self, why: str, blame: Blame = Blame.RUN) -> None:
        group, events = self.group, self.run_context.events
        group.error, group.blame = why, blame
        if not self.begun:
            events.emit(GroupStarted(at=time.time(), group=msgspec.structs.replace(group, trajectories=[])))
            self.begun = True
        events.emit(GroupEnded(at=time.time(), group_id=group.group_id, number=group.number, error=why, blame=blame))
        await events.journal.commit()


def earlier_by_group(earlier: EarlierWork) -> dict[str, EarlierWork]:
    """Return the earlier work of a run by group id."""
    found: dict[str, EarlierWork] = {}

    def of(group_id: str) -> EarlierWork:
        return found.setdefault(group_id, EarlierWork(earlier.run))

    for group_id, rollouts in earlier.rollouts.items():
        of(group_id).rollouts[group_id] = rollouts
    for rollout_id, cut_off in earlier.cut_off.items():
        of(rollout_id.rpartition("/")[0]).cut_off[rollout_id] = cut_off
    for group_id, asked in earlier.asked.items():
        of(group_id).asked[group_id] = asked
    return found
