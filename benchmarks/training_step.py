"""What does a training step on the real small model need? Memory beside the model, and CPU time, of the server behind
`--trainer tinker`: 3 groups of 8 rows with 400 tokens each.

    python benchmarks/training_step.py                        # one round of each case
    python benchmarks/training_step.py --peer FOLDER          # in turns with another checkout of this repository
    python benchmarks/training_step.py --quick                # a tiny model: only checks that the benchmark runs

Needs the extra 'tinker' and `palaestra model get smollm2`. A step computes the log-probabilities of all rows, their
gradient, and one update of an adapter with rank 32. The rows of a group share a prompt of 300 tokens, as the rollouts
of a task do; in the second case no two rows share anything. The time is CPU time of one thread.

Targets: at most 4 GiB beside the model, and at most 0.7 of the time of the peer with shared prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from _measure import Meter, Row, Sample, interleaved, judged, options_parser, report, with_ceiling

GROUPS, SIZE, PROMPT, REPLY, VOCABULARY = 3, 8, 300, 100, 49152
MOST_GIB, MOST_RATIO = 4.0, 0.7


def main() -> int:
    parser = options_parser(__doc__, 1)
    parser.add_argument("--model", default="smollm2", help="the model's folder or name (default smollm2)")
    parser.add_argument("--peer", type=Path, help="a checkout of this repository to compare with")
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"the number of groups (default {GROUPS})")
    parser.add_argument("--shared", action="store_true", help="measure only rows that share a prompt")
    parser.add_argument("--one", choices=["shared", "apart"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(step(options.model, options.groups, shared=options.one == "shared", quick=options.quick)))
        return 0
    kinds = ("shared",) if options.shared else ("shared", "apart")
    words = {"shared": f"rows of a group share {PROMPT} tokens", "apart": "rows share nothing"}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if options.quick:
            from palaestra_tokens.testing.tiny_model import make_tiny

            model = str(Path(folder) / "tiny")
            make_tiny(Path(model))
        own, peer = Path(__file__).parents[1], options.peer
        cases = {
            f"{kind}, {name}": lambda kind=kind, tree=tree: measured(tree, model, kind, options)
            for kind in kinds
            for name, tree in (("peer", peer), ("this", own))
            if tree is not None
        }
        found = interleaved(cases, options.rounds or 1)
    rows: list[Row] = []
    for kind in kinds:
        mine, theirs = found[f"{kind}, this"], found.get(f"{kind}, peer")
        memory = Row(f"{words[kind]}: memory beside the model", mine["peak_kb"] / 2**20, "GiB")
        seconds = Row(f"{words[kind]}: a step", mine["cpu_s"], "CPU s")
        if theirs is not None:
            ratio = mine["cpu_s"] / theirs["cpu_s"]
            seconds = Row(seconds.name, seconds.value, seconds.unit, ratio)
            if kind == "shared" and not options.quick:
                seconds = judged(seconds, MOST_RATIO, ratio <= MOST_RATIO)
            rows.append(Row(f"{words[kind]}: memory of the peer", theirs["peak_kb"] / 2**20, "GiB"))
        rows += [memory if options.quick else with_ceiling(memory, MOST_GIB), seconds]
    return report("A training step", rows, options.json)


def measured(tree: Path, model: str, kind: str, options: argparse.Namespace) -> Sample:
    """Measure a step in a new process that imports the packages of a checkout."""
    folders = [*tree.glob("packages/*/src"), *tree.glob("extensions/*/src")]
    words = [sys.executable, __file__, "--model", model, "--one", kind, "--groups", str(options.groups)]
    words += ["--quick"] if options.quick else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    sample: Sample = json.loads(done.stdout.splitlines()[-1])
    return sample


def step(model: str, groups: int, *, shared: bool, quick: bool) -> Sample:
    """Take one step in this process, and return its CPU time and memory."""
    import torch

    from palaestra_train.tinker.model import Adam, BaseModel, LoraSettings, TrainedModel
    from palaestra_train.tinker.model import Row as ModelRow

    torch.set_num_threads(1)
    base = BaseModel(model, device="cpu")
    trained = TrainedModel(base, LoraSettings(32, 0))
    rng, meter = random.Random(0), Meter()
    scale = 10 if quick else 1
    prompt, reply = PROMPT // scale, REPLY // scale

    def some(count: int) -> list[int]:
        return [rng.randrange(min(VOCABULARY, base.vocabulary)) for _ in range(count)]

    rows = []
    for _ in range(groups):
        start = some(prompt)
        for number in range(SIZE):
            ids = (start if shared else some(prompt)) + some(reply)
            zeros = [0.0] * (prompt - 1)
            inputs = {
                "target_tokens": torch.tensor(ids[1:]),
                "logprobs": torch.tensor([*zeros, *[-2.0] * reply]),
                "advantages": torch.tensor([*zeros, *[1.0 if number % 2 else -1.0] * reply]),
            }
            rows.append(ModelRow(ids[:-1], inputs))
    asked = [ModelRow(row.ids, {"target_tokens": row.inputs["target_tokens"]}) for row in rows]
    meter.start()
    trained.batch(asked, "cross_entropy", {}, backward=False)
    trained.batch(rows, "importance_sampling", {}, backward=True)
    trained.step(Adam())
    return meter.sample()


if __name__ == "__main__":
    sys.exit(main())
