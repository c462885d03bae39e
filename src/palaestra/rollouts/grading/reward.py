"""The reward that follows from a score: the official verdict, the guarded view and the labels.

The official verdict is that of the benchmark's published protocol. The guarded view is what the environment scored:
the agent's work, with the programs of the image as they were prepared. `decide` combines both and the labels, and
names the cause wherever the reward differs from the official verdict, so that no reward is 0 without a reason.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from enum import StrEnum

from palaestra.core.types import Score


class RewardRule(StrEnum):
    """The rule by which a score becomes a reward."""

    OFFICIAL = "official"
    """The official verdict alone, for numbers that compare with published ones."""
    GUARDED = "guarded"
    """The guarded view, and 0 for work with a label that is certain."""
    STRICT = "strict"
    """Like `GUARDED`, and 0 for work with any of the chosen labels, for training that prefers false zeros."""


def decide(score: Score, rule: RewardRule = RewardRule.GUARDED, strict: Collection[str] = ()) -> Score:
    """Return the score with the reward that the rule gives. `strict` names the labels that `STRICT` does not accept;
    if it is empty, `STRICT` accepts none.

    If the reward differs from the official verdict, `detail["difference"]` is a sentence that names the cause.
    """
    official = score.reward if score.official is None else score.official
    if rule is RewardRule.OFFICIAL:
        return replace(score, reward=official, official=official)
    against = [
        label
        for label in score.labels
        if label.certain or (rule is RewardRule.STRICT and (not strict or label.name in strict))
    ]
    reward = min(score.reward, 0.0) if against else score.reward
    if reward == official:
        return score
    cause = (against or [*score.labels])[:1]
    why = f"{cause[0].name}: {cause[0].evidence}" if cause else "the guarded view differs from what the agent left"
    difference = f"the official verdict is {official:g} and the reward is {reward:g}, because of {why}"
    return replace(score, reward=reward, official=official, detail={**score.detail, "difference": difference})
