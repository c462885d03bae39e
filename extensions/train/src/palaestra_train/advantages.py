"""Makes rows with advantages from groups, and refuses rows that should not be trained.

Advantages compare the scored rollouts of one group. A rollout with several segments has several rows with one
advantage, and each sampled token is in only one of them. Unscored rollouts, groups with an error, groups
whose scores are equal, and rows that were sampled by weights that are too old are not trained. Tokens on which sampler
and trainer differ are weighed or masked (`importance`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from palaestra.rollouts.export.token_rows import ExportedRow, exported_rows
from palaestra.rollouts.records import PLACEHOLDER, Group, Trajectory
from palaestra_slots.core.errors import ConfigError, TrainerError
from palaestra_train.config import TrainingConfig
from palaestra_train.importance import SamplerMismatch, corrected
from palaestra_train.trainer import TrainedRow, Weigh

UNSCORED, EQUAL, FAILED = "unscored_rollouts", "equal_groups", "failed_groups"
COUNTERFACTUAL = "counterfactual_rollouts"
STALE, LATE = "stale_rows", "late_groups"
WITHOUT_TOKENS, DIFFERENT = "rollouts_without_tokens", "rows_that_differ"
TOO_LONG = "rows_too_long"

_SMALLEST_DEVIATION = 1e-6


def advantages(rewards: Sequence[float], *, scaled: bool = True, kind: str = "grpo") -> list[float]:
    """Return the rewards of one group relative to their mean. If `scaled` is true, they are also divided by their
    standard deviation (GRPO, arXiv 2402.03300); without it, they are those of Dr. GRPO, arXiv 2503.20783. With the kind
    `rloo`, each reward is relative to the mean of the others and not scaled (RLOO, arXiv 2402.14740)."""
    mean, count = statistics.fmean(rewards), len(rewards)
    if kind == "rloo":
        return [(reward - mean) * count / max(1, count - 1) for reward in rewards]
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
    """The rows of one step. `refused` counts the refusals by reason, and `late` names the groups of weights that are
    too old; `rewards` holds the rewards of all scored rollouts. `mismatch` is set once the rows are weighed."""

    rows: list[TrainedRow] = field(default_factory=list)
    groups: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    rollouts: int = 0
    verdicts: Verdicts = field(default_factory=Verdicts)
    late: list[str] = field(default_factory=list)
    mismatch: SamplerMismatch = field(default_factory=SamplerMismatch)

    def add(
        self,
        group: Group,
        *,
        version: int,
        most_behind: int,
        scaled: bool = True,
        advantage: str = "grpo",
        counterfactual: bool = False,
    ) -> bool:
        """Add the rows of a group, unless weights more than `most_behind` versions older than `version` sampled some of
        them: the advantages of the other rows would then be relative to rollouts that are not trained. Rollouts that
        continue a rollout of another run are refused unless `counterfactual` is true. Returns whether any row was
        added. Raises `ConfigError` for a scored rollout without exact tokens."""
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
        made: list[TrainedRow] = []
        rewards = [each.reward or 0.0 for each in scored]
        gains = advantages(rewards, scaled=scaled, kind=advantage)
        for trajectory, gain in zip(scored, gains, strict=True):
            rows = _trained_rows(trajectory)
            self.refused[WITHOUT_TOKENS] += not rows
            made += [TrainedRow(row, gain) for row in rows]
        return self.keep(made, group.group_id, version, most_behind)

    def keep(self, rows: Sequence[TrainedRow], name: str, version: int, most_behind: int | None) -> bool:
        """Add the rows of one group, or count it as late if its weights are more than `most_behind` versions older than
        `version`. Returns whether any row was added."""
        stale = sum(most_behind is not None and _oldest(each.row, version) < version - most_behind for each in rows)
        if stale:
            self.refused[STALE] += stale
            self.refused[LATE] += 1
            self.late.append(name)
            return False
        self.rows += rows
        self.groups += bool(rows)
        return bool(rows)

    def staleness(self, version: int) -> dict[str, float]:
        """Return by how many versions the weights that sampled the tokens are older than `version`: the mean over all
        sampled tokens, and the maximum. Empty if no row has versions."""
        ages = Counter[int]()
        for each in self.rows:
            for start, stop, sampled in each.row.versions:
                if sampled.isdecimal():
                    ages[version - int(sampled)] += stop - start
        if not ages:
            return {}
        mean = sum(age * count for age, count in ages.items()) / max(1, ages.total())
        return {"staleness": mean, "most_staleness": max(ages)}

    def weighing(self, config: TrainingConfig, step: int) -> Weigh:
        """Return what weighs the tokens of a step by the trainer's log-probabilities, as `importance.corrected` does.
        Rows of which every token is masked are refused. Raises `TrainerError` if sampler and trainer differ too much
        on average."""

        def weigh(rows: Sequence[TrainedRow], own: Sequence[Sequence[float]]) -> Sequence[TrainedRow]:
            self.rows, found = corrected(rows, own, cap=config.importance_cap, limit=config.importance_limit)
            self.refused[DIFFERENT] += found.rows
            self.mismatch = found
            if found.mean > config.most_nats or not self.rows:
                raise TrainerError(
                    f"step {step}: the log-probabilities of sampler and trainer differ by {found.mean:.3g} nats on "
                    f"average over {found.tokens} tokens (max_difference {config.most_nats:g}; {found.masked} tokens "
                    f"differ by a factor above {config.importance_limit:g}). Let the sampler use the trainer's weights "
                    "and tokenizer"
                )
            return self.rows

        return weigh


def _trained_rows(trajectory: Trajectory) -> list[ExportedRow]:
    rows = exported_rows(trajectory, counterfactual=True)  # `Batch.add` has refused them, or was asked not to
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
