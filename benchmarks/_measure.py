"""What the benchmarks share: interleaved medians, fresh processes, peak memory, one table, one JSON form.

A number is only worth something beside its peer from the same run: cases take turns within a round, so that a noisy
neighbour hits all of them alike, and the median over the rounds is reported. Each sample runs in a process of its own,
so that one case's heap does not hide another's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

TICK_S = 0.01

Sample = Mapping[str, float]
"""What one run of one case measured, by name."""


@dataclass(frozen=True)
class Row:
    """One reported number. `ratio` is to the peer in the same run; `ok` says whether the target, if any, is met."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    target: float | None = None
    ok: bool | None = None


def with_ceiling(row: Row, target: float) -> Row:
    """The row, judged: its value must not be above the target."""
    return replace(row, target=target, ok=row.value <= target)


def with_floor(row: Row, target: float) -> Row:
    """The row, judged: its value must not be below the target."""
    return replace(row, target=target, ok=row.value >= target)


def judged(row: Row, target: float, ok: bool) -> Row:
    """The row with a target that is not for its value, but for its ratio."""
    return replace(row, target=target, ok=ok)


def options_parser(description: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """`--quick` for a short look, `--json FILE` for the rows, `--rounds N` for how often every case is measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs, proves no number")
    parser.add_argument("--rounds", type=int, default=None, help=f"how often every case is measured (default {rounds})")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows to FILE as well")
    return parser


def parse_options(description: str | None, rounds: int = 5) -> argparse.Namespace:
    """The options of a benchmark that has no others."""
    options = options_parser(description, rounds).parse_args()
    options.rounds = options.rounds or (1 if options.quick else rounds)
    return options


def interleaved(cases: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, dict[str, float]]:
    """The medians of every case's numbers, the cases taking turns."""
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
    """The value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@asynccontextmanager
async def lag() -> AsyncIterator[list[float]]:
    """How many seconds late a timer of this event loop fires, every 10 ms, for as long as the block runs."""
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
    """A line that the next one overwrites, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r{text:<70}\r", end="", file=sys.stderr, flush=True)


def fresh_process(script: str, *arguments: str) -> Sample:
    """Run a script with this interpreter; the last line it prints is its sample as JSON."""
    done = subprocess.run([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    sample: Sample = json.loads(done.stdout.splitlines()[-1])
    return sample


@contextmanager
def serving(script: str, *arguments: str) -> Iterator[str]:
    """A server in a process of its own, for as long as the block runs. Its first line says where it listens.

    It ends when its standard input does, so it cannot outlive this process, however that ends.
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
    """CPU seconds, wall seconds and growth of resident memory between `start` and `sample`, of this process."""

    def start(self) -> None:
        """Begin: garbage collected, the peak of memory set back to what is resident now."""
        gc.collect()
        forget_peak()
        self._rss_kb = resident_kb()
        self._cpu_s, self._wall_s = time.process_time(), time.perf_counter()

    def sample(self) -> dict[str, float]:
        """`cpu_s`, `wall_s` and `peak_kb`: how far resident memory rose above where it started."""
        cpu_s, wall_s = time.process_time() - self._cpu_s, time.perf_counter() - self._wall_s
        return {"cpu_s": cpu_s, "wall_s": wall_s, "peak_kb": float(max(0, peak_kb() - self._rss_kb))}


def resident_kb() -> int:
    """Resident memory of this process."""
    return _status_kb("VmRSS")


def peak_kb() -> int:
    """Its peak, since the start or since it was last forgotten."""
    return _status_kb("VmHWM")


def forget_peak() -> None:
    """Let the peak begin anew at what is resident now. Source: proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")


def _status_kb(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1))


def report(title: str, rows: Sequence[Row], json_file: Path | None) -> int:
    """Print the table, write the JSON; 1 when a target was missed, else 0."""
    print(f"{title}\n{machine()}\n")
    print("| what | value | unit | relative to the peer | target | |")
    print("|---|---:|---|---:|---:|---|")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}×"
        target = "" if row.target is None else f"{row.target:g}"
        verdict = "" if row.ok is None else "ok" if row.ok else "MISSED"
        print(f"| {row.name} | {_number(row.value)} | {row.unit} | {ratio} | {target} | {verdict} |")
    if json_file is not None:
        json_file.write_text(json.dumps({"title": title, "machine": machine(), "rows": [asdict(row) for row in rows]}))
    return 1 if any(row.ok is False for row in rows) else 0


def machine() -> str:
    """What it ran on, and how busy that was."""
    load = os.getloadavg()[0]
    python = platform.python_version()
    return f"Python {python}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {load:.1f}"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
