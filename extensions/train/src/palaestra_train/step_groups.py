"""Checks which groups the steps of a training run trained on, and which weights sampled their tokens.

Invariants: no group is trained twice; no token comes from weights that did not exist before the step, or that are older
than the run allows; within a segment, later tokens never come from older weights. Of a step that was repeated after an
interruption, only the last record counts, because the weights of the earlier attempt are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from palaestra.rollouts.journal.reader import Recording, journal_of
from palaestra.rollouts.observe.training_steps import StepsVerdict
from palaestra.rollouts.records import Group
from palaestra_train.checkpoints import StepGroups, read_step_groups


def verify_steps(run: Path) -> StepsVerdict:
    """Check the steps of the training run in a folder. Raises `ConfigError` if its journal cannot be read."""
    steps = read_step_groups(run)
    if not steps:
        return StepsVerdict()
    by_number = {number: each for each in steps.values() for number in each.trained}
    groups = {group.number: group for group in Recording(journal_of(run)) if group.number in by_number}
    problem = next(_problems(steps.values(), by_number, groups), "")
    return StepsVerdict(len(steps), sum(len(each.trained) for each in steps.values()), problem)


def _problems(steps: Iterable[StepGroups], by_number: dict[int, StepGroups], groups: dict[int, Group]) -> Iterator[str]:
    seen: dict[int, int] = {}
    for step in steps:
        for number in step.trained:
            if number in seen:
                yield f"group {number} is trained in step {seen[number]} and again in step {step.step}"
            seen[number] = step.step
            if number not in groups:
                yield f"step {step.step} trains group {number}, which is not in the journal"
    for number, group in groups.items():
        step = by_number[number]
        for trajectory in group.scored:
            for row in trajectory.rows:
                versions = [int(version) for _, _, version in row.versions if version.isdecimal()]
                place = f"step {step.step}: rollout {trajectory.rollout_id}, segment {row.segment}"
                if any(after < before for before, after in pairwise(versions)):
                    yield f"{place}: weights of version {max(versions)} are followed by older ones"
                if versions and max(versions) > step.version:
                    yield f"{place}: version {max(versions)} sampled it, but the step begins with {step.version}"
                if versions and min(versions) < step.version - step.most_behind:
                    yield (
                        f"{place}: version {min(versions)} sampled it, which is more than {step.most_behind} before "
                        f"{step.version}"
                    )
