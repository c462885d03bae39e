"""Two runs of the same tasks, beside each other: which did better, and how sure that is.

Paired by task: tasks differ far more from each other than two models do on one of them, so only tasks that both runs
have a reward for are compared, each by the mean of its rollouts. Not for ranking many runs: with each further pair that
is looked at, one interval more may miss.

Source of the interval: Student's t for the mean of paired differences; its quantile after Abramowitz and Stegun 26.7.5.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from palaestra.core.types import JSON
from palaestra.rollouts.trajectory import Group


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
class Comparison:
    """`difference` is the mean over `pairs`, first minus other; `low` and `high` its 95 % interval, None for one pair.

    `only_first` and `only_other` are the tasks that the other run has no reward for.
    """

    pairs: tuple[Pair, ...]
    only_first: tuple[str, ...]
    only_other: tuple[str, ...]
    difference: float
    low: float | None
    high: float | None

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


def compare(first: Iterable[Group], other: Iterable[Group], *, unscored: float | None = None) -> Comparison:
    """Compare by task id. A rollout without a reward is left out, or counts as `unscored`.

    Raises `ValueError` where no task has a reward in both.
    """
    one, two = _means(first, unscored), _means(other, unscored)
    pairs = tuple(Pair(task, one[task], two[task]) for task in one if task in two)
    if not pairs:
        raise ValueError(f"no task has a reward in both: {len(one)} have one in the first run, {len(two)} in the other")
    differences = [pair.difference for pair in pairs]
    mean, reach = statistics.fmean(differences), None
    if len(pairs) > 1:
        reach = _t_quantile(len(pairs) - 1) * statistics.stdev(differences) / math.sqrt(len(pairs))
    return Comparison(
        pairs,
        tuple(task for task in one if task not in two),
        tuple(task for task in two if task not in one),
        mean,
        None if reach is None else mean - reach,
        None if reach is None else mean + reach,
    )


def _means(groups: Iterable[Group], unscored: float | None) -> dict[str, float]:
    """The mean reward of every task, over all groups it had."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        given = (unscored if trajectory.reward is None else trajectory.reward for trajectory in group.trajectories)
        found = [reward for reward in given if reward is not None]
        if found:
            rewards.setdefault(group.task_id, []).extend(found)
    return {task: statistics.fmean(values) for task, values in rewards.items()}


def _t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t. Within 0.2 % for 3 degrees and more; below, they are tabulated."""
    if freedom <= 2:
        return (12.706205, 4.302653)[freedom - 1]
    normal = statistics.NormalDist().inv_cdf(0.975)
    square = normal * normal
    terms = (
        (square + 1) / 4,
        ((5 * square + 16) * square + 3) / 96,
        (((3 * square + 19) * square + 17) * square - 15) / 384,
        ((((79 * square + 776) * square + 1482) * square - 1920) * square - 945) / 92160,
    )
    return normal * (1.0 + math.fsum(term / float(freedom) ** power for power, term in enumerate(terms, 1)))
