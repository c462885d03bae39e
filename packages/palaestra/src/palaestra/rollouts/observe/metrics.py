"""The metrics of a run: `Figures`, to which groups are added one by one, `summarise` for a set of groups, and pass@k.

A metric without a measurement is left out: an empty run has no mean reward, rather than 0. Only a few numbers are kept
for each rollout, so that a long run needs little memory.
"""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from palaestra.rollouts.observe.intervals import Cluster, mean_interval, pass_interval, share_interval, with_interval
from palaestra.rollouts.records import Beside, Group, Trajectory
from palaestra_slots.core.types import JSON

PASSED = 1.0


def _float_array() -> array[float]:
    return array("d")


def _counts() -> array[int]:
    return array("q")


class Figures:
    """Computes the metrics of the groups that were added so far. A group with an error counts as at least `group_size`
    planned rollouts."""

    def __init__(self, group_size: int = 0) -> None:
        self.groups = 0
        self.unfinished = 0
        """Groups that began and have not ended; their rollouts count as planned."""
        self.refused = 0
        """Tasks of an evaluation that the environment refused; their rollouts count as planned and unscored."""
        self._group_size = group_size
        self._planned = 0
        self._failed = self._from_store = 0
        self._totals: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._blames: Counter[str] = Counter()
        self._turns = 0
        self._costs = _float_array()
        self._rewards, self._officials = _float_array(), _float_array()
        self._judged = False
        self._differing = 0
        self.labels: Counter[str] = Counter()
        """The number of rollouts with each label."""
        self._categories: dict[int, str] = {}
        self._tasks = _counts()
        """The hash of each group's task id, because the ids of very many tasks would take most of the memory."""
        self._scored, self._lost, self._ran = _counts(), _counts(), _counts()
        """Rollouts of each group: those with a reward, those planned without one, and those that ended."""
        self._blamed: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._seconds: defaultdict[str, array[float]] = defaultdict(_float_array)
        self._metrics: defaultdict[str, array[float]] = defaultdict(_float_array)

    def add(self, group: Group) -> None:
        """Count a group that has ended."""
        self.groups += 1
        self._failed += bool(group.error) or not group.trajectories
        rewards = [each.reward for each in group.trajectories if each.reward is not None]
        # A group that failed before it began has no rollouts, but those that it should have had count as lost.
        planned = max(len(group.trajectories), self._group_size if group.error else 0)
        self._planned += planned
        self._rewards.extend(rewards)
        self._officials.extend(
            each.official_reward for each in group.trajectories if each.official_reward is not None and each.scored
        )
        # The hash, because a run may have millions of tasks with long ids.
        self._tasks.append(hash(group.task_id))
        self._scored.append(len(rewards))
        self._lost.append(planned - len(rewards))
        self._ran.append(len(group.trajectories))
        if group.prepare_s:
            self._from_store += group.from_store
            self._seconds["prepare"].append(group.prepare_s)
        for trajectory in group.trajectories:
            self._count_rollout(trajectory)
            for stage, seconds in stage_seconds(trajectory.beside):
                self._seconds[stage].append(seconds)

    def _count_rollout(self, trajectory: Trajectory) -> None:
        self._totals.update(
            {
                "rollouts": 1,
                "scored": trajectory.scored,
                "tokens/prompt": trajectory.prompt_tokens,
                "tokens/completion": trajectory.completion_tokens,
                "tool_errors_count": len(trajectory.tool_errors),
                "tool_calls_attempted": trajectory.tool_calls_attempted,
                "tool_calls_valid": trajectory.tool_calls_schema_valid,
            }
        )
        self._outcomes[trajectory.outcome.value] += 1
        self._turns += len(trajectory.turns)
        if trajectory.blame:
            self._blames[trajectory.blame.value] += 1
            # Hashes in place of ids, because a run that feeds a trainer may have millions of tasks.
            self._blamed[trajectory.blame.value][hash(trajectory.task_id)] += 1
        if (cost := trajectory.whole_cost) is not None:
            self._costs.append(cost)
        if isinstance(category := trajectory.detail.get("category"), str) and category:
            self._categories[hash(trajectory.task_id)] = category
        for name, value in trajectory.metrics.items():
            self._metrics[name].append(float(value))
        self._judged = self._judged or trajectory.official is not None
        self._differing += trajectory.official_reward != trajectory.reward
        if trajectory.labels:
            self.labels.update({label.name for label in trajectory.labels})

    def numbers(self) -> dict[str, float]:
        """Return the metrics by name.

        `reward/*` and `percent_correct` (the share, 0 to 1, of rewards of at least 1) are over scored rollouts; in
        metrics that end with `_with_unscored`, unscored rollouts count as 0. `reward/std` is the standard deviation of
        the population. If some rollouts have an official verdict, `official/mean` is the mean over scored rollouts of
        that verdict, or of the reward without one, and `official/differs` counts the rollouts where the two differ.
        `labels/<name>` counts the rollouts with a label.

        `rollouts_planned` includes the rollouts of groups that could not be prepared or have not ended.
        `outcomes/<name>` and `blame/<name>` are counts, `blame_rate/<name>` shares of all rollouts, `tokens/*` and
        `cost` totals of these rollouts; `usage.py` has those of a run. `groups_prepared` counts groups with a prepared
        workspace, `groups_from_store` those whose workspace came from this machine's store. `stage/<name>/p50` and
        `p95` are seconds, `metric/<name>` is the mean over the rollouts that report it. `…/low` and `…/high` are a 95%
        interval, clustered by task (`intervals.py`).
        """
        seconds = {
            f"stage/{stage}/{name}": quantile(self._seconds[stage], q)
            for stage in sorted(self._seconds)
            for name, q in (("p50", 0.5), ("p95", 0.95))
        }
        metrics = {f"metric/{name}": mean for name, mean in self.criteria().items()}
        tasks = self._by_task()
        groups: dict[str, float] = {"groups": self.groups, "groups_failed": self._failed}
        if prepared := len(self._seconds.get("prepare", ())):
            groups |= {"groups_prepared": prepared, "groups_from_store": self._from_store}
        return groups | self._outcome_counts(tasks) | self._reward(tasks) | self._official() | seconds | metrics

    def criteria(self) -> dict[str, float]:
        """Return the mean of each of the environment's own metrics over the rollouts that report it."""
        return {name: _mean(self._metrics[name]) for name in sorted(self._metrics)}

    def _official(self) -> dict[str, float]:
        labels: dict[str, float] = {f"labels/{name}": count for name, count in sorted(self.labels.items())}
        if not self._judged or not self._officials:
            return labels
        mean = with_interval("official/mean", _mean(self._officials), mean_interval(self._by_task(self._officials)))
        return mean | {"official/differs": self._differing} | labels

    @property
    def outcomes(self) -> Counter[str]:
        """The number of rollouts by outcome."""
        return self._outcomes

    def scores(self) -> Iterator[tuple[str, dict[str, JSON]]]:
        """Yield the scores of all tasks, under the empty name, by the official verdict if there is one, and of each
        category: the metrics of `pass_metrics`, and the numbers of `tasks` and `planned` rollouts."""
        every = self._by_task()
        chosen = [(name, every.among(self._in_category(name))) for name in sorted(set(self._categories.values()))]
        official = [(BY_OFFICIAL, self._by_task(self._officials))] if self._judged else []
        for name, tasks in (("", every), *official, *chosen):
            attempts = self._group_size or max(tasks.scored, default=0)
            planned = sum(tasks.scored) + sum(tasks.lost)
            yield name, {"tasks": len(tasks.hashes), "planned": planned, **pass_metrics(tasks, attempts)}

    def _in_category(self, name: str) -> set[int]:
        return {task for task, each in self._categories.items() if each == name}

    def _by_task(self, rewards: array[float] | None = None) -> _Tasks:
        return _Tasks(self._tasks, self._scored, self._lost, self._ran, self._rewards if rewards is None else rewards)

    def _outcome_counts(self, tasks: _Tasks) -> dict[str, float]:
        rollouts = self._totals["rollouts"]
        more = (self.unfinished + self.refused) * self._group_size
        numbers: dict[str, float] = {"rollouts_planned": self._planned + more}
        numbers |= {name: self._totals[name] for name in _TOTALS}
        numbers |= {f"outcomes/{name}": count for name, count in sorted(self._outcomes.items())}
        numbers |= {f"blame/{name}": count for name, count in sorted(self._blames.items())}
        for name, count in sorted(self._blames.items()):
            blamed = share_interval(map(Cluster, map(self._blamed[name].__getitem__, tasks.hashes), tasks.ran))
            numbers |= with_interval(f"blame_rate/{name}", count / rollouts, blamed)
        if self._costs:
            numbers["cost"] = math.fsum(self._costs)
        if rollouts:
            numbers["turns/mean"] = self._turns / rollouts
        return numbers

    def _reward(self, tasks: _Tasks) -> dict[str, float]:
        rewards = self._rewards
        if not rewards:
            return {}
        mean = _mean(rewards)
        correct = sum(reward >= 1 for reward in rewards)
        # `hypot` does not overflow where the squares of large rewards would.
        numbers = {"reward/std": math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards))}
        passed = array("q", (sum(reward >= 1 for reward in each) for each in tasks))
        refused, size = self.refused, self._group_size
        everyone = itertools.chain(
            ([*those, *[0.0] * lost] for those, lost in zip(tasks, tasks.lost, strict=True)), [[0.0] * size] * refused
        )
        sizes = itertools.chain(map(operator.add, tasks.scored, tasks.lost), [size] * refused)
        for suffix, each, counts, full, trials in (
            ("", tasks, tasks.scored, passed, len(rewards)),
            (_AS_0, everyone, sizes, itertools.chain(passed, [0] * refused), self._planned + refused * size),
        ):
            shares = share_interval(map(Cluster, full, counts))
            numbers |= with_interval(f"reward/mean{suffix}", math.fsum(rewards) / trials, mean_interval(each))
            numbers |= with_interval(f"percent_correct{suffix}", correct / trials, shares)
        return numbers


