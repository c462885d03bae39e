"""What a run that was killed had finished, so that going on with it repeats none of it.

A group that ended is taken as it is. Of a group that was under way, the rollouts that ended are kept and only the
missing ones are rolled out. A rollout that the end of the run or the model server cut off counts as missing.

Not for going on inside a rollout: one that was under way starts again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from palaestra.core.errors import ConfigError
from palaestra.core.types import Blame
from palaestra.rollouts.journal import GroupEnded, GroupStarted, RolloutEnded, RunStarted, read_journal
from palaestra.rollouts.trajectory import Group, Trajectory

CUT_OFF = frozenset({Blame.RUN, Blame.ENGINE})
"""Whose failures say nothing about a rollout: it is rolled out again."""


@dataclass(slots=True)
class Finished:
    """The finished work of a run. `ended` by group number, `rollouts` by group id and index."""

    run: RunStarted
    ended: dict[int, Group] = field(default_factory=dict)
    rollouts: dict[str, dict[int, Trajectory]] = field(default_factory=dict)


def read_finished(path: Path) -> Finished:
    """Read a journal. Raises `ConfigError` when there is nothing to go on with."""
    finished: Finished | None = None
    begun: dict[str, Group] = {}
    for event in read_journal(path):
        if isinstance(event, RunStarted):
            finished = finished or Finished(event)
        elif finished is None:
            raise ConfigError(f"{path} does not begin with a run")
        elif isinstance(event, GroupStarted):
            begun[event.group.group_id] = event.group
            finished.rollouts[event.group.group_id] = {}
        elif isinstance(event, RolloutEnded):
            finished.rollouts[event.trajectory.group_id][event.trajectory.index] = event.trajectory
        elif isinstance(event, GroupEnded):
            group = begun[event.group_id]
            group.error = event.error
            finished.ended[event.number] = group
    if finished is None:
        raise ConfigError(f"{path} holds no run to go on with")
    return _settled(finished)


def _settled(finished: Finished) -> Finished:
    """Drop what was cut off; a group that lost a rollout by that has not ended."""
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
    return finished


def repair(path: Path) -> bool:
    """Cut off a torn last line, which a kill in the middle of a write leaves. True when there was one."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole == len(data):
        return False
    with path.open("r+b") as file:
        file.truncate(whole)
    return True
