"""How fast `palaestra batch` answers prompts: python benchmarks/batch.py [--quick] [--json FILE]

The model server answers immediately, in a separate process. In one case each prompt gets one reply without tools; in
the other, the model runs one command in the prompt's own slot. The rate is that of the whole command, including its
files and its report. Each case is one batch of 10,000 prompts, which takes minutes and needs no median; `--rounds`
repeats it. `growth` is the rise of resident memory per 1,000 prompts, from the first 1,000 prompts to the last. `at the
end` is the further rise of memory while the report and the files of the batch are written.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

import _measure as measure
from _instant_server import chat_reply, serve

from palaestra.batch.prompts import batch
from palaestra.envs.run.command import command_line
from palaestra.envs.run.run import run
from palaestra.rollouts.events import GroupFinished, Handlers

PROMPTS = {"plain": 10_000, "command": 10_000}
QUICK = {"plain": 1000, "command": 400}
TARGETS = {"plain": 100.0, "command": 40.0}
TOOLSETS = {"plain": [], "command": ["terminal"]}
AT_ONCE = 256
FIRST = 1000
REPLIES = {
    "plain": [chat_reply("Hello.")],
    "command": [chat_reply(None, [("terminal", {"command": "echo hello"})]), chat_reply("It says hello.", turn=1)],
}


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
        rows = Path(folder, "prompts.jsonl")
        rows.write_text(
            "".join(json.dumps({"prompt": f"Say hello, number {number}."}) + "\n" for number in range(prompts))
        )
        settings = {"dataset_name": str(rows), "enabled_toolsets": TOOLSETS[case], "concurrency": AT_ONCE}
        settings |= {"base_url": url, "model": "m", "allow_network": False}
        parsed = command_line(batch, "batch", "process").take("process", settings)
        place = Path(folder, "run")
        started = time.perf_counter()
        memory = Memory()
        report = await run(batch, parsed, folder=place, stream=StringIO(), subscribers=[memory])
        seconds = time.perf_counter() - started
        peak = measure.peak_kb()  # before this script reads the file itself
        assert report.totals.scored == prompts, report.totals.errors
        with (place / "trajectories.jsonl").open("rb") as lines:
            assert sum(1 for _ in lines) == prompts
    grown = (memory.latest - memory.at_first) / max(1, (prompts - FIRST) / 1000)
    return {"per_s": prompts / seconds, "growth_kib": grown, "end_kib": peak - memory.latest}


def main() -> int:
    """Measure both cases and print the table."""
    given = measure.options_parser(__doc__).parse_args()
    table: list[measure.Row] = []
    for case, prompts in (QUICK if given.quick else PROMPTS).items():
        with measure.serving(__file__, "--serve", case) as url:
            cases = {
                case: lambda case=case, url=url, n=prompts: measure.fresh_process(
                    __file__, "--sample", case, url, str(n)
                )
            }
            (found,) = measure.interleaved(cases, given.rounds or 1).values()
        table.append(
            measure.with_floor(measure.Row(f"{prompts} prompts, {case}", found["per_s"], "prompts/s"), TARGETS[case])
        )
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
