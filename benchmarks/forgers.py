"""Whether forgers that know the source of all tests earn a reward without fixing the bug.

    make demo                                   # builds the tasks in data/demo/tasks.jsonl
    .venv/bin/python benchmarks/forgers.py      # --only interprets plays one forger, --tasks 2 the first two tasks

Each forger (`tests/suites/swe/forgers.py`) adds code to the module with the bug. Prints the official verdict, the
reward and the reason, by forger and task. The exit code is 0 if no forger earned a reward, except those that contain
the answers. `--only fixes` plays the fixes instead.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from suites.swe.forgers import FORGERS, HARD_CODED, Forged, play_forgers


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--dataset", type=Path, default=Path("data/demo/tasks.jsonl"))
    arguments.add_argument(
        "--only", nargs="*", choices=[*FORGERS, "fixes"], default=list(FORGERS), help="play only these forgers"
    )
    arguments.add_argument("--tasks", type=int, default=12, help="the number of tasks (default 12)")
    arguments.add_argument("--workers", type=int, default=2, help="the number of concurrent rollouts (default 2)")
    arguments.add_argument("settings", nargs="*", help="settings of the environment, such as --env.keep_tests=*")
    wanted, settings = arguments.parse_known_args()

    def report(played: Forged) -> None:
        reason = played.labels or ("the tests failed" if played.reward == 0 else played.error)
        verdicts, uncontrolled = f"{played.official} {played.reward}", played.uncontrolled
        print(f"{played.forger:20} {played.task_id:55} {verdicts} ({uncontrolled=}) {reason[:300]}", flush=True)

    played = asyncio.run(
        play_forgers(wanted.dataset, wanted.only, settings, tasks=wanted.tasks, workers=wanted.workers, report=report)
    )
    for name in wanted.only:
        own = [each for each in played if each.forger == name]
        kind = " (hard-coded examples)" if name in HARD_CODED else ""
        print(f"{name}{kind}: {sum(each.reward != 0.0 for each in own)} of {len(own)} not refused")
    return int(any(each.reward != 0.0 for each in played if each.forger not in HARD_CODED))


if __name__ == "__main__":
    sys.exit(main())
