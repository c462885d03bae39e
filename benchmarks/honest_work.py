"""Whether correct work is ever mistaken for tampering: plays variants of the solutions of tasks and environments.

    make demo                                        # builds the tasks in data/demo/tasks.jsonl
    .venv/bin/python benchmarks/honest_work.py       # --part 0.1 plays a tenth of the variants
    .venv/bin/python benchmarks/honest_work.py --results honest.jsonl   # resumes where an earlier run ended

Each variant is a rewritten reference solution (renamed variables, extracted functions, rewritten comparisons, reordered
code, types, added files; see `honest_work.py` in the tests of the suites). Prints the variants that one of the
two verdicts does not pay in full, or that carry a label.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import _measure as measure

sys.path.insert(0, str(Path(__file__).parents[1] / "extensions/suites/tests"))
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
"""Environment, settings, tasks, and variants of each task: 200 variants in all."""


QUICK_PART, MOST_LABELLED = 0.1, 0.01


def main() -> int:
    arguments = measure.options_parser(__doc__, rounds=1)
    arguments.add_argument("--part", type=float, help="the share of the variants to play (default 1)")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--workers", type=int, default=3, help="the number of concurrent rollouts (default 3)")
    arguments.add_argument("--results", type=Path, help="append results to this file; skip variants that it contains")
    wanted = arguments.parse_args()
    part = wanted.part or (QUICK_PART if wanted.quick else 1.0)
    seen = read_results(wanted.results, wanted.seed)
    print(f"{len(seen)} variants were played before", flush=True)

    def report(played: PlayedVariant) -> None:
        seen.append(played)
        if wanted.results:
            with wanted.results.open("a") as file:
                file.write(json.dumps({"seed": wanted.seed, **asdict(played)}) + "\n")
        if (played.official, played.reward) != (1.0, 1.0) or played.tampering:
            shown = f"official {played.official}, reward {played.reward}: {played.tampering} {played.error}"
            print(f"{played.task_id} {played.number}: {shown}", flush=True)
        if len(seen) % 10 == 0:
            print(f"{len(seen)} played", flush=True)

    for name, settings, tasks, variants in PLANNED:
        count, skipped = math.ceil(variants * part), {(each.task_id, each.number) for each in seen}
        asyncio.run(
            play_variants(
                name, settings, tasks=tasks, variants=count, seed=wanted.seed, workers=wanted.workers,
                skipped=skipped, report=report,
            )
        )  # fmt: skip
    labels = Counter(name for each in seen for name in re.findall(r"(?:^|; )([a-z_]+): ", each.tampering))
    print(f"labels: {dict(labels.most_common())}")
    paid = {
        "the official verdict": sum(each.official == 1.0 for each in seen),
        "the guarded reward": sum(each.reward == 1.0 for each in seen),
    }
    rows = [measure.with_floor(measure.Row(f"variants that {name} pays", n, "", n / len(seen)), len(seen))
            for name, n in paid.items()]  # fmt: skip
    labelled = sum(bool(each.tampering) for each in seen)
    row = measure.Row("variants with a label", labelled, "", labelled / len(seen))
    rows.append(measure.judged(row, MOST_LABELLED, labelled <= MOST_LABELLED * len(seen)))
    return measure.report("Ordinary solutions", rows, wanted.json)


def read_results(path: Path | None, seed: int) -> list[PlayedVariant]:
    """Return the variants of this seed that an earlier run wrote to the file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []
    return [PlayedVariant(**row) for row in rows if row.pop("seed") == seed]


if __name__ == "__main__":
    raise SystemExit(main())