class _Tasks:
    """The rewards and counts of each task, added up over its groups, in the order in which the tasks first ended.

    Iterating yields the rewards of each task. `hashes` has the hashes of the tasks' ids, `ran` the numbers of rollouts
    that ended. Everything is in arrays, because a run may have very many tasks.
    """

    def __init__(
        self, tasks: array[int], scored: array[int], lost: array[int], ran: array[int], rewards: array[float]
    ) -> None:
        rows: dict[int, int] = {}
        row_of = array("q", (rows.setdefault(task, len(rows)) for task in tasks))
        self.hashes = array("q", rows)
        self.scored, self.lost, self.ran = (array("q", bytes(8 * len(rows))) for _ in range(3))
        for own, counts in ((self.scored, scored), (self.lost, lost), (self.ran, ran)):
            for row, count in zip(row_of, counts, strict=True):
                own[row] += count
        self._rewards = array("d", bytes(8 * len(rewards)))
        # Rewards come by group, and a task may have several groups. They are sorted into the places of their tasks,
        # without a list for each of very many tasks.
        free = array("q", itertools.accumulate(self.scored, initial=0))
        given = 0
        for row, count in zip(row_of, scored, strict=True):
            self._rewards[free[row] : free[row] + count] = rewards[given : given + count]
            free[row] += count
            given += count

    def __iter__(self) -> Iterator[array[float]]:
        start = 0
        for count in self.scored:
            yield self._rewards[start : start + count]
            start += count

    def among(self, hashes: Set[int]) -> _Tasks:
        """Return only the tasks whose ids have these hashes."""
        chosen = [task in hashes for task in self.hashes]
        rewards = array("d", itertools.chain.from_iterable(itertools.compress(self, chosen)))
        columns = (self.hashes, self.scored, self.lost, self.ran)
        tasks, scored, lost, ran = (array("q", itertools.compress(column, chosen)) for column in columns)
        return _Tasks(tasks, scored, lost, ran, rewards)


