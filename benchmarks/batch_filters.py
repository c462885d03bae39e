"""What `palaestra batch` keeps with a judge, without duplicates and through kills:
python benchmarks/batch_filters.py [--quick] [--json FILE]

10,000 rows (1,000 with --quick) in pairs whose prompts and replies differ in letter case only, so that half of them are
duplicates. A judge on the same server accepts three of four pairs. The command is killed twice at random moments and
resumed. The rows of the table are counts that follow from these numbers, requests made again because their answers were
not on the disk yet, the size of the report, and the rise of the command's peak memory with ten times the rows.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import _measure as measure
from _instant_server import InstantServer, chat_reply

ROWS, QUICK = 10_000, 1000
AT_ONCE = 256
KILLS = 2
MOST_REPORT_MB = 3.0
MOST_MEMORY_RATIO = 1.5
COMMAND = (sys.executable, "-m", "palaestra", "batch")


_WORDS = [f"{one}{two}" for one in ("ba", "ce", "di", "fo", "gu") for two in ("lan", "mer", "nit", "por", "sud")]


class Server(InstantServer):
    """Answers a prompt with text that follows from its number, judges, and counts the requests of each kind."""

    counts: ClassVar[Counter[str]] = Counter(chat=0, judge=0)

    def _reply(self, path: bytes, body: bytes) -> bytes:
        if not path.endswith(b"/chat/completions"):
            return super()._reply(path, body)
        found = re.search(rb"number (\d+)", body, re.IGNORECASE)
        number = int(found[1]) if found else 0
        judges = b"You judge" in body
        self.counts["judge" if judges else "chat"] += 1
        if judges:
            return chat_reply(json.dumps({"reason": "As counted.", "meets": number % 4 != 3}))
        return chat_reply(" ".join(random.Random(number).choices(_WORDS, k=60)))


async def serve(log: Path) -> None:
    """Serve until standard input ends; `log` gets the number of chat requests and of judgements."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Server((), (), lambda _: 0), "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    log.write_text(json.dumps(Server.counts))
    server.close()


@dataclass(frozen=True)
class Found:
    """What one batch left: samples by fate, requests, MB of the report and MiB of peak memory."""

    kept: int
    duplicates: int
    refused: int
    chats: int
    judgements: int
    report_mb: float
    peak_mib: float
    seconds: float


def played(rows: int, kills: int) -> Found:
    """Run one batch, and kill it this often."""
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), random.Random(rows)
        prompts = (f"{('Tell', 'TELL')[row % 2]} of number {row // 2}, please." for row in range(rows))
        (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
        with measure.serving(__file__, "--serve", str(folder / "asked.json")) as url:
            flags = [f"--base-url={url}/v1", "--model=m", "--toolsets", "terminal", f"--num-workers={AT_ONCE}"]
            flags += ["--judge", "It tells enough.", "--unique=0.9", "--run-name=run"]
            started, peak = time.perf_counter(), 0.0
            for number in range(kills + 1):
                killed_at = rows * (number + rng.uniform(0.1, 0.9)) / (kills + 1) if number < kills else None
                peak = max(peak, _run(folder, [*flags, *(["--resume"] if number else [])], killed_at))
            seconds = time.perf_counter() - started
        asked = json.loads((folder / "asked.json").read_text())
        run = folder / "data/run"
        statistics = json.loads((run / "statistics.json").read_text())["samples"]
        repeated = statistics["discarded"].get("its conversation repeats an earlier one", 0)
        return Found(
            kept=statistics["kept"],
            duplicates=repeated,
            refused=sum(statistics["discarded"].values()) - repeated,
            chats=asked["chat"],
            judgements=asked["judge"],
            report_mb=(run / "report.html").stat().st_size / 1e6,
            peak_mib=peak,
            seconds=seconds,
        )


def _run(folder: Path, flags: list[str], killed_at: float | None) -> float:
    """Run the command, kill it after about this many samples, and return its peak memory in MiB."""
    journal, peak, ended, read = folder / "data/run/journal.jsonl", 0.0, 0, 0
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    with subprocess.Popen([*COMMAND, "p.jsonl", *flags], cwd=folder, env=environment, stderr=subprocess.PIPE) as batch:
        assert batch.stderr is not None
        os.set_blocking(batch.stderr.fileno(), False)
        said = b""
        while batch.poll() is None:
            said += batch.stderr.read() or b""
            with open(f"/proc/{batch.pid}/status") as status:
                found = re.search(r"VmHWM:\s+(\d+)", status.read())
            peak = max(peak, int(found[1]) / 1024 if found else 0.0)
            if killed_at is not None and journal.exists():
                with journal.open("rb") as lines:
                    lines.seek(read)
                    new = lines.read()
                read, ended = read + len(new), ended + new.count(b'{"event":"rollout",')
            if killed_at is not None and ended >= killed_at:
                batch.send_signal(signal.SIGKILL)
                batch.wait()
                return peak
            time.sleep(0.2)
        assert batch.returncode == 0, (said + (batch.stderr.read() or b"")).decode()[-3000:]
    return peak


def main() -> int:
    """Play both batches and print the table."""
    given = measure.options_parser(__doc__).parse_args()
    rows = QUICK if given.quick else ROWS
    found, small = played(rows, KILLS), played(rows // 10, 0)
    accepted = sum((row // 2) % 4 != 3 for row in range(rows))
    lost = (
        abs(found.kept - accepted // 2) + abs(found.duplicates - accepted // 2) + abs(found.refused + accepted - rows)
    )
    ceiling = measure.with_ceiling
    table = [
        measure.Row(f"{rows} rows with {KILLS} kills", rows / found.seconds, "rows/s"),
        ceiling(measure.Row("samples lost, doubled or misjudged", lost, "samples"), 0),
        ceiling(measure.Row("replies asked for again", found.chats - rows - 1, "requests"), KILLS * AT_ONCE),
        ceiling(measure.Row("judgements asked for again", found.judgements - rows, "requests"), KILLS * AT_ONCE),
        ceiling(measure.Row("report", found.report_mb, "MB"), MOST_REPORT_MB),
        ceiling(
            measure.Row("peak memory, to that of a tenth of the rows", found.peak_mib / small.peak_mib, "times"),
            MOST_MEMORY_RATIO,
        ),
    ]
    return measure.report("palaestra batch with a judge and without duplicates", table, given.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(serve(Path(sys.argv[2])))
    else:
        sys.exit(main())
