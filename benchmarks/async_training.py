"""Does training learn as much when rollouts go on during its steps? The same models, tasks and numbers of steps, with
rollouts and steps in turns (`async_steps=0`) and with rollouts up to two steps ahead, where every model call takes one
second more, as with a remote model. Then trainings ahead are killed at random moments and resumed.

    python benchmarks/async_training.py               # three seeds, then 30 kills
    python benchmarks/async_training.py --quick       # one seed and few steps, then two kills

Needs the extra 'trl' (`scripts/torch_env` makes an environment with it). It downloads nothing and uses no GPU. The
held-out reward is the mean over all seeds.

Targets: the held-out rewards differ by at most 0.05; ahead takes at most 0.75 of the time; after all kills, no step is
missing, no group was trained twice, and `palaestra verify` finds nothing wrong.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # with models of this size, more than one thread is slower
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from _learn_tasks import make_model, two_tools
from _measure import Row, judged, options_parser, progress, report, with_ceiling

import palaestra
from palaestra import JSON
from palaestra_tokens.engine import Sampled
from palaestra_train import TrainingConfig, trl
from palaestra_train.checkpoints import read_step_groups
from palaestra_train.training import TrainingResult, split_tasks

DELAY_S = 1.0
AHEAD = 2
PRACTICE, STEPS, GROUPS, GROUP_SIZE = 220, 30, 8, 8
HELD_OUT, SAMPLES = 24, 8
MOST_APART, MOST_TIME = 0.05, 0.75
KILLED_STEPS = 12
_CHILD = "--train"


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="the number of seeds (default 3; 0: only the kills)")
    parser.add_argument("--kills", type=int, default=30, help="the number of kills (default 30)")
    parser.add_argument("--out", type=Path, default=Path("runs/async"), help="the folder for models and runs")
    parser.add_argument(
        _CHILD, dest="child", nargs=2, help="train the model of a folder, or resume RUN (for the kills)"
    )
    options = parser.parse_args()
    out = options.out.resolve()
    if options.child:
        train(Path(options.child[0]), out, AHEAD, steps=KILLED_STEPS, resume=options.child[1] or None, evaluate=False)
        return 0
    shutil.rmtree(out, ignore_errors=True)
    rows: list[Row] = []
    rewards: dict[int, list[float]] = {0: [], AHEAD: []}
    took: dict[int, list[float]] = {0: [], AHEAD: []}
    for seed in range(1 if options.quick else options.seeds):
        model = out / f"seed-{seed}" / "model"
        practised, _ = split_tasks(list(two_tools.source()), HELD_OUT, seed)
        make_model(model, practised, practice=PRACTICE, seed=seed)
        for ahead in (0, AHEAD) if seed % 2 else (AHEAD, 0):
            began = time.monotonic()
            result = train(
                model, model.parent / f"ahead-{ahead}", ahead, steps=3 if options.quick else STEPS, seed=seed
            )
            took[ahead].append(time.monotonic() - began)
            assert result.after is not None
            rewards[ahead].append(result.after)
            progress(f"seed {seed}, ahead {ahead}: {result.before} to {result.after:.3f}, {took[ahead][-1]:.0f} s")
            rows.append(Row(f"seed {seed}, {ahead} ahead: held-out reward", result.after, ""))
    if rewards[0]:
        rows += compared(rewards, took, judge=not options.quick)
    rows += kills(out / "kills", 2 if options.quick else options.kills)
    return report("Rollouts ahead of the weights", rows, options.json)


def compared(rewards: Mapping[int, Sequence[float]], took: Mapping[int, Sequence[float]], *, judge: bool) -> list[Row]:
    """Return the mean rewards and median times of the trainings in turns and ahead, judged unless they were short."""
    means = {ahead: statistics.fmean(each) for ahead, each in rewards.items()}
    times = {ahead: statistics.median(each) for ahead, each in took.items()}
    apart = Row("held-out reward: difference of the means", abs(means[0] - means[AHEAD]), "")
    ratio = Row(f"time {AHEAD} ahead", times[AHEAD] / times[0], "of in turns")
    return [
        *(Row(f"{ahead} ahead: held-out reward", each, "") for ahead, each in means.items()),
        *(Row(f"{ahead} ahead: time of a training", each, "s") for ahead, each in times.items()),
        with_ceiling(apart, MOST_APART) if judge else apart,
        with_ceiling(ratio, MOST_TIME) if judge else ratio,
    ]


def train(
    model: Path,
    folder: Path,
    ahead: int,
    *,
    steps: int,
    seed: int = 0,
    resume: str | None = None,
    evaluate: bool = True,
) -> TrainingResult:
    """Train a model with slow model calls, and return the result."""
    import torch

    torch.set_num_threads(1)
    trl._SamplingEngine.generate = slow_generate  # type: ignore[method-assign]
    training = TrainingConfig(
        steps=steps,
        groups=GROUPS if evaluate else 2,
        most_draws=20,
        learning_rate=5e-4,
        eval_every=steps if evaluate else 0,
        eval_tasks=HELD_OUT,
        eval_samples=SAMPLES,
        save_every=20 if evaluate else 2,
        async_steps=ahead,
    )
    found = asyncio.run(
        palaestra.train(
            two_tools(),
            model=str(model),
            group_size=GROUP_SIZE,
            folder=folder,
            training=training,
            seed=seed,
            max_agent_turns=3,
            max_token_length=40,
            concurrency=16 * (1 + ahead),
            **({"resume": resume} if resume else {}),
        )
    )
    return found.result


_generate = trl._SamplingEngine.generate


async def slow_generate(engine: trl._SamplingEngine, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
    await asyncio.sleep(DELAY_S)
    return await _generate(engine, input_ids, sampling)


def kills(out: Path, wanted: int) -> list[Row]:
    """Kill trainings at random moments and resume them until `wanted` kills have happened and the last has ended."""
    practised, _ = split_tasks(list(two_tools.source()), HELD_OUT, 0)
    make_model(out / "model", practised, practice=PRACTICE, seed=0)
    rng, done, runs = random.Random(0), 0, list[Path]()
    while done < wanted or not runs:
        folder, resume, ended = out / f"run-{len(runs)}", "", False
        while not ended:
            words = [sys.executable, __file__, "--out", str(folder), _CHILD, str(out / "model"), resume]
            with subprocess.Popen(
                words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
            ) as child:
                try:
                    _, said = child.communicate(timeout=rng.uniform(6, 30) if done < wanted else None)
                    ended = True
                    assert child.returncode == 0, said.decode()[-2000:]
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.communicate()
                    done += 1
                    progress(f"kill {done} of {wanted}")
            found = [path.parent for path in folder.glob("*/*/journal.jsonl") if path.stat().st_size]
            resume = str(found[0]) if found else ""
        runs.append(found[0])
    wrong = [problem for run in runs for problem in problems(run)]
    for each in wrong:
        progress(each)
    return [
        Row("kills", done, ""),
        Row("trainings that were killed and ended", len(runs), ""),
        judged(Row("steps missing, groups trained twice, runs that do not verify", len(wrong), ""), 0, not wrong),
    ]


def problems(run: Path) -> list[str]:
    """Return what is wrong with the record of a training that was killed."""
    steps = read_step_groups(run)
    found = [f"{run}: step {step} is missing" for step in range(1, KILLED_STEPS + 1) if step not in steps]
    times = Counter(number for each in steps.values() for number in each.trained)
    found += [f"{run}: group {number} was trained {count} times" for number, count in times.items() if count > 1]
    verified = subprocess.run([sys.executable, "-m", "palaestra", "verify", str(run)], capture_output=True, text=True)
    if verified.returncode:
        found.append(f"{run}: palaestra verify: {verified.stdout[-500:]}{verified.stderr[-500:]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
