"""Makes rows with advantages from groups, and refuses rows that should not be trained.

Advantages compare the scored rollouts of one group. A rollout with several segments has several rows with one
advantage, and each sampled token is in only one of them. In a tree, the advantage of tokens that several rollouts share
comes from the mean reward of these rollouts. Unscored rollouts, groups with an error, groups whose scores are equal,
rows that were sampled by weights that are too old, and rows whose log-probabilities differ too much from the trainer's
are not trained.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, structs

from palaestra.core.errors import ConfigError
from palaestra.rollouts.export.token_rows import PLACEHOLDER, ExportedRow, credit_of, exported_rows
from palaestra.rollouts.records import Group, Trajectory
from palaestra.trainers.trainer import TrainedRow

UNSCORED, EQUAL, FAILED = "unscored_rollouts", "equal_groups", "failed_groups"
COUNTERFACTUAL = "counterfactual_rollouts"
STALE, WITHOUT_TOKENS, DIFFERENT = "stale_rows", "rollouts_without_tokens", "rows_that_differ"
TOO_LONG = "rows_too_long"

_SMALLEST_DEVIATION = 1e-6

FAR = 1.0
"""A sampled token is far off if sampler and trainer differ by more than this many nats: one calls the token e times as
likely as the other. Precision alone rarely moves a token that far."""

MOST_FAR = 0.02
"""The maximum share of a row's sampled tokens that may be far off; one token always may."""


def advantages(rewards: Sequence[float], *, scaled: bool = True) -> list[float]:
    """Return the rewards of one group relative to their mean. If `scaled` is true, they are also divided by their
    standard deviation (GRPO, arXiv 2402.03300)."""
    mean = statistics.fmean(rewards)
    deviation = statistics.pstdev(rewards) if scaled else 1.0
    return [(reward - mean) / max(deviation, _SMALLEST_DEVIATION) for reward in rewards]


@dataclass(slots=True)
class Verdicts:
    """The official verdicts and the labels of scored rollouts."""

    officials: list[float] = field(default_factory=list)
    judged: bool = False
    labels: Counter[str] = field(default_factory=Counter)

    def add(self, scored: Sequence[Trajectory]) -> None:
        """Count these rollouts."""
        self.officials += [each.official_reward or 0.0 for each in scored]
        self.judged |= any(each.official is not None for each in scored)
        self.labels.update(name for each in scored for name in {label.name for label in each.labels})

    def numbers(self) -> dict[str, float]:
        """Return the mean official verdict if a rollout has one, and the number of rollouts with each label."""
        official = {"official": statistics.fmean(self.officials)} if self.judged else {}
        return {**official, **{f"labels/{name}": count for name, count in sorted(self.labels.items())}}


