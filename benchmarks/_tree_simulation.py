"""The training of `_tree_tasks.TableTrainer` without slots, to try many settings in seconds.

`benchmarks/trees.py` chooses the learning rate, the number of groups and their size with it, for chains and for trees
alike, and then measures the chosen settings in slots.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _tree_tasks import CODE, KEYS, STEPS

RATES, GROUPS, SIZES = (12.0, 24.0, 48.0, 96.0), (1, 2), (4, 8, 16)
MOST_STEPS = 400


@dataclass(frozen=True, slots=True)
class Arm:
    """The settings of one training: `branches` of the `size` rollouts in each of `groups` groups branch off."""

    rate: float
    groups: int
    size: int
    branches: int


TUNED: Mapping[str, Mapping[str, Arm]] = {
    "half": {"tuned chains": Arm(24.0, 1, 4, 0), "tuned trees": Arm(24.0, 1, 8, 6)},
    "none": {"tuned chains": Arm(96.0, 1, 16, 0), "tuned trees": Arm(48.0, 1, 16, 8)},
    "sparse": {"tuned chains": Arm(96.0, 1, 4, 0), "tuned trees": Arm(96.0, 1, 16, 12)},
}
"""What `tuned` finds with 24 seeds for the cases of `benchmarks/trees.py`."""


def tuned(known: int, *, trees: bool, target: float, sparse: bool, seeds: int) -> tuple[Arm, float]:
    """Return the arm with the fewest commands until the target, and their mean number."""
    arms = [
        Arm(rate, groups, size, branches)
        for rate, groups, size in itertools.product(RATES, GROUPS, SIZES)
        for branches in ((size // 2, 3 * size // 4) if trees else (0,))
    ]
    found = {
        arm: statistics.fmean(simulated(seed, known, arm, target=target, sparse=sparse) for seed in range(seeds))
        for arm in arms
    }
    best = min(arms, key=found.__getitem__)
    return best, found[best]


def simulated(seed: int, known: int, arm: Arm, *, target: float, sparse: bool) -> float:
    """Return the number of commands until the expected reward is `target`; infinity if the training does not get
    there."""
    rng, calls = random.Random(seed), 0
    weights = [[3.0 * (step < known and key == int(CODE[step])) for key in range(KEYS)] for step in range(STEPS)]
    for _ in range(MOST_STEPS):
        chances = [[math.exp(each) / sum(map(math.exp, line)) for each in line] for line in weights]
        right = [line[int(key)] for line, key in zip(chances, CODE, strict=True)]
        if (math.prod(right) if sparse else statistics.fmean(right)) >= target:
            return calls
        presses: list[tuple[float, int, int]] = []
        trained = 0
        for _ in range(4 * arm.groups):
            made, cost = _group(rng, chances, arm, sparse)
            calls += cost
            presses += made
            trained += bool(made)
            if trained == arm.groups:
                break
        for advantage, step, key in presses:
            for other in range(KEYS):
                weights[step][other] += arm.rate * advantage * ((other == key) - chances[step][other]) / len(presses)
    return math.inf


def _group(
    rng: random.Random, chances: Sequence[Sequence[float]], arm: Arm, sparse: bool
) -> tuple[list[tuple[float, int, int]], int]:
    """Return the trained presses of a group as (advantage, step, key), and the number of commands."""

    def press(step: int) -> int:
        return rng.choices(range(KEYS), chances[step])[0]

    roots = [[press(step) for step in range(STEPS)] for _ in range(arm.size - arm.branches)]
    points = [(index, turn) for index in range(len(roots)) for turn in range(STEPS)]
    points.sort(key=lambda point: chances[point[1]][roots[point[0]][point[1]]])  # the least likely turns first
    forks = [points[number % len(points)] for number in range(arm.branches)]
    branches = [(root, turn, roots[root][:turn] + [press(step) for step in range(turn, STEPS)]) for root, turn in forks]
    keys = [*roots, *(line for _, _, line in branches)]
    hits = [sum(key == int(own) for key, own in zip(line, CODE, strict=True)) for line in keys]
    rewards = [float(hit == STEPS) if sparse else hit / STEPS for hit in hits]
    cost = STEPS * len(roots) + sum(STEPS - turn for _, turn, _ in branches)
    deviation = statistics.pstdev(rewards)
    if not deviation:
        return [], cost
    mean, found = statistics.fmean(rewards), []
    for index, line in enumerate(keys):
        begins = 0 if index < len(roots) else branches[index - len(roots)][1]
        for step in range(begins, STEPS):
            sharing = [rewards[index]]
            if index < len(roots):
                later = enumerate(branches, len(roots))
                sharing += [rewards[at] for at, (root, turn, _) in later if root == index and turn > step]
            found.append(((statistics.fmean(sharing) - mean) / deviation, step, line[step]))
    return found, cost


if __name__ == "__main__":
    for sparse, known in ((False, STEPS // 2), (False, 0), (True, 4)):
        goal = 0.5 if sparse else 0.9
        for trees in (False, True):
            arm, commands = tuned(known, trees=trees, target=goal, sparse=sparse, seeds=24)
            print(f"sparse {sparse}, known {known}, {'trees' if trees else 'chains'}: {commands:.0f} commands, {arm}")
