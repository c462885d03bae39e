"""What a run that was killed had come to, so that going on with it repeats none of it.

A group that ended is taken as it is. Of a group that was under way, the rollouts that ended are kept and only the
missing ones are rolled out. A rollout that the end of the run or the model server cut off counts as missing; what was
written down of it is its `CutOff`, after which it can be taken up again (`recall`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from palaestra.agent.tool_calls import NOT_FINISHED
from palaestra.core.errors import ConfigError
from palaestra.core.types import Blame, Outcome, Prices
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
from palaestra.rollouts.journal.journal import is_whole, read_journal
from palaestra.rollouts.records import Beside, Group, Trajectory

_NOT_FINISHED = str(json.loads(NOT_FINISHED)["error"])

CUT_OFF = frozenset({Blame.RUN, Blame.ENGINE})
"""Whose failures say nothing about a rollout: it is rolled out again."""


@dataclass(slots=True)
class CutOff:
    """A rollout that was under way: its turns, and the tools it had. `replies` are those written down in turns that
    gave work away, each with its turn's place among the events. `ended` is the record that it was given when it was cut
    off; None where nobody had the time."""

    tools_hash: str
    events: list[TurnTaken] = field(default_factory=list)
    replies: list[tuple[int, ReplyReceived]] = field(default_factory=list)
    ended: Trajectory | None = None

    def add(self, event: TurnTaken) -> None:
        """One more turn. One that was taken before, and whose end was not known, is replaced."""
        while event.turn and self.events and self.events[-1].turn >= event.turn:
            self.events.pop()
        self.replies = [(min(place, len(self.events)), reply) for place, reply in self.replies]
        self.events.append(event)

    @property
    def pending(self) -> list[ReplyReceived]:
        """The replies of the turn that was cut off."""
        return [reply for place, reply in self.replies if place >= len(self.events)]

    def paid(self) -> list[tuple[int, int]]:
        """The tokens read and written of each reply of the model."""
        beside = [reply for place, reply in self.replies if reply.branch or place >= len(self.events)]
        return [event.tokens for event in self.events] + [reply.tokens for reply in beside]

    def record(self, rollout_id: str, group: Group, index: int, prices: Prices | None) -> Trajectory:
        """The record of what is not gone on with: what was said, and what it had cost."""
        prompt_tokens, completion_tokens = map(sum, zip(*self.paid(), strict=True))
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
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=prices.cost(prompt_tokens, completion_tokens) if prices else None,
            beside=Beside(started_at=self.events[0].at),
        )


@dataclass(slots=True)
class EarlierWork:
    """The work of a run so far. `ended` by group number, `rollouts` by group id and index, `cut_off` by rollout id.
    `asked` has what each group's rollouts were asked, as a checksum by group id, and `tasks` each task's id by its
    number."""

    run: RunStarted | None = None
    ended: dict[int, Group] = field(default_factory=dict)
    rollouts: dict[str, dict[int, Trajectory]] = field(default_factory=dict)
    cut_off: dict[str, CutOff] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    tasks: dict[int, str] = field(default_factory=dict)


def read_finished(path: Path) -> EarlierWork:
    """Read a journal. Raises `ConfigError` when there is nothing to go on with."""
    reader: _Reader | None = None
    for event in read_journal(path):
        if reader is not None:
            try:
                reader.take(event)
            except KeyError as group:
                raise ConfigError(f"{path}: lines are missing: it tells of group {group} before it begins") from None
        elif isinstance(event, RunStarted):
            reader = _Reader(event)
        else:
            raise ConfigError(f"{path} does not begin with a run")
    if reader is None:
        raise ConfigError(f"{path} holds no run to go on with")
    return reader.settled()


class _Reader:
    """Follows the events of one run."""

    def __init__(self, run: RunStarted) -> None:
        self._finished = EarlierWork(run)
        self._begun: dict[str, Group] = {}
        self._schema = run.schema

    def take(self, event: AnyJournalEvent) -> None:
        finished, cut_off = self._finished, self._finished.cut_off
        match event:
            case RunResumed(schema=schema):
                if self._schema != JOURNAL_SCHEMA:
                    cut_off.clear()  # that form says too little of a turn
                self._schema = schema
            case GroupStarted(group=group):
                self._begun[group.group_id] = group
                finished.asked[group.group_id] = group.asked
                finished.tasks[group.number] = group.task_id
                finished.rollouts.setdefault(group.group_id, {})
                finished.ended.pop(group.number, None)
            case TurnTaken():
                self._turn(event)
            case ReplyReceived(rollout_id=rollout_id) if rollout_id in cut_off:
                cut_off[rollout_id].replies.append((len(cut_off[rollout_id].events), event))
            case RolloutResumed(rollout_id=rollout_id, anew=anew):
                if anew:
                    cut_off.pop(rollout_id, None)
                elif rollout_id in cut_off:
                    cut_off[rollout_id].ended = None  # what it had cost is now part of what goes on
            case AttemptDiscarded(trajectory=trajectory):
                cut_off.pop(trajectory.rollout_id, None)
            case RolloutEnded(trajectory=trajectory):
                finished.rollouts[trajectory.group_id][trajectory.index] = trajectory
                if trajectory.blame not in CUT_OFF:
                    cut_off.pop(trajectory.rollout_id, None)
                elif trajectory.rollout_id in cut_off:
                    cut_off[trajectory.rollout_id].ended = trajectory
            case GroupEnded(group_id=group_id, number=number, error=error):
                self._begun[group_id].error = error
                finished.ended[number] = self._begun[group_id]
            case _:
                pass

    def _turn(self, event: TurnTaken) -> None:
        group = self._begun.get(event.rollout_id.rpartition("/")[0])
        known = self._finished.cut_off.get(event.rollout_id)
        if known is None and event.turn == 0 and group is not None:
            known = self._finished.cut_off[event.rollout_id] = CutOff(group.tools_hash)
        if known is not None:
            known.add(event)

    def settled(self) -> EarlierWork:
        """What is left when what was cut off is dropped; a group that lost a rollout by that has not ended."""
        finished = self._finished
        for number, group in list(finished.ended.items()):
            rollouts = finished.rollouts[group.group_id]
            if any(trajectory.blame in CUT_OFF for trajectory in rollouts.values()):
                del finished.ended[number]
            else:
                group.trajectories = [rollouts[index] for index in sorted(rollouts)]
        finished.rollouts = {
            group_id: {index: each for index, each in rollouts.items() if each.blame not in CUT_OFF}
            for group_id, rollouts in finished.rollouts.items()
        }
        if self._schema != JOURNAL_SCHEMA:
            finished.cut_off.clear()
        for cut_off in finished.cut_off.values():
            if _in_the_middle(cut_off.events[-1]):
                cut_off.events.pop()
        return finished


def _in_the_middle(event: TurnTaken) -> bool:
    """Whether a turn was cut off in one of its calls, which are text in the conversations of some agents."""
    return any(_NOT_FINISHED in str(message.get("content")) for message in event.messages)


def repair(path: Path) -> bool:
    """Cut off a last line that is torn, as a kill in the middle of a write leaves it, or damaged. True when there was
    one. What is appended after it could not be read again."""
    with path.open("r+b") as file:
        size, last = 0, b"\n"
        for line in file:
            size, last = size + len(line), line
        if not size or is_whole(last):
            return False
        file.truncate(size - len(last))
    return True
