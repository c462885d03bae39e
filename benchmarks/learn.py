"""Does a model learn? A tiny model practises two tool tasks badly, and is then trained on them in slots with sealed
grading.

    python benchmarks/learn.py               # three seeds, one after the other; `make learn` runs one
    python benchmarks/learn.py --other       # the same with two other tasks
    python benchmarks/learn.py --quick       # one seed and few steps: only checks that the benchmark runs

Needs the extra 'trl' (`scripts/torch_env` makes an environment with it). It downloads nothing and uses no GPU. For each
seed, the script creates a new model, lets it practise and trains it with `palaestra.train`. The reward of held-out
tasks before and after the training is sampled, not greedy. The curves are written as PNG, and as HTML in the report of
each run. Rollouts are one step ahead of the weights, so that sampling and training share two cores.

Targets: the held-out reward rises by at least 0.5 for each seed, in at most 120 s of rollouts and steps; the
log-probabilities of sampler and trainer differ by at most 1e-4 on the first step, whose rows have no older weights; at
most 10% of the time is spent on anything other than sampling, training and commands.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # with models of this size, more than one thread is slower
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from _learn_other_tasks import conversation, other_tools
from _learn_tasks import conversation as two_tools_conversation
from _learn_tasks import make_model, two_tools
from _learning_curves import curve, plot
from _measure import Row, options_parser, progress, report, with_ceiling, with_floor

import palaestra
from palaestra.rollouts.observe.training_steps import EVALUATION, STEP, read_steps
from palaestra_train import TrainingConfig, TrainingReport
from palaestra_train.training import split_tasks

PRACTICE, STEPS, GROUPS, GROUP_SIZE = 220, 30, 8, 8
HELD_OUT, SAMPLES = 24, 4
LEAST_RISE, MOST_LEARNING_S, MOST_DIFFERENCE, MOST_OVERHEAD = 0.5, 120, 100, 0.1


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="the number of seeds (default 3)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--other", action="store_true", help="learn two other tasks: the last line, and renaming")
    parser.add_argument("--out", type=Path, default=Path("runs/learn"), help="the folder for models, runs and curves")
    options = parser.parse_args()
    seeds = range(options.first, options.first + (1 if options.quick else options.seeds))
    rows: list[Row] = []
    curves: dict[int, Path] = {}
    for seed in seeds:
        began = time.monotonic()
        learned = learn(seed, options.out / f"seed-{seed}", quick=options.quick, other=options.other)
        result, took = learned.result, time.monotonic() - began
        assert result.before is not None
        assert result.after is not None
        curves[seed] = learned.run.folder
        steps = [line for line in read_steps(curves[seed]) if line["kind"] == STEP]
        spent = sum(line["rollout_s"] + line["train_s"] for line in steps)
        learning = Row(f"seed {seed}: rollouts and steps", spent, "s")
        dull, used = (sum(line[name] for line in steps) for name in ("dull_groups", "groups"))
        rise = Row(f"seed {seed}: rise", result.after - result.before, "")
        rows += [
            Row(f"seed {seed}: held-out reward before", result.before, ""),
            Row(f"seed {seed}: groups with equal rewards", dull / (dull + used), "of the groups"),
            Row(f"seed {seed}: held-out reward after {result.steps} steps", result.after, ""),
            rise if options.quick else with_floor(rise, LEAST_RISE),
            with_ceiling(
                Row(f"seed {seed}: sampler to trainer", 1e6 * steps[0]["logprob_difference"], "1e-6 nats"),
                MOST_DIFFERENCE,
            ),
            with_ceiling(Row(f"seed {seed}: overhead", result.overhead, "of the time"), MOST_OVERHEAD),
            learning if options.quick else with_ceiling(learning, MOST_LEARNING_S),
            Row(f"seed {seed}: everything", took, "s"),
        ]
        progress(f"seed {seed}: {result.before:.3f} before, {result.after:.3f} after, {took:.0f} s")
    picture = options.out / "learn.png"
    plot({f"seed {seed}": run for seed, run in curves.items()}, picture, "two tool tasks, in slots")
    for seed, folder in curves.items():
        print(f"seed {seed}: {folder / 'report.html'}")
    print(picture)
    drawn = {str(seed): {kind: curve(run, kind) for kind in (STEP, EVALUATION)} for seed, run in curves.items()}
    return report("A model learns two tool tasks", rows, options.json, curves=drawn)


def learn(seed: int, out: Path, *, quick: bool, other: bool = False) -> TrainingReport:
    """Create a model in `out`, let it practise the tasks that are not held out, and train it."""
    import torch

    torch.set_num_threads(1)
    shutil.rmtree(out, ignore_errors=True)
    tasks, talk = (other_tools, conversation) if other else (two_tools, two_tools_conversation)
    practised, _ = split_tasks(list(tasks.source()), HELD_OUT, seed)
    loss = make_model(out / "model", practised, practice=60 if quick else PRACTICE, seed=seed, conversation=talk)
    progress(f"seed {seed}: practised, loss {loss:.3f}")
    return asyncio.run(
        palaestra.train(
            tasks(),
            model=str(out / "model"),
            group_size=GROUP_SIZE,
            folder=out / "runs",
            progress=sys.stderr.isatty(),
            training=TrainingConfig(
                steps=3 if quick else STEPS,
                groups=2 if quick else GROUPS,
                most_draws=20 if quick else 3,
                learning_rate=5e-4,
                eval_every=3 if quick else 20,
                eval_tasks=HELD_OUT,
                eval_samples=1 if quick else SAMPLES,
                save_every=20,
                async_steps=1,
            ),
            seed=seed,
            max_agent_turns=3,
            max_token_length=40,
            concurrency=24,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
