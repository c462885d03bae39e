"""Functions that all benchmarks share: interleaved medians, fresh processes, peak memory, one table and one JSON
format.

A number only means something next to its peer's number from the same run. The cases alternate within a round, so that a
noisy neighbour affects all of them equally, and the median over the rounds is reported. Each sample runs in a separate
process, so that the heap of one case does not hide that of another.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

TICK_S = 0.01

_ROOT = Path(__file__).parents[1]
SOURCES = (_ROOT / "packages/palaestra/src/palaestra", *_ROOT.glob("packages/*/src"), *_ROOT.glob("extensions/*/src"))
"""The folders of our code, to which the paths of files in tables are relative."""

Sample = Mapping[str, float]
"""The numbers that one run of one case measured, by name."""


@dataclass(frozen=True)
class Row:
    """One reported number. `ratio` is to the peer in the same run; `ok` says whether the target, if any, is met."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    target: float | None = None
    ok: bool | None = None


@functools.cache
def own_file(path: str) -> str:
    """Return the relative path of a file of our code; empty for other files."""
    return next((str(Path(path).relative_to(folder)) for folder in SOURCES if Path(path).is_relative_to(folder)), "")


def sources(file: str) -> list[Path]:
    """Return the file that `own_file` named."""
    return [path for folder in SOURCES if (path := folder / file).is_file()]


def with_ceiling(row: Row, target: float) -> Row:
    """Return the row with a target that its value must not exceed."""
    return replace(row, target=target, ok=row.value <= target)


def with_floor(row: Row, target: float) -> Row:
    """Return the row with a target that its value must reach."""
    return replace(row, target=target, ok=row.value >= target)


def judged(row: Row, target: float, ok: bool) -> Row:
    """Return the row with a target for its ratio instead of its value; `ok` reports whether the target is met."""
    return replace(row, target=target, ok=ok)


def options_parser(description: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with `--quick`, `--json FILE` and `--rounds N`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round: only checks that the benchmark runs")
    parser.add_argument("--rounds", type=int, default=None, help=f"how often every case is measured (default {rounds})")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the rows to FILE")
    return parser


def parse_options(description: str | None, rounds: int = 5) -> argparse.Namespace:
    """Parse the options of a benchmark that has only the shared ones."""
    options = options_parser(description, rounds).parse_args()
    options.rounds = options.rounds or (1 if options.quick else rounds)
    return options


def interleaved(cases: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, dict[str, float]]:
    """Measure the cases in turns, and return the medians of each case's numbers."""
    samples: dict[str, list[Sample]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, measure in cases.items():
            progress(f"round {number + 1} of {rounds}: {name}")
            samples[name].append(measure())
    progress("")
    return {
        name: {key: statistics.median(sample[key] for sample in found) for key in found[0]}
        for name, found in samples.items()
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@asynccontextmanager
async def lag() -> AsyncIterator[list[float]]:
    """Yield a list that collects, every 10 ms while the block runs, how many seconds late a timer of this event loop
    fires."""
    late: list[float] = []

    async def tick() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(loop.time() - due)

    ticking = asyncio.create_task(tick())
    try:
        yield late
    finally:
        ticking.cancel()


def progress(text: str) -> None:
    """Print a line that the next call overwrites; print nothing if stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r{text:<70}\r", end="", file=sys.stderr, flush=True)


def fresh_process(script: str, *arguments: str) -> Sample:
    """Run a script with this interpreter, and return the sample that it prints as JSON in its last line."""
    done = subprocess.run([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    sample: Sample = json.loads(done.stdout.splitlines()[-1])
    return sample


@contextmanager
def serving(script: str, *arguments: str) -> Iterator[str]:
    """Run a server in a separate process while the block runs, and yield its first line of output, the address.

    The server ends when its standard input is closed, so it cannot outlive this process.
    """
    command = [sys.executable, script, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()


class Meter:
    """Measures CPU seconds, wall seconds and the growth of resident memory of this process between `start` and
    `sample`."""

    def start(self) -> None:
        """Begin: collect garbage, and reset the peak to the memory that is resident now."""
        gc.collect()
        forget_peak()
        self._rss_kb = resident_kb()
        self._cpu_s, self._wall_s = time.process_time(), time.perf_counter()

    def sample(self) -> dict[str, float]:
        """Return `cpu_s`, `wall_s` and `peak_kb`, the highest rise of resident memory since `start`."""
        cpu_s, wall_s = time.process_time() - self._cpu_s, time.perf_counter() - self._wall_s
        return {"cpu_s": cpu_s, "wall_s": wall_s, "peak_kb": float(max(0, peak_kb() - self._rss_kb))}


def resident_kb() -> int:
    """Return the resident memory of this process."""
    return _status_kb("VmRSS")


def peak_kb() -> int:
    """Return the peak of resident memory since the process started or since the last `forget_peak`."""
    return _status_kb("VmHWM")


def forget_peak() -> None:
    """Reset the peak to the memory that is resident now. Source: proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")


def _status_kb(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1))


def report(title: str, rows: Sequence[Row], json_file: Path | None, **series: object) -> int:
    """Print the table and write the JSON, also with the series; returns 1 if a target was missed, else 0."""
    print(f"{title}\n{machine()}\n")
    print("| what | value | unit | relative to the peer | target | |")
    print("|---|---:|---|---:|---:|---|")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}×"
        target = "" if row.target is None else f"{row.target:g}"
        verdict = "" if row.ok is None else "ok" if row.ok else "MISSED"
        print(f"| {row.name} | {_number(row.value)} | {row.unit} | {ratio} | {target} | {verdict} |")
    if json_file is not None:
        write_json(title, rows, json_file, **series)
    return 1 if any(row.ok is False for row in rows) else 0


def write_json(title: str, rows: Sequence[Row], json_file: Path, **series: object) -> None:
    """Write the rows and the series with the command, the date and the machine."""
    command = shlex.join(["python", *sys.argv])
    found = {"title": title, "command": command, "date": date.today().isoformat(), "machine": machine(), **series}
    json_file.write_text(json.dumps({**found, "rows": [asdict(row) for row in rows]}) + "\n")


def machine() -> str:
    """Describe the machine and its load."""
    load = os.getloadavg()[0]
    python = platform.python_version()
    return f"Python {python}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {load:.1f}"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
