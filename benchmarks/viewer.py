"""Measure the viewer on a large run: `python benchmarks/viewer.py [--rollouts 10000] [--turns 40]`.

Writes a run of that size with the journal's own writer, starts `palaestra view` on it, and prints the time to the first
page of the run (cold, and with the index in the cache), the time of a rollout, a page of rows and a search, and the
server's memory. Then it writes one group as an HTML file, the run's report, and the conversations as JSON lines, which
it opens as a file of another program. `--tokens` adds exact tokens to each rollout. With Chromium, the page itself is
measured too, and the frame times while 100,000 tokens scroll.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

from palaestra.rollouts.events import GroupEnded, GroupStarted, RolloutEnded, RunEnded, RunStarted, TurnTaken
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.records import Beside, Group, Trajectory, TurnRecord
from palaestra_slots.core.types import JSON, Blame, Label, Message, Outcome
from palaestra_tokens.engine import Sampled
from palaestra_tokens.ledger import Ledger, Piece, SegmentReason
from palaestra_tokens.ledger.records import LedgerRecord

WORDS = "the test fails because parse returns None for an empty line so we open src main py and read it again"
MANY_TOKENS = 100_000


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=words))


def ledger(rng: random.Random, turns: int, prompt: int, sampled: int) -> LedgerRecord:
    """Return the record of a conversation in one segment."""
    made = Ledger()
    segment = made.open(SegmentReason.START)
    for _ in range(turns):
        delta = [rng.randrange(500) for _ in range(prompt)]
        ids = [rng.randrange(500) for _ in range(sampled)]
        reply = Sampled(ids, [-rng.expovariate(2.0) for _ in ids], "stop", f"step-{rng.randrange(3)}")
        made.append(segment, delta, [Piece(reply, made.prompt(segment, delta).checksum)])
    return made.record()


def rollout(
    rng: random.Random, group: str, task: str, index: int, turns: int, tokens: LedgerRecord | None
) -> Trajectory:
    messages: list[Message] = [{"role": "user", "content": f"Fix {task}. {text(rng, 60)}"}]
    for turn in range(turns):
        name = rng.choice(["terminal", "read_file", "patch"])
        arguments = json.dumps({"command": f"sed -n {turn},40p src/{text(rng, 2).replace(' ', '_')}.py"})
        called = {"id": f"call_{turn}", "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": text(rng, 25), "tool_calls": [called]})
        output = json.dumps({"exit_code": 0, "output": "\n".join(text(rng, 12) for _ in range(8))})
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": output})
    messages.append({"role": "assistant", "content": "Done."})
    draw = rng.random()
    cheats = draw > 0.97
    lost = draw < 0.02
    reward = None if lost else 0.0 if cheats else float(draw > 0.55)
    return Trajectory(
        rollout_id=f"{group}/{index}", group_id=group, task_id=task, index=index, messages=messages, reward=reward,
        outcome=Outcome.INFRA_ERROR if lost else Outcome.MAX_TURNS if draw < 0.1 else Outcome.NATURAL,
        blame=Blame.SANDBOX if lost else Blame.MODEL if draw < 0.1 else None,
        error="SlotLost: the slot's process ended" if lost else "",
        official=1.0 if cheats else None,
        labels=[Label("tests_edited", "tests/test_main.py", True)] if cheats else [],
        metrics={"tests_passed": round(rng.random(), 2)}, prompt_tokens=40_000, completion_tokens=4_000, cost=0.012,
        turns=[TurnRecord(number=n, finish_reason="tool_calls", prompt_tokens=900, completion_tokens=90)
               for n in range(1, turns + 2)],
        tool_calls_attempted=turns, tool_calls_schema_valid=turns, ledger=tokens,
        detail={"category": rng.choice(["files", "text", "network"])},
        beside=Beside(started_at=1_760_000_000.0, duration_s=rng.uniform(60, 300),
                      stages={"agent": 80.0, "grade": 3.0, "acquire": 0.1},
                      turn_s=[(rng.uniform(1, 4), rng.uniform(0, 1)) for _ in range(turns + 1)]),
    )  # fmt: skip


def write_run(folder: Path, rollouts: int, turns: int, *, tokens: bool, group_size: int = 16) -> None:
    """Write the journal of a run, its groups one after another."""
    rng = random.Random(7)
    folder.mkdir(parents=True)
    journal = Journal(folder / "journal.jsonl")
    config = {"env": {"group_size": group_size}, "command": "process"}
    journal.append(RunStarted(at=1_760_000_000.0, run_id="large", env="bugs", model="tiny", seed=7, config=config))
    exact = [ledger(rng, turns, 220, 90) for _ in range(8)] if tokens else []
    for number in range(rollouts // group_size):
        task, group = f"bug-{number:05}", f"{number:06}-bug-{number:05}"
        journal.append(GroupStarted(at=1_760_000_000.0, group=Group(group_id=group, number=number, task_id=task)))
        for index in range(group_size):
            one = rollout(rng, group, task, index, turns, rng.choice(exact) if exact else None)
            for turn in range(turns):
                part = one.messages[1 + 2 * turn : 3 + 2 * turn]
                journal.append(TurnTaken(at=1_760_000_000.0, rollout_id=one.rollout_id, turn=turn + 1, messages=part))
            journal.append(RolloutEnded(at=1_760_000_000.0, trajectory=one))
        journal.append(GroupEnded(at=1_760_000_000.0, group_id=group, number=number))
    long = rollout(rng, "999999-long", "long", 0, 20, ledger(rng, 20, MANY_TOKENS // 20 - 1000, 1000))
    last = Group(group_id="999999-long", number=999_999, task_id="long")
    journal.append(GroupStarted(at=1_760_000_000.0, group=last))
    journal.append(RolloutEnded(at=1_760_000_000.0, trajectory=long))
    journal.append(GroupEnded(at=1_760_000_000.0, group_id="999999-long", number=999_999))
    journal.append(RunEnded(at=1_760_000_000.0, reason="done"))
    journal.close()


class Served:
    """A viewer in its own process, with a cache of its own."""

    def __init__(self, run: Path, cache: Path) -> None:
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "palaestra", "view", str(run), "--no-open"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.url, self.token = self.address.partition("#")[0].split("/?token=")

    def get(self, name: str, **params: str) -> dict[str, JSON]:
        request = urllib.request.Request(f"{self.url}/api/{name}?{urllib.parse.urlencode(params)}")
        request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request) as response:
            found: dict[str, JSON] = json.load(response)
            return found

    def timed(self, name: str, **params: str) -> tuple[float, dict[str, JSON]]:
        start = time.monotonic()
        found = self.get(name, **params)
        return time.monotonic() - start, found

    def highest_mib(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def measure_server(run: Path, cache: Path, kind: str) -> None:
    """Print the times of one start, without or with the index in the cache."""
    served = Served(run, cache)
    try:
        first = served.get("runs")["runs"][0]
        print(f"{kind}: first figures of the run after {time.monotonic() - served.began:.2f} s from the command")
        name = first["name"]
        while (found := served.get("run", run=name)["summary"]["indexed"])[0] < found[1]:
            time.sleep(0.05)
        print(f"{kind}: whole run indexed after {time.monotonic() - served.began:.2f} s ({found[1] / 1e6:.0f} MB)")
        for what, params in (
            ("run", {}),
            ("rollouts", {"sort": "tokens", "where": '[["reward","<",1]]'}),
            ("groups", {}),
        ):
            print(f"{kind}: {what} {min(served.timed(what, run=name, **params)[0] for _ in range(5)) * 1000:.0f} ms")
        middle = str(served.get("rollouts", run=name)["total"] // 2)
        ids = [row["id"] for row in served.get("rollouts", run=name, offset=middle)["rows"][:20]]
        times = sorted(served.timed("rollout", run=name, id=each)[0] for each in ids)
        print(f"{kind}: a rollout {times[len(times) // 2] * 1000:.0f} ms, slowest of 20 {times[-1] * 1000:.0f} ms")
        for what, text in (("no such text", "no such text"), ("a key of the results", "exit_code")):
            after, start = 0, time.monotonic()
            while True:
                found = served.get("search", run=name, text=text, after=str(after))
                after = found["next"]
                if after >= found["total"]:
                    break
            print(f"{kind}: search through all conversations for {what} {time.monotonic() - start:.2f} s")
        print(f"{kind}: 100,000 tokens {served.timed('tokens', run=name, id='999999-long/0')[0] * 1000:.0f} ms")
        print(f"{kind}: server's highest memory {served.highest_mib():.0f} MiB")
    finally:
        served.stop()


def measure_files(run: Path, cache: Path) -> None:
    """Print the sizes and times of files made from the run, and the times of reading its conversations back."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    for what, words in (
        ("one group as HTML", ["view", str(run), "--rollout", "000003-*", "--html"]),
        ("the report", ["report", str(run), "--out"]),
        ("the conversations as JSON lines", ["export", str(run), "--to", "openai", "--all", "--out"]),
    ):
        path, start = cache / ("chats.jsonl" if words[0] == "export" else "page.html"), time.monotonic()
        subprocess.run([sys.executable, "-m", "palaestra", *words, str(path)], env=environment, check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        print(f"files: {what}: {path.stat().st_size / 1e6:.2f} MB in {time.monotonic() - start:.2f} s")
    for kind in ("first", "second"):
        served = Served(cache / "chats.jsonl", cache)
        try:
            name = served.get("runs")["runs"][0]["name"]
            print(f"files: {kind} opening of the lines: first figures after {time.monotonic() - served.began:.2f} s")
            while served.get("run", run=name)["summary"]["state"] != "done":
                time.sleep(0.5)
            found = served.get("rollouts", run=name)["rows"][-1]["id"]
            read_s = time.monotonic() - served.began
            print(f"files: {kind} opening of the lines: all read after {read_s:.2f} s, a rollout "
                  f"{served.timed('rollout', run=name, id=found)[0] * 1000:.0f} ms, highest memory "
                  f"{served.highest_mib():.0f} MiB")  # fmt: skip
        finally:
            served.stop()


FRAMES = """async (pixels) => {
  const page = document.querySelector(".token-page"), times = [];
  let last = performance.now();
  for (let frame = 0; frame < 240; frame++) {
    page.scrollTop += pixels;
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  return times.sort((a, b) => a - b);
}"""


def measure_page(run: Path, cache: Path) -> None:
    """Print how fast the page is in Chromium, with the index in the cache."""
    from playwright.sync_api import sync_playwright

    from palaestra_toolsets.browser import chromium

    served = Served(run, cache)
    try:
        name = served.get("runs")["runs"][0]["name"]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=chromium.usable(), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 900})

            def timed(address: str, selector: str) -> float:
                start = time.monotonic()
                page.goto(address)
                page.wait_for_selector(selector)
                return time.monotonic() - start

            runs = f"{served.url}/?token={served.token}"
            print(f"page: runs {timed(runs, 'table.wide tbody tr') * 1000:.0f} ms")
            print(f"page: the run {timed(f'{served.url}/#/run?run={name}', 'a.row') * 1000:.0f} ms")
            one = urllib.parse.urlencode(
                {"run": name, "id": served.get("rollouts", run=name, offset="300")["rows"][0]["id"]}
            )
            print(f"page: a rollout {timed(f'{served.url}/#/rollout?{one}', '.turn') * 1000:.0f} ms")
            one = urllib.parse.urlencode({"run": name, "id": "999999-long/0"})
            print(f"page: 100,000 tokens {timed(f'{served.url}/#/tokens?{one}', '.token-line .token') * 1000:.0f} ms")
            for pixels in (60, 900):
                times = page.evaluate(FRAMES, pixels)
                print(f"page: scrolling {pixels} px a frame: median {times[120]:.1f} ms, 95% {times[228]:.1f} ms")
            browser.close()
    finally:
        served.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--no-page", action="store_true", help="do not start Chromium")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="palaestra-viewer-") as place:
        run, cache = Path(place, "runs/bugs--tiny/large"), Path(place, "cache")
        write_run(run, given.rollouts, given.turns, tokens=given.tokens)
        print(
            f"{given.rollouts} rollouts of {given.turns} turns, {(run / 'journal.jsonl').stat().st_size / 1e6:.0f} MB"
        )
        measure_server(run, cache, "cold")
        measure_server(run, cache, "cached")
        measure_files(run, cache)
        if not given.no_page:
            measure_page(run, cache)


if __name__ == "__main__":
    main()
