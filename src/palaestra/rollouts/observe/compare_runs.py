"""Compares the rewards of two runs of the same tasks, with a 95 % interval.

Rewards are paired by task, because tasks differ more from each other than two models do on one task: only tasks with a
reward in both runs count, each by the mean of its rollouts. Not for ranking many runs: each further pair is another
chance for an interval to miss.

Source of the interval: Student's t for the mean of paired differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from palaestra.core.types import JSON
from palaestra.rollouts.observe.intervals import student
from palaestra.rollouts.records import Group


@dataclass(frozen=True, slots=True)
class Pair:
    """One task: the mean reward of its scored rollouts in the first run and in the other."""

    task: str
    first: float
    other: float

    @property
    def difference(self) -> float:
        """Above zero where the first run did better."""
        return self.first - self.other


@dataclass(frozen=True, slots=True)
class RunComparison:
    """`difference` is the mean over `pairs`, first minus other; `low` and `high` its 95 % interval, None for one pair.

    `only_first` and `only_other` are tasks without a reward in the other run. `asked_otherwise` are paired tasks with
    different prompts in the two runs.
    """

    pairs: tuple[Pair, ...]
    only_first: tuple[str, ...]
    only_other: tuple[str, ...]
    difference: float
    low: float | None
    high: float | None
    asked_otherwise: tuple[str, ...] = ()

    @property
    def interval(self) -> str:
        """The interval in words, or the empty string."""
        return "" if self.low is None or self.high is None else f" ({self.low:+.3f} to {self.high:+.3f})"

    @property
    def better(self) -> int:
        """Tasks that the first run did better on."""
        return sum(pair.difference > 0 for pair in self.pairs)

    @property
    def worse(self) -> int:
        """Tasks that the other run did better on."""
        return sum(pair.difference < 0 for pair in self.pairs)

    def to_json(self) -> dict[str, JSON]:
        """For machines."""
        counts = {"tasks": len(self.pairs), "better": self.better, "worse": self.worse}
        return counts | asdict(self)


def compare(first: Iterable[Group], other: Iterable[Group], *, unscored: float | None = None) -> RunComparison:
    """Compare by task id. A rollout without a reward is left out, or counts as `unscored`.

    Raises `ValueError` if no task has a reward in both.
    """
    one, two = _seen(first, unscored), _seen(other, unscored)
    pairs = tuple(Pair(task, one[task].mean, two[task].mean) for task in one if task in two)
    if not pairs:
        raise ValueError(f"no task has a reward in both: {len(one)} have one in the first run, {len(two)} in the other")
    differences = [pair.difference for pair in pairs]
    mean, reach = statistics.fmean(differences), None
    if len(pairs) > 1:
        reach = student(len(pairs) - 1) * statistics.stdev(differences) / math.sqrt(len(pairs))
    return RunComparison(
        pairs,
        tuple(task for task in one if task not in two),
        tuple(task for task in two if task not in one),
        mean,
        None if reach is None else mean - reach,
        None if reach is None else mean + reach,
        tuple(pair.task for pair in pairs if one[pair.task].asks_otherwise(two[pair.task])),
    )


@dataclass(slots=True)
class _Seen:
    """A task in one run, over all groups that it had."""

    rewards: list[float] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rewards)

    def asks_otherwise(self, other: _Seen) -> bool:
        """Whether no prompt is the same. Groups of earlier versions did not record theirs."""
        return bool(self.asked and other.asked) and self.asked.isdisjoint(other.asked)


def _seen(groups: Iterable[Group], unscored: float | None) -> dict[str, _Seen]:
    """The tasks that have a reward."""
    found: dict[str, _Seen] = {}
    for group in groups:
        given = (unscored if trajectory.reward is None else trajectory.reward for trajectory in group.trajectories)
        rewards = [reward for reward in given if reward is not None]
        if rewards:
            task = found.setdefault(group.task_id, _Seen())
            task.rewards += rewards
            task.asked |= {group.asked} - {""}
    return found