@dataclass(slots=True)
class Batch:
    """The rows of one step. `refused` counts the refusals by reason; `rewards` holds the rewards of all scored
    rollouts."""

    rows: list[TrainedRow] = field(default_factory=list)
    groups: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    rollouts: int = 0
    verdicts: Verdicts = field(default_factory=Verdicts)

    def add(
        self, group: Group, *, version: int, most_behind: int, scaled: bool = True, counterfactual: bool = False
    ) -> bool:
        """Add the rows of a group that were sampled by weights at most `most_behind` versions older than `version`.
        Rollouts that continue a rollout of another run are refused unless `counterfactual` is true. Returns whether any
        row was added. Raises `ConfigError` for a scored rollout without exact tokens."""
        if not counterfactual and (continued := [each for each in group.trajectories if each.origin is not None]):
            self.refused[COUNTERFACTUAL] += len(continued)
            own = [each for each in group.trajectories if each.origin is None]
            group = structs.replace(group, trajectories=own)
        scored = group.scored
        self.rollouts += len(group.trajectories)
        self.refused[UNSCORED] += len(group.trajectories) - len(scored)
        self.rewards += [each.reward for each in scored if each.reward is not None]
        self.verdicts.add(scored)
        if group.error or not scored:
            self.refused[FAILED] += 1
            return False
        if group.same_scores:
            self.refused[EQUAL] += 1
            return False
        fresh = []
        rewards = [each.reward or 0.0 for each in scored]
        gains = advantages(rewards, scaled=scaled)
        values = credit_of(scored)
        for trajectory, advantage in zip(scored, gains, strict=True):
            rows = _rows(trajectory, values.get(trajectory.index, ()))
            self.refused[WITHOUT_TOKENS] += not rows
            for row in rows:
                if _oldest(row, version) < version - most_behind:
                    self.refused[STALE] += 1
                elif row.credit is UNSET:
                    fresh.append(TrainedRow(row, advantage))
                else:
                    fresh += _by_credit(row, row.credit, rewards, scaled=scaled)
        self.rows += fresh
        self.groups += bool(fresh)
        return bool(fresh)

    def compare(self, own: Iterable[Sequence[float]], most: float) -> float:
        """Drop the rows that other weights sampled, or other tokens: those whose sampled tokens differ by more than
        `most` nats on average between sampler and trainer, and those with more than `MOST_FAR` tokens that are `FAR`
        off. A single token decides nothing, because samplers in bfloat16 are off by 0.1 nats on single tokens of most
        long rows. `own` are the trainer's log-probabilities. Returns the largest mean difference of a row, including
        the dropped rows."""
        differences = [_differences(row, theirs) for row, theirs in zip(self.rows, own, strict=True)]
        means = [statistics.fmean(each) if each else 0.0 for each in differences]
        kept = [
            row
            for row, each, mean in zip(self.rows, differences, means, strict=True)
            if mean <= most and sum(token > FAR for token in each) <= max(1, MOST_FAR * len(each))
        ]
        self.refused[DIFFERENT] += len(self.rows) - len(kept)
        self.rows = kept
        return max(means, default=0.0)


def _differences(row: TrainedRow, own: Sequence[float]) -> list[float]:
    """Return the difference on each sampled token in nats; infinity if a log-probability is not finite."""
    pairs = zip(row.logprobs, own, row.row.mask, strict=True)
    found = [abs(sampled - theirs) for sampled, theirs, on in pairs if on]
    return [each if math.isfinite(each) else math.inf for each in found]


def _by_credit(
    row: ExportedRow, credit: Sequence[tuple[int, int, float]], rewards: Sequence[float], *, scaled: bool
) -> list[TrainedRow]:
    """Return a copy of the row for each value in `credit`, in which only the tokens with that value are trained,
    because trainers accept only one advantage per sequence. The advantages are relative to `rewards`, the rewards of
    the group."""
    mean = statistics.fmean(rewards)
    deviation = max(statistics.pstdev(rewards), _SMALLEST_DEVIATION) if scaled else 1.0
    found = []
    for value in dict.fromkeys(value for _, _, value in credit):
        spans = [(start, stop) for start, stop, own in credit if own == value]
        end, mask = spans[-1][1], [0] * spans[-1][1]
        for start, stop in spans:
            mask[start:stop] = row.mask[start:stop]
        logprobs = [logprob if on else 0.0 for logprob, on in zip(row.logprobs or [], mask, strict=False)]
        part = structs.replace(row, completion_ids=row.completion_ids[:end], mask=mask, logprobs=logprobs)
        found.append(TrainedRow(part, (value - mean) / deviation))
    return found


def _rows(trajectory: Trajectory, values: Sequence[tuple[int, float]]) -> list[ExportedRow]:
    rows = exported_rows(trajectory, values, counterfactual=True)  # `Batch.add` has refused them, or was asked not to
    untrainable = any(row.logprobs is None or row.source == PLACEHOLDER for row in rows)
    if untrainable or not (rows or trajectory.unsaid):
        raise ConfigError(
            f"rollout {trajectory.rollout_id} has no sampled tokens with log-probabilities, so nothing can be trained: "
            "the environment must talk to the model through its token-exact server (`self.server` or the agent loop)"
        )
    return [row for row in rows if any(row.mask)]


def _oldest(row: ExportedRow, version: int) -> int:
    """Return the oldest version that sampled tokens of the row. Versions that are not numbers count as `version`."""
    return min((int(each) if each.isdecimal() else version for _, _, each in row.versions), default=version)
