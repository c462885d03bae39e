"""Do trees save tool calls? A table learns to open a safe with six keys, from chains and from trees, in slots.

    python benchmarks/trees.py               # five seeds
    python benchmarks/trees.py --quick       # one seed and few steps: only checks that the benchmark runs

Both learn with the same settings from groups of the same size until the table's expected reward, which is computed
exactly, reaches the same value. The result is the number of commands that ran in slots until then. In a tree, two
rollouts of a group are roots, and the other rollouts branch off before the roots' least likely turns. One comparison
uses a learner that knows the first half of the keys well, the other a learner that knows nothing. Nothing is
downloaded.

Target: if the beginning is known, at most 0.67 times the commands of chains. The other ratio has no target.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

import _tree_tasks
from _measure import Row, options_parser, progress, report, with_ceiling
from _tree_tasks import STEPS, Reached, TableTrainer, safe

import palaestra
from palaestra import TrainingConfig
from palaestra.rollouts.journal.verify import verify_run

GROUP_SIZE, BRANCHES, GROUPS, MOST_STEPS = 8, 6, 4, 60
TARGET, MOST = 0.9, 0.67
STUDENT_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 9: 2.26}
"""The 97.5% quantiles by degrees of freedom."""


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="the number of seeds (default 5)")
    options = parser.parse_args()
    seeds = range(1 if options.quick else options.seeds)
    target = 0.65 if options.quick else TARGET
    rows: list[Row] = []
    for known, name in ((STEPS // 2, "half of the keys known"), (0, "no key known")):
        chains, trees = [], []
        for seed in seeds:
            chains.append(commands(seed, known, 0, target))
            trees.append(commands(seed, known, BRANCHES, target))
            progress(f"{name}, seed {seed}: {chains[-1]:.0f} commands of chains, {trees[-1]:.0f} of trees")
        ratios = [tree / chain for tree, chain in zip(trees, chains, strict=True)]
        ratio = Row(f"{name}: trees to chains", statistics.fmean(ratios), "")
        rows += [
            Row(f"{name}: chains until reward {target:g}", statistics.fmean(chains), "commands"),
            Row(f"{name}: trees until reward {target:g}", statistics.fmean(trees), "commands"),
            with_ceiling(ratio, MOST) if known and not options.quick else ratio,
        ]
        if len(ratios) > 1:
            rows.append(Row(f"{name}: 95 % interval, half width", half_width(ratios), ""))
    return report("Trees and chains of equal reward", rows, options.json)


def commands(seed: int, known: int, branches: int, target: float) -> float:
    """Return the number of commands until the expected reward is `target`, interpolated between two steps; verify the
    run's ledgers."""
    _tree_tasks.calls = 0
    trainer = TableTrainer(seed=seed, known=known, target=target)
    with tempfile.TemporaryDirectory() as folder:
        training = palaestra.train(
            safe(),
            trainer=trainer,
            group_size=GROUP_SIZE,
            branches=branches,
            branch_at="uncertain",
            folder=folder,
            training=TrainingConfig(steps=MOST_STEPS, groups=GROUPS, most_draws=4, eval_every=0, max_tasks=2000),
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
