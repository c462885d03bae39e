"""Whether correct work is ever taken for tampering: variants of solutions over the demo's tasks and the environments.

    make demo                                        # builds the tasks in data/demo/tasks.jsonl
    .venv/bin/python benchmarks/honest_work.py       # --part 0.1 plays a tenth of the variants

Each variant is another spelling of a reference solution (renamed variables, extracted functions, other comparisons,
other order, types, added files; see `tests/suites/honest_work.py`). Prints those that do not earn the whole reward.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from suites.honest_work import PlayedVariant, play_variants

DEMO = ["--env.dataset_name", "data/demo/tasks.jsonl", "--env.shuffle", "false"]
PLANNED = [
    ("hermes_swe", [], 5, 5),
    ("count_lines", [], 2, 2),
    ("terminal_test", [], 3, 1),
    ("endless_terminals", [], 4, 2),
    ("terminalbench_2", [], 2, 2),
    ("swe_smith_oracle", DEMO, 12, 13),
]
"""Environment, settings, tasks, and variants of each: 200 in all."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--part", type=float, default=1.0, help="the part of the variants to play (default 1)")
    arguments.add_argument("--seed", type=int, default=0)
    wanted = arguments.parse_args()
    started = time.monotonic()
    seen: list[PlayedVariant] = []

    def report(played: PlayedVariant) -> None:
        seen.append(played)
        if played.reward != 1.0:
            print(f"{played.task_id} {played.number}: {played.reward} {played.tampering} {played.error}", flush=True)
        if len(seen) % 10 == 0:
            print(f"{len(seen)} played, {sum(each.reward == 1.0 for each in seen)} with reward 1", flush=True)

    for name, settings, tasks, variants in PLANNED:
        count = math.ceil(variants * wanted.part)
        asyncio.run(play_variants(name, settings, tasks=tasks, variants=count, seed=wanted.seed, report=report))
    right, alarms = sum(each.reward == 1.0 for each in seen), sum(bool(each.tampering) for each in seen)
    print(f"{len(seen)} variants: {right} with reward 1, {alarms} false alarms, {time.monotonic() - started:.0f} s")
    return 0 if right == len(seen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
