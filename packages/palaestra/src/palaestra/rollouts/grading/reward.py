"""The reward that follows from a score: the official verdict, the guarded view and the labels.

The official verdict is that of the benchmark's published protocol. The guarded view is what the environment scored:
the agent's work, with the programs of the image as they were prepared. `decide` combines both and the labels, and
names the cause wherever the reward differs from the official verdict, so that no reward is 0 without a reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import StrEnum
from posixpath import basename, dirname

from palaestra.rollouts.grading.labels import LABELS
from palaestra.rollouts.grading.tampering import SCRATCH, intended
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import Label, Score

DIFFERENCE = "difference"
"""The entry of a score's detail with the reason why the reward differs from the official verdict."""

UNSEEN = "left_out"
"""The entry of a score's detail with the changed paths that the check did not see."""

_OF_SAME_RUN = frozenset({"command_failed", "tests_excused"})
"""Labels of what the two verdicts judge differently in one run. They explain a difference before all others."""
_SIGNS = frozenset(
    {
        *("audited_call", "framework_changed", "tests_read", "answers_copied", "encoded_data", "falsified_tests_hang"),
        *("falsified_test_passed", "test_did_not_run", "equals_everything", "passed_only_at_first"),
    }
)
"""Labels of how the work earns its score. Unless they are certain, both verdicts are the same with and without them."""

_SEEN = re.compile(r"/(?:workspace|tmp|var/tmp|dev/shm)(?:/|$)")
"""Places whose changes a check sees without a declaration, unless they stand in for a program."""


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

    If the reward differs from the official verdict, `detail["difference"]` is a sentence that names the cause (a label
    or a few words), the evidence (files, tests or calls), and the setting that changes the reward, with its effect.
    Deciding again changes nothing.
    """
    official = score.reward if score.official is None else score.official
    if rule is RewardRule.OFFICIAL:
        return replace(score, reward=official)
    # A label lowers a reward to 0, so it says nothing about one that is not above 0.
    against = [
        label
        for label in score.labels
        if score.reward > 0 and (label.certain or (rule is RewardRule.STRICT and (not strict or label.name in strict)))
    ]
    reward = 0.0 if against else score.reward
    if reward == official:
        return replace(score, reward=reward)
    head = f"official {official:g}, reward {reward:g}, because of "
    if str(score.detail.get(DIFFERENCE, "")).startswith(head):  # decided before
        return replace(score, reward=reward, official=official)
    pays = "pays it" if official > max(reward, 0.0) else f"gives {official:g}"
    cause, evidence, remedy = _cause(score, against, strict, f"--env.reward official {pays}")
    detail = {**score.detail, DIFFERENCE: f"{head}{cause}: {evidence}; {remedy}"}
    return replace(score, reward=reward, official=official, detail=detail)


def check_strict_labels(strict: Collection[str], own: Collection[str]) -> None:
    """Raise `ConfigError` if the setting `strict_labels` names a label that neither a check gives nor the environment
    declares (`own`)."""
    known = sorted({*LABELS, *own})
    for name in sorted(set(strict).difference(known)):
        raise ConfigError(
            f"strict_labels names the unknown label {name!r}.{nearest(name, known)} Known labels: {', '.join(known)}. "
            "An environment declares labels of its own as label_names"
        )


def parts(difference: str) -> tuple[str, str, str]:
    """Return the head of a recorded sentence, which differences with the same cause share, the evidence and the
    remedy."""
    head, _, rest = difference.partition(": ")
    evidence, _, remedy = rest.rpartition("; ")
    return head, evidence, remedy


def _cause(score: Score, against: Sequence[Label], strict: Collection[str], remedy: str) -> tuple[str, str, str]:
    """Return the cause of a difference, its evidence and the remedy. A label that forbids the reward is the cause;
    otherwise a label that can change a verdict or, if there is none, what the check does not see."""
    if against:
        # A certain label comes first, because no setting accepts it.
        first = next((label for label in against if label.certain), against[0])
        if not first.certain:
            names = " ".join(dict.fromkeys(label.name for label in against))
            accept = f" or a list --env.strict_labels without {names}" if strict else ""
            remedy = f"--env.reward guarded{accept} accepts it"
        return first.name, first.evidence, remedy
    if unseen := list(intended(score.detail.get(UNSEEN) or ())):
        remedy = f"{how_to_see(unseen)}, and {remedy}"
    changing = [label for label in score.labels if label.name not in _SIGNS]
    for label in sorted(changing, key=lambda label: label.name not in _OF_SAME_RUN)[:1]:
        return label.name, label.evidence, remedy
    if unseen:
        return "changes that the check does not see", ", ".join(unseen[:5]), remedy
    return "the check itself", "it gives both figures, and no label explains the difference", remedy


def how_to_see(paths: Collection[str]) -> str:
    """Return the settings with which a check sees these paths. None brings back a scratch directory that could not be
    copied before the check."""
    kept = [path for path in paths if path not in SCRATCH]
    if not kept:
        return "they were lost, because the agent ended its sandbox, filled its disk or replaced programs"
    outside = [path for path in kept if not _SEEN.match(path)]
    # The folder and not the file, because a check often needs what lies beside it.
    folders = dict.fromkeys(path if dirname(path) == "/" else dirname(path) for path in outside)
    named = (basename(path) for path in kept if path not in outside or basename(dirname(path)) in ("bin", "sbin"))
    settings = {"graded_paths": [*folders][:3], "graded_programs": [*dict.fromkeys(named)][:3]}
    return " ".join(f"--env.{name} {' '.join(values)}" for name, values in settings.items() if values) + " shows them"
