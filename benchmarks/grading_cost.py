"""What the grading of passing work costs compared with the official verdict alone.

    make demo                                   # builds the tasks in data/demo/tasks.jsonl
    .venv/bin/python benchmarks/grading_cost.py # --tasks 2 plays the first two tasks, --json FILE also writes the rows

The oracle plays the tasks one rollout after the other, in turns with `controls` off (the official verdict alone) and
on. Prints the seconds of the stage `grade`, the median over each task's rollouts, and the ratio of the two. A row's
hang is work that never ends, whose grading may take one time limit.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import _measure as measure

import palaestra
from palaestra import SweSmithOracleEnv

TARGET = 2.0
"""The most that grading may cost, as a multiple of the official verdict alone."""
HANG_TARGET = 1.5
"""The most that the grading of work that hangs may cost, as a multiple of the time limit."""
LIMIT_S = 20.0


def seconds(
    dataset: Path, *, policy: str, tasks: int, group: int, controls: bool, limit_s: float = 600.0
) -> Mapping[str, float]:
    """Play a policy, and return the median seconds of grading by task."""
    run = palaestra.run_sync(
        SweSmithOracleEnv, policy=policy, tasks=tasks, group_size=group, concurrency=1, dataset_name=str(dataset),
        shuffle=False, controls=controls, test_timeout_s=limit_s,
    )  # fmt: skip
    return {
        each.task_id: statistics.median(trajectory.beside.stages["grade"] for trajectory in each.trajectories)
        for each in run.groups
    }


def main() -> int:
    """Measure both cases in turns and print the table."""
    parser = measure.options_parser(__doc__, rounds=1)
    parser.add_argument("--dataset", type=Path, default=Path("data/demo/tasks.jsonl"))
    parser.add_argument("--tasks", type=int, default=None, help="the number of tasks (default 12, or 2 with --quick)")
    parser.add_argument("--group", type=int, default=1, help="the rollouts of each task (default 1)")
    options = parser.parse_args()
    tasks = options.tasks or (2 if options.quick else 12)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def case(controls: bool) -> measure.Sample:
            return seconds(options.dataset, policy="oracle", tasks=tasks, group=options.group, controls=controls)

        cases = {"official": lambda: case(controls=False), "graded": lambda: case(controls=True)}
        found = measure.interleaved(cases, options.rounds or 1)
        hanging = folder / "hanging.patch"
        hanging.write_text(HANGS)
        hang = seconds(options.dataset, policy=f"patch:{hanging}", tasks=1, group=1, controls=True, limit_s=LIMIT_S)
    rows = []
    ratios = []
    for task, alone in found["official"].items():
        graded = found["graded"][task]
        ratios.append(graded / alone)
        rows.append(measure.Row(f"{task.partition('__')[2]}: official verdict alone", alone, "s"))
        rows.append(measure.Row(f"{task.partition('__')[2]}: graded", graded, "s", graded / alone))
    median = statistics.median(ratios)
    rows.append(measure.judged(measure.Row("median of the tasks", median, "×", median), TARGET, median <= TARGET))
    for waited in hang.values():
        share = waited / LIMIT_S
        rows.append(
            measure.judged(measure.Row("work that hangs", waited, "s", share), HANG_TARGET, share <= HANG_TARGET)
        )
    return measure.report(f"Grading of passing work, {options.group} rollouts a task", rows, options.json)


HANGS = """\
--- /dev/null
+++ b/conftest_of_work.py
@@ -0,0 +1 @@
+nothing = 0
"""

if __name__ == "__main__":
    sys.exit(main())