_AS_0 = "_with_unscored"

BY_OFFICIAL = "all tasks, official verdict"
"""The name of the scores in which the official verdict counts in place of the reward."""

_TOTALS = (
    "rollouts",
    "scored",
    "tokens/prompt",
    "tokens/completion",
    "tool_errors_count",
    "tool_calls_attempted",
    "tool_calls_valid",
)


def stage_seconds(beside: Beside) -> Iterator[tuple[str, float]]:
    """Yield the seconds of a rollout by stage: its recorded stages, all its model calls, and the whole rollout."""
    if beside.turn_s:
        yield "model", sum(model_s for model_s, _ in beside.turn_s)
    yield from beside.stages.items()
    if beside.duration_s:
        yield "rollout", beside.duration_s


def group_size(config: Mapping[str, JSON]) -> int:
    """Return the number of rollouts that a group should have, from a run's recorded settings; 0 if it is not
    recorded."""
    return int((config.get("env") or {}).get("group_size") or 0)


def summarise(groups: Iterable[Group]) -> dict[str, float]:
    """Return the metrics of these groups, as in `Figures.numbers`."""
    figures = Figures()
    for group in groups:
        figures.add(group)
    return figures.numbers()


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def quantile(values: Sequence[float], q: float) -> float:
    """Return the `q` quantile (0 to 1) of at least one value, interpolated linearly between the two nearest."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the probability that at least one of `k` attempts passes, if `passed` of `n` attempts passed. `n` must be
    at least `k`. This is the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374), eq. 1."""
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be computed from {passed} passes in {n} attempts")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def pass_hat_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass^k, the chance that all of k samples of one task pass: C(passed, k) / C(n, k)
    (Yao et al. 2024, tau-bench, arXiv 2406.12045). Raises `ValueError` for impossible numbers."""
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(f"pass^{k} cannot be computed from {passed} passes in {n} attempts")
    return math.comb(passed, k) / math.comb(n, k)


def pass_metrics(rewards: Iterable[Sequence[float]], attempts: int) -> dict[str, JSON]:
    """Return `scored`, `pass_rate`, `mean_reward`, and `pass@k` for k = 1, 2, 4 … and `attempts`, with their intervals,
    and `pass^k` for the same k above 1. `rewards` has the scored rewards of each task and is iterated over several
    times. A metric without data is left out. A task with fewer than k rewards is left out of pass@k and pass^k;
    `pass@k/tasks` counts the other tasks."""
    sizes = array("q", map(len, rewards))  # arrays, because a run may have very many tasks
    passes = array("q", (sum(reward >= PASSED for reward in scored) for scored in rewards))
    total, passed = sum(sizes), sum(passes)
    found: dict[str, JSON] = {"scored": total}
    if total:
        shares = share_interval(map(Cluster, passes, sizes))
        found |= with_interval("pass_rate", passed / total, shares)
        found |= with_interval("mean_reward", sum(map(sum, rewards)) / total, mean_interval(rewards))
    powers = [1 << power for power in range(attempts.bit_length())]
    for k in sorted({attempts, *powers} if attempts else ()):
        for name, rate in (("pass@", pass_at_k), *((("pass^", pass_hat_k),) if k > 1 else ())):
            rates = array("d", (rate(n, each, k) for n, each in zip(sizes, passes, strict=True) if n >= k))
            if rates:
                interval = pass_interval(rates, sum(n for n in sizes if n >= k) / k)
                found |= with_interval(f"{name}{k}", sum(rates) / len(rates), interval)
                found[f"pass@{k}/tasks"] = len(rates)
    return found
