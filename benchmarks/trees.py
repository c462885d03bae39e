"""Do trees save tool calls? A table learns to open a safe with six keys, from chains and from trees, in slots.

    python benchmarks/trees.py               # five seeds
    python benchmarks/trees.py --quick       # one seed and few steps: only checks that the benchmark runs
    python benchmarks/_tree_simulation.py    # choose the tuned settings again, without slots

Each arm learns until the table's expected reward, which is computed exactly, reaches the same value. The result is the
number of commands that ran in slots until then. In a tree, some rollouts of a group are roots, and the others branch
off before the roots' least likely turns. Three cases differ in what the learner knows at first and in the reward.

Equal settings are not a fair comparison: at a low learning rate, a step of either arm learns equally much, and the arm
with fewer commands per step wins. The control shows this: chains in half as many groups. The comparison that counts is
the one between chains and trees that are each tuned for the task. Nothing is downloaded.

Target: if half of the keys are known, tuned trees need at most 0.8 times the commands of tuned chains. The other ratios
have no target.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import _tree_tasks
from _measure import Row, options_parser, progress, report, with_ceiling
from _tree_simulation import TUNED, Arm
from _tree_tasks import STEPS, Reached, TableTrainer, safe

import palaestra
from palaestra import TrainingConfig
from palaestra.rollouts.journal.verify import verify_run

MOST_STEPS, MOST = 200, 0.8
STUDENT_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 9: 2.26}
"""The 97.5% quantiles by degrees of freedom."""

EQUAL = {"chains": Arm(6.0, 4, 8, 0), "chains in half the groups": Arm(6.0, 2, 8, 0), "trees": Arm(6.0, 4, 8, 6)}


@dataclass(frozen=True, slots=True)
class Case:
    """A task: the number of keys that are known at first, the reward, and the tuned arms."""

    name: str
    known: int
    sparse: bool
    target: float
    arms: Mapping[str, Arm]


CASES = (
    Case("half of the keys known", 3, False, 0.9, EQUAL | TUNED["half"]),
    Case("no key known", 0, False, 0.9, EQUAL | TUNED["none"]),
    Case("four keys known, reward 1 or 0", 4, True, 0.5, TUNED["sparse"]),
)


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="the number of seeds (default 5)")
    options = parser.parse_args()
    seeds = range(1 if options.quick else options.seeds)
    rows: list[Row] = []
    for case in CASES[:1] if options.quick else CASES:
        target = 0.65 if options.quick else case.target
        found = {name: [commands(seed, case, arm, target) for seed in seeds] for name, arm in case.arms.items()}
        for name, counts in found.items():
            progress(f"{case.name}, {name}: {', '.join(f'{count:.0f}' for count in counts)} commands")
            rows.append(Row(f"{case.name}: {name} until reward {target:g}", statistics.fmean(counts), "commands"))
        pairs = [("chains in half the groups", "chains"), ("trees", "chains"), ("tuned trees", "tuned chains")]
        for one, other in pairs:
            if one not in found:
                continue
            ratios = [a / b for a, b in zip(found[one], found[other], strict=True)]
            ratio = Row(f"{case.name}: {one} to {other}", statistics.fmean(ratios), "")
            bounded = one == "tuned trees" and case.known == STEPS // 2 and not options.quick
            rows.append(with_ceiling(ratio, MOST) if bounded else ratio)
            if len(ratios) > 1:
                rows.append(Row(f"{case.name}: {one} to {other}, 95 % interval, half width", half_width(ratios), ""))
    return report("Trees and chains of equal reward", rows, options.json)


def commands(seed: int, case: Case, arm: Arm, target: float) -> float:
    """Return the number of commands until the expected reward is `target`, interpolated between two steps; verify the
    run's ledgers."""
    _tree_tasks.calls = 0
    trainer = TableTrainer(seed=seed, known=case.known, target=target, rate=arm.rate, sparse=case.sparse)
    with tempfile.TemporaryDirectory() as folder:
        training = palaestra.train(
            safe(sparse=case.sparse),
            trainer=trainer,
            group_size=arm.size,
            branches=arm.branches,
            branch_at="uncertain",
            folder=folder,
            training=TrainingConfig(
                steps=MOST_STEPS, groups=arm.groups, most_draws=4, eval_every=0, max_tasks=2000, replay=1.0
            ),
            seed=seed,
            concurrency=16,
        )
        with suppress(Reached):
            asyncio.run(training)
        verdict = verify_run(palaestra.open_run("last", root=folder).path / "journal.jsonl")
    assert verdict.ok, verdict.violation
    (before, less), (after, more) = trainer.history[-2:]
    assert more >= target, f"seed {seed}: {MOST_STEPS} steps reach only {more:.3f}"
    return before + (after - before) * (target - less) / (more - less)


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95% confidence interval of the mean of several values."""
    quantile = STUDENT_T.get(len(values) - 1, 1.96)
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
    sys.exit(main())
