"""Whether unusual and correct work is accepted: plays works that were written without the references.

    make demo                                     # builds the tasks in data/demo/tasks.jsonl
    .venv/bin/python benchmarks/honest_variety.py # --quick plays one work of each task, --only NAME one environment

Prints the official verdict, the reward (of the guarded view) and the labels of each work
(`honest_variety.py` in the tests of the suites). The exit code is 0 if both accept every
work and no work carries an unexpected label.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "extensions/suites/tests"))
from suites.honest_variety import PROGRAMS, SWE, Played, Work, play_works


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dataset", type=Path, default=Path("data/demo/tasks.jsonl"))
    arguments.add_argument("--only", choices=["swe_smith_oracle", "hermes_swe"], help="play only this environment")
    arguments.add_argument("--quick", action="store_true", help="play one work of each task")
    arguments.add_argument("--workers", type=int, default=2, help="the number of concurrent rollouts (default 2)")
    wanted = arguments.parse_args()
    started = time.monotonic()

    def report(played: Played) -> None:
        labels = ", ".join(played.unexpected or played.labels)
        error = "" if played.paid else played.error[:300]
        print(f"{played.task_id:30} {played.name:40} {played.official} {played.reward} {labels} {error}", flush=True)

    found: list[Played] = []
    for name, works in (("swe_smith_oracle", SWE), ("hermes_swe", PROGRAMS)):
        if wanted.only in (None, name):
            chosen = one_each(works) if wanted.quick else works
            dataset = wanted.dataset if name == "swe_smith_oracle" else None
            found += asyncio.run(play_works(chosen, dataset, workers=wanted.workers, report=report))
    official = sum(each.official == 1.0 for each in found)
    guarded = sum(each.reward == 1.0 for each in found)
    labelled, unexpected = sum(bool(each.labels) for each in found), sum(bool(each.unexpected) for each in found)
    print(
        f"{len(found)} works: official accepts {official}, guarded accepts {guarded}, {labelled} with labels, "
        f"{unexpected} with unexpected labels, {time.monotonic() - started:.0f} s"
    )
    print(f"labels: {dict(Counter(name for each in found for name in {*each.labels}).most_common())}")
    return 0 if official == guarded == len(found) and not unexpected else 1


def one_each(works: tuple[Work, ...]) -> list[Work]:
    """Return the first work of each task."""
    return list({work.task: work for work in reversed(works)}.values())


if __name__ == "__main__":
    raise SystemExit(main())
