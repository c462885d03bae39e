"""How fast `palaestra batch` answers prompts: python benchmarks/batch.py [--peer PYTHON] [--quick] [--json FILE]

The model server answers immediately, in a separate process. In one case each prompt gets one reply without tools; in
the other, the model runs one command in the prompt's own slot. The rate is that of the whole command, including its
files and its report. Each case is one batch of 10,000 prompts, which takes minutes and needs no median; `--rounds`
repeats it. `growth` is the rise of resident memory per 1,000 prompts, from the first 1,000 prompts to the last. `at the
end` is the further rise of memory while the report and the files of the batch are written.

`--peer PYTHON` also runs the batch runner of hermes-agent 0.19, with an interpreter that has this package. The same
server streams to it. It gets fewer prompts, and its commands run on this machine without a sandbox.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path

import _measure as measure
from _instant_server import chat_reply, serve

from palaestra.envs.run.command import command_line
from palaestra.envs.run.run import Steering, run
from palaestra.rollouts.events import GroupFinished, Handlers
from palaestra_chat.batch.prompts import batch

PROMPTS = {"plain": 10_000, "command": 10_000}
QUICK = {"plain": 1000, "command": 400}
TARGETS = {"plain": 100.0, "command": 40.0}
TOOLSETS = {"plain": [], "command": ["terminal"]}
AT_ONCE = 256
FIRST = 1000
REPLIES = {
    "plain": [chat_reply("Hello.", reasoning="Greet.")],
    "command": [
        chat_reply(None, [("terminal", {"command": "echo hello"})], reasoning="Ask the shell."),
        chat_reply("It says hello.", turn=1),
    ],
}
"""There is some reasoning, because the peer drops samples without it."""
PEER = "hermes-agent"
PEER_PROMPTS = 400
PEER_WORKERS = 4
"""The peer's default."""
PEER_TOOLSETS = {"plain": "minimal", "command": "terminal_only"}
"""The peer's distribution with the fewest tools, and the one with its terminal and file tools."""


class Memory:
    """Records resident memory after the first prompts and after the latest. Subscribes to the events of a run."""

    def __init__(self) -> None:
        self.ended = 0
        self.at_first = self.latest = 0

    def handlers(self) -> Handlers:
        return {GroupFinished: self._on_group}

    def _on_group(self, event: GroupFinished) -> None:
        self.ended += 1
        if self.ended % FIRST == 0:
            self.latest = measure.resident_kb()
            self.at_first = self.at_first or self.latest


async def sample(case: str, url: str, prompts: int) -> dict[str, float]:
    """Run one batch."""
    with tempfile.TemporaryDirectory() as folder:
        rows = write_prompts(Path(folder), prompts)
        settings = {"dataset_name": str(rows), "enabled_toolsets": TOOLSETS[case], "concurrency": AT_ONCE}
        settings |= {"base_url": url, "model": "m", "allow_network": False}
        parsed = command_line(batch, "batch", "process").take("process", settings)
        place = Path(folder, "run")
        started = time.perf_counter()
        memory = Memory()
        report = await run(batch, parsed, folder=place, stream=StringIO(), steering=Steering([memory]))
        seconds = time.perf_counter() - started
        peak = measure.peak_kb()  # before this script reads the file itself
        assert report.totals.scored == prompts, report.totals.errors
        with (place / "trajectories.jsonl").open("rb") as lines:
            assert sum(1 for _ in lines) == prompts
    grown = (memory.latest - memory.at_first) / max(1, (prompts - FIRST) / 1000)
    return {"per_s": prompts / seconds, "growth_kib": grown, "end_kib": peak - memory.latest}


def write_prompts(place: Path, prompts: int) -> Path:
    """Write one row per prompt; returns the file."""
    rows = place / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say hello, number {number}."}) + "\n" for number in range(prompts)))
    return rows


def peer_sample(python: str, case: str, url: str, prompts: int) -> dict[str, float]:
    """Run one batch of hermes-agent."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "dataset_file": write_prompts(Path(folder), prompts),
            "batch_size": max(1, prompts // (4 * PEER_WORKERS)),
            "num_workers": PEER_WORKERS,
            "run_name": "run",
            "distribution": PEER_TOOLSETS[case],
            "base_url": f"{url}/v1",
            "api_key": "none",
            "model": "m",
        }
        command = [python, "-m", "batch_runner", *(f"--{name}={value}" for name, value in options.items())]
        env = os.environ | {"HERMES_HOME": folder, "TERMINAL_ENV": "local", "HERMES_YOLO_MODE": "1"}
        started = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seconds = time.perf_counter() - started
        kept = Path(folder, "data", "run", "trajectories.jsonl")
        answered = len(kept.read_text().splitlines()) if kept.exists() else 0
        assert answered == prompts, f"{PEER} answered {answered} of {prompts}:\n{done.stdout[-2000:]}"
    return {"per_s": prompts / seconds}


def main() -> int:
    """Measure both cases and print the table."""
    parser = measure.options_parser(__doc__)
    parser.add_argument("--peer", metavar="PYTHON", help=f"an interpreter that has {PEER}")
    given = parser.parse_args()
    table: list[measure.Row] = []
    for case, prompts in (QUICK if given.quick else PROMPTS).items():
        with measure.serving(__file__, "--serve", case) as url:
            cases: dict[str, Callable[[], measure.Sample]] = {
                case: partial(measure.fresh_process, __file__, "--sample", case, url, str(prompts))
            }
            if given.peer:
                cases[PEER] = partial(peer_sample, given.peer, case, url, PEER_PROMPTS)
            results = measure.interleaved(cases, given.rounds or 1)
        found = results[case]
        per_s, peer = found["per_s"], results.get(PEER, {}).get("per_s")
        row = measure.Row(f"{prompts} prompts, {case}", per_s, "prompts/s", ratio=peer and per_s / peer)
        table.append(measure.with_floor(row, TARGETS[case]))
        if peer:
            table.append(measure.Row(f"{PEER_PROMPTS} prompts, {case}, {PEER}", peer, "prompts/s"))
        if prompts > FIRST:
            table.append(measure.Row(f"memory growth, {case}", found["growth_kib"], "KiB per 1,000"))
            table.append(measure.Row(f"memory at the end, {case}", found["end_kib"], "KiB"))
    return measure.report(f"palaestra batch, {AT_ONCE} prompts at a time", table, given.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(serve(REPLIES[sys.argv[2]]))
    elif sys.argv[1:2] == ["--sample"]:
        print(json.dumps(asyncio.run(sample(sys.argv[2], sys.argv[3], int(sys.argv[4])))))
    else:
        sys.exit(main())
