"""The cost of an audit of 100 terminal tasks with fast tests: python benchmarks/audit_cost.py [--quick]

Writes a folder of Harbor tasks whose tests take milliseconds, and audits it twice with `palaestra audit`. `first` is
the whole audit, `again` the second run over unchanged tasks. `trials` is the share of the time of the tasks' audits
that was spent in trials: the rest is the audit's own work. `--skip` leaves out kinds, for a shorter run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import _measure as measure
from planted.harbor_set import CONFIG, SHELL

TASKS, QUICK_TASKS = 100, 3
FIRST_S, AGAIN_S, SHARE = 1800.0, 20.0, 0.8


def tasks(count: int) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield name, prompt, input, solution and condition of each task."""
    for number in range(count):
        words = [f"w{(number * 7 + each * each) % 23}" for each in range(12)]
        numbers = [(number * 31 + each * 17) % 97 for each in range(10)]
        match number % 4:
            case 0:
                what, text = "the sum of the numbers", "\n".join(map(str, numbers))
                solution, right = "awk '{ s += $1 } END { print s }'", str(sum(numbers))
            case 1:
                what, text = "the number of different words", "\n".join(words)
                solution, right = "sort -u | wc -l", str(len(set(words)))
            case 2:
                what, text = "the largest number", "\n".join(map(str, numbers))
                solution, right = "sort -n | tail -1", str(max(numbers))
            case _:
                what, text = "the words in reverse order, with one blank between two words,", "\n".join(words)
                solution, right = "tac | paste -sd ' '", " ".join(reversed(words))
        name = f"task-{number:03}"
        prompt = f"Write {what} of /app/in-{number}.txt to /app/out-{number}.txt."
        condition = f'[ "$(cat /app/out-{number}.txt)" = "{right}" ]'
        yield name, prompt, f"{text}\n", f"{solution} < in-{number}.txt > out-{number}.txt", condition


def write(folder: Path, count: int) -> None:
    """Write the tasks as folders of Harbor."""
    for number, (name, prompt, text, solution, condition) in enumerate(tasks(count)):
        for path, content in {
            "task.toml": CONFIG.format(memory_mb=512),
            "instruction.md": f"{prompt}\n",
            f"environment/in-{number}.txt": text,
            "environment/Dockerfile": f"FROM debian:bookworm-slim\nWORKDIR /app\nCOPY in-{number}.txt /app/\n",
            "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
            "tests/test.sh": SHELL.format(condition),
        }.items():
            place = folder / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)


def audit(folder: Path, out: Path, skipped: list[str]) -> float:
    """Audit the folder, and return the seconds."""
    words = [word for kind in skipped for word in ("--skip", kind)]
    line = [str(Path(sys.executable).with_name("palaestra")), "audit", "run", str(folder), "--out", str(out)]
    began = time.monotonic()
    done = subprocess.run([*line, *words, "--env.base_image", "host"], capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr[-2000:])
    return seconds


def main() -> int:
    """Audit the tasks twice and print the table."""
    parser = measure.options_parser(__doc__)
    parser.add_argument("--skip", action="append", default=[], metavar="KIND", help="a kind that is left out")
    options = parser.parse_args()
    count = QUICK_TASKS if options.quick else TASKS
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name, "tasks"), Path(name, "out")
        write(folder, count)
        first, again = audit(folder, out, options.skip), audit(folder, out, options.skip)
        found = json.loads((out / "audit.json").read_text())["tasks"]
    trials, seconds = sum(each["trials"] for each in found), sum(each["seconds"] for each in found)
    faulty = sum(any(not finding.get("note") for finding in each.get("findings", ())) for each in found)
    share = sum(each["trial_s"] for each in found) / seconds
    rows = [
        measure.with_ceiling(measure.Row("first", first, "s"), FIRST_S * count / TASKS),
        measure.with_ceiling(measure.Row("again", again, "s"), AGAIN_S),
        measure.with_floor(measure.Row("trials, of the time of the tasks", share, ""), SHARE),
        measure.Row("trials", trials, ""),
        measure.Row("one trial", 1000 * seconds / max(trials, 1), "ms"),
        measure.Row("tasks with findings", faulty, ""),
    ]
    return measure.report(f"An audit of {count} terminal tasks", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
