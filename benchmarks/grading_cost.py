"""What the grading of passing work costs compared with the official verdict alone.

    make demo                                   # builds the tasks in data/demo/tasks.jsonl
    .venv/bin/python benchmarks/grading_cost.py # --tasks 2 plays the first two tasks, --json FILE also writes the rows

The oracle plays the tasks one after the other, in turns with `controls` off (the official verdict alone) and on. Prints
the CPU seconds of the grading, of this process and of all processes in slots, and the ratio of the two. The last row is
work that never ends: its grading may take one time limit, in wall seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import _measure as measure

import palaestra
from palaestra import Score
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.rollout import Rollout
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.swe_smith_oracle import SweEnvironment

TARGET = 2.0
"""The most that grading may cost, as a multiple of the official verdict alone."""
HANG_TARGET = 1.5
"""The most that the grading of work that hangs may cost, as a multiple of the time limit."""
LIMIT_S, QUICK_LIMIT_S = 30.0, 10.0

_SPENT: dict[str, tuple[float, float]] = {}
"""The CPU seconds and wall seconds of the last grading, by task."""


class Measured(SweEnvironment):
    """Notes what each grading costs."""

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        cpu_s, wall_s = used_cpu_s(), time.monotonic()
        try:
            return await super().score(rollout, grading)
        finally:
            _SPENT[rollout.task.id] = used_cpu_s() - cpu_s, time.monotonic() - wall_s


def used_cpu_s() -> float:
    """Return the CPU seconds of this process, its living descendants, and the children that these have waited for."""
    ticks = os.sysconf("SC_CLK_TCK")
    return sum(_ticks(process) for process in _tree()) / ticks


def _tree() -> Iterator[int]:
    parents: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        fields = _fields(int(entry))
        if fields:
            parents.setdefault(int(fields[1]), []).append(int(entry))
    waiting = [os.getpid()]
    while waiting:
        process = waiting.pop()
        yield process
        waiting += parents.get(process, [])


def _ticks(process: int) -> int:
    fields = _fields(process)
    return sum(map(int, fields[11:15])) if fields else 0  # utime, stime, cutime, cstime; source: proc(5)


def _fields(process: int) -> list[str]:
    """Return the fields of a process's `stat` after its name; none if the process is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def spent(
    dataset: Path, *, policy: str, tasks: int, controls: bool, limit_s: float = 600.0
) -> Mapping[str, tuple[float, float]]:
    """Play a policy, and return the CPU seconds and wall seconds of each task's grading."""
    _SPENT.clear()
    palaestra.run_sync(
        Measured, policy=policy, tasks=tasks, group_size=1, concurrency=1, dataset_name=str(dataset), shuffle=False,
        controls=controls, test_timeout_s=limit_s,
    )  # fmt: skip
    return dict(_SPENT)


def main() -> int:
    """Measure both cases in turns and print the table."""
    parser = measure.options_parser(__doc__, rounds=1)
    parser.add_argument("--dataset", type=Path, default=Path("data/demo/tasks.jsonl"))
    parser.add_argument("--tasks", type=int, default=None, help="the number of tasks (default 12, or 2 with --quick)")
    options = parser.parse_args()
    tasks = options.tasks or (2 if options.quick else 12)

    def case(*, controls: bool) -> measure.Sample:
        found = spent(options.dataset, policy="oracle", tasks=tasks, controls=controls)
        return {task: cpu_s for task, (cpu_s, _) in found.items()}

    cases = {"official": lambda: case(controls=False), "graded": lambda: case(controls=True)}
    found = measure.interleaved(cases, options.rounds or 1)
    rows: list[measure.Row] = []
    ratios: list[float] = []
    for task, alone in found["official"].items():
        graded, name = found["graded"][task], task.partition("__")[2]
        ratios.append(graded / alone)
        rows.append(measure.Row(f"{name}: official verdict alone, CPU", alone, "s"))
        rows.append(measure.Row(f"{name}: graded, CPU", graded, "s", ratios[-1]))
    median = statistics.median(ratios)
    rows.append(measure.judged(measure.Row("median of the tasks", median, "×", median), TARGET, median <= TARGET))
    limit_s = QUICK_LIMIT_S if options.quick else LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        patch = Path(folder, "hanging.patch")
        patch.write_text(hanging_patch(options.dataset))
        hanging = spent(options.dataset, policy=f"patch:{patch}", tasks=1, controls=True, limit_s=limit_s)
    for _, wall_s in hanging.values():
        share = wall_s / limit_s
        row = measure.Row(f"work that hangs, time limit {limit_s:g} s", wall_s, "s", share)
        rows.append(measure.judged(row, HANG_TARGET, share <= HANG_TARGET))
    return measure.report("Grading of passing work", rows, options.json)


def hanging_patch(dataset: Path) -> str:
    """Return a patch that makes the module with the first task's bug sleep when it is imported."""
    row = json.loads(dataset.read_text().partition("\n")[0])
    (file,) = unified_diff.parse(row["patch"])
    git = ["git", f"--git-dir={dataset.parent / row['repo_path']}", "show", f"{row['base_commit']}:{file.path}"]
    released = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, file.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(released)
        subprocess.run(["git", "apply", "-"], cwd=folder, input=row["patch"], text=True, check=True)
        buggy = place.read_text()
    return unified_diff.between(file.path, buggy, f"import time\n\ntime.sleep(100_000)\n{buggy}")


if __name__ == "__main__":
    sys.exit(main())
