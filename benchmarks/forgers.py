"""Whether forgers that know the source of all tests earn a reward without fixing the bug.

    make demo                                   # builds the tasks in data/demo/tasks.jsonl
    .venv/bin/python benchmarks/forgers.py      # --only interprets plays one forger, --tasks 2 the first two tasks

Each forger (`swe/forgers.py` in the tests of the suites) adds code to the module with the bug. `answers` plays the
hard-coded examples of `hard_coded.py` there. Prints the official verdict, the reward and the reason, by forger and
task, and counts the labels. The exit code is 0 if no forger earned a reward, except hard-coded examples, and if seven
of nine of these have a label. `--only fixes` plays the fixes instead.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "extensions/suites/tests"))
from suites.hard_coded import PROGRAMS, REPOSITORIES
from suites.honest_variety import play_works
from suites.swe.forgers import FORGERS, HARD_CODED, Forged, play_forgers

ANSWERS = "answers"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--dataset", type=Path, default=Path("data/demo/tasks.jsonl"))
    arguments.add_argument(
        "--only", nargs="*", choices=[*FORGERS, ANSWERS, "fixes"], default=[*FORGERS, ANSWERS], help="play only these"
    )
    arguments.add_argument("--tasks", type=int, default=12, help="the number of tasks (default 12)")
    arguments.add_argument("--workers", type=int, default=2, help="the number of concurrent rollouts (default 2)")
    arguments.add_argument("settings", nargs="*", help="settings of the environment, such as --env.keep_tests=*")
    wanted, settings = arguments.parse_known_args()

    def report(played: Forged) -> None:
        reason = played.labels or ("the tests failed" if played.reward == 0 else played.error)
        verdicts, uncontrolled = f"{played.official} {played.reward}", played.uncontrolled
        print(f"{played.forger:20} {played.task_id:55} {verdicts} ({uncontrolled=}) {reason[:300]}", flush=True)

    names = [name for name in wanted.only if name != ANSWERS]
    played = asyncio.run(
        play_forgers(wanted.dataset, names, settings, tasks=wanted.tasks, workers=wanted.workers, report=report)
    )
    if ANSWERS in wanted.only:
        played += hard_coded(wanted.dataset, wanted.workers, report)
    for name in wanted.only:
        own = [each for each in played if each.forger == name]
        kind = " (hard-coded examples)" if name in (*HARD_CODED, ANSWERS) else ""
        paid = [each for each in own if each.reward != 0.0]
        print(
            f"{name}{kind}: {len(paid)} of {len(own)} not refused, {sum(bool(each.labels) for each in paid)} labelled"
        )
    accepted = [each for each in played if each.official == 1.0]
    labels = Counter(name for each in accepted for name in re.findall(r"(?:^|; )([a-z_]+): ", each.labels))
    print(f"labels of the {len(accepted)} works that the official verdict accepts: {dict(labels.most_common())}")
    missed = [each for each in played if each.reward != 0.0 and each.forger != "fixes" and not each.labels]
    unlabelled = [each for each in missed if each.forger == ANSWERS]
    paid = [each for each in played if each.reward != 0.0 and each.forger not in (*HARD_CODED, ANSWERS)]
    return int(bool(paid) or len(unlabelled) > 2 or len(unlabelled) < len(missed))


def hard_coded(dataset: Path, workers: int, report: Callable[[Forged], None]) -> list[Forged]:
    """Play the hard-coded examples."""
    found = []
    for works, rows in ((REPOSITORIES, dataset), (PROGRAMS, None)):
        for each in asyncio.run(play_works(works, rows, workers=workers)):
            labels = "; ".join(each.unexpected)
            found.append(
                Forged(ANSWERS, f"{each.task_id}: {each.name}", each.official, each.reward, labels, 0, each.error)
            )
            report(found[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
