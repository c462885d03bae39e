"""A run in numbers: `summarise` for any set of groups, and `MetricsFile`, where a run appends them as it goes.

Not for judging a model: an evaluation with intervals is another matter. A number that nothing was measured for is left
out: an empty run has no mean reward, and it is not 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.types import JSON
from palaestra.rollouts.intervals import mean_interval, rate_interval
from palaestra.rollouts.trajectory import Group, Trajectory

METRICS_SCHEMA = "palaestra.metrics/1"


def summarise(groups: Iterable[Group]) -> dict[str, float]:
    """Counts, rates and means over the groups.

    `reward/*` and `percent_correct` (the share, 0 to 1, of rewards of at least 1) are over scored rollouts, but
    `reward/mean_with_unscored`, which counts the others as 0; `reward/std` is the population's. `outcomes/<name>` and
    `blame/<name>` are counts, `blame_rate/<name>` shares of all rollouts, `tokens/*` and `cost` totals,
    `stage/<name>/p50` and `p95` seconds, and `metric/<name>` the mean over the rollouts that report it. `…/low` and
    `…/high` are a 95 % interval; that of a mean takes the rollouts of one group as alike.
    """
    numbers: dict[str, float] = {"groups": 0, "groups_failed": 0}
    trajectories: list[Trajectory] = []
    rewards: list[list[float]] = []
    prepared: list[float] = []
    for group in groups:
        numbers["groups"] += 1
        numbers["groups_failed"] += not group.trajectories
        trajectories += group.trajectories
        rewards.append([trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None])
        prepared += [group.prepare_s] if group.prepare_s else []
    numbers |= _counts(trajectories)
    numbers |= _rewards(rewards, len(trajectories))
    numbers |= _seconds(trajectories, prepared)
    numbers |= _metric_means(trajectories)
    return numbers


def _counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    outcomes = Counter(trajectory.outcome.value for trajectory in trajectories)
    blames = Counter(trajectory.blame.value for trajectory in trajectories if trajectory.blame)
    numbers: dict[str, float] = {
        "rollouts": len(trajectories),
        "scored": sum(trajectory.scored for trajectory in trajectories),
        "tokens/prompt": sum(trajectory.prompt_tokens for trajectory in trajectories),
        "tokens/completion": sum(trajectory.completion_tokens for trajectory in trajectories),
        "tool_errors_count": sum(len(trajectory.tool_errors) for trajectory in trajectories),
        "tool_calls_attempted": sum(trajectory.tool_calls_attempted for trajectory in trajectories),
        "tool_calls_valid": sum(trajectory.tool_calls_schema_valid for trajectory in trajectories),
    }
    numbers |= {f"outcomes/{name}": count for name, count in sorted(outcomes.items())}
    numbers |= {f"blame/{name}": count for name, count in sorted(blames.items())}
    for name, count in sorted(blames.items()):
        low, high = rate_interval(count, len(trajectories))
        rate = f"blame_rate/{name}"
        numbers |= {rate: count / len(trajectories), f"{rate}/low": low, f"{rate}/high": high}
    costs = [trajectory.cost for trajectory in trajectories if trajectory.cost is not None]
    if costs:
        numbers["cost"] = math.fsum(costs)
    if trajectories:
        numbers["turns/mean"] = _mean([len(trajectory.turns) for trajectory in trajectories])
    return numbers


def _rewards(by_group: Sequence[Sequence[float]], rollouts: int) -> dict[str, float]:
    rewards = [reward for group in by_group for reward in group]
    if not rewards:
        return {}
    mean = _mean(rewards)
    correct = sum(reward >= 1 for reward in rewards)
    low, high = rate_interval(correct, len(rewards))
    numbers = {
        "reward/mean": mean,
        "reward/std": math.sqrt(_mean([(reward - mean) ** 2 for reward in rewards])),
        "reward/mean_with_unscored": math.fsum(rewards) / rollouts,
        "percent_correct": correct / len(rewards),
        "percent_correct/low": low,
        "percent_correct/high": high,
    }
    if interval := mean_interval(by_group):
        numbers |= {"reward/mean/low": interval[0], "reward/mean/high": interval[1]}
    return numbers


def _seconds(trajectories: Sequence[Trajectory], prepared: Sequence[float]) -> dict[str, float]:
    stages: defaultdict[str, list[float]] = defaultdict(list)
    if prepared:
        stages["prepare"] += prepared
    for trajectory in trajectories:
        if trajectory.beside.turn_s:
            stages["model"].append(sum(model_s for model_s, _ in trajectory.beside.turn_s))
        for stage, seconds in trajectory.beside.stages.items():
            stages[stage].append(seconds)
        if trajectory.beside.duration_s:
            stages["rollout"].append(trajectory.beside.duration_s)
    return {
        f"stage/{stage}/{name}": quantile(stages[stage], q)
        for stage in sorted(stages)
        for name, q in (("p50", 0.5), ("p95", 0.95))
    }


def _metric_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values[name].append(float(value))
    return {f"metric/{name}": _mean(values[name]) for name in sorted(values)}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def quantile(values: Sequence[float], q: float) -> float:
    """The `q` quantile (0 to 1) of at least one value, linear between the two nearest."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class MetricsFile:
    """`metrics.jsonl`: one line per `append`, handed to the operating system at once, never rewritten.

    A last line that a kill tore is closed off with a newline, so that what follows stays readable.
    """

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._clock = clock or SystemClock()
        self._file = path.open("ab", buffering=0)
        if _torn(path):
            self._file.write(b"\n")

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def append(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a line. `step` is how many groups are done; a number that is not finite becomes null."""
        line: dict[str, JSON] = {"schema": METRICS_SCHEMA, "time": self._clock.wall(), "step": step, **numbers}
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


def _torn(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
