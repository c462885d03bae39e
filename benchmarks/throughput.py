"""Whole rollouts per second, next to peers that isolate nothing: python benchmarks/throughput.py [--quick] [--json
FILE]

A rollout has five turns with a shell command each, a last turn that only answers, and a sixth command that scores it;
the model server answers immediately, in a separate process. With 1, 16 and 64 concurrent rollouts:

- `commands`: the six commands as plain subprocesses in a directory of their own, and nothing else. This is the floor.
- `palaestra`: a run as users start it. The workspace is forked from a prepared one, the slot is isolated with all
  limits, every call is validated, the work is sealed and scored in a fresh slot, and everything is recorded in the
  journal on disk.
- `palaestra, exact`: the same against a server that continues token ids, with the ledger of exact tokens.
- `--atropos PYTHON`, `--verifiers PYTHON`: interpreters that have atroposlib 0.4.0 and verifiers 0.1.14, the newest
  version with an in-process tool environment. They run the same commands as plain subprocesses (`_throughput_peers`).

Target: with 16 and with 64 rollouts, both Palaestra cases are at least as fast as the faster peer.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import _measure as measure
from _instant_server import chat_reply, serve
from _throughput_peers import CHECK, FIVE_STEPS, PROMPT, Steps, shell

COMMANDS = ("seq 200 > a.txt", "wc -l < a.txt", "sort -rn a.txt | head -3", "grep -c 7 a.txt", "echo done > answer.txt")
SIZES = {1: 32, 16: 128, 64: 256}
QUICK = {1: 8, 16: 32, 64: 64}
COMPARED_AT = (16, 64)
OURS = ("palaestra", "palaestra, exact")
PEERS = {"atropos": "atroposlib 0.4.0", "verifiers": "verifiers 0.1.14"}


async def commands(url: str, concurrency: int, rollouts: int) -> float:
    """Run the six commands of each rollout in a separate directory, and return the seconds."""
    left = iter(range(rollouts))

    async def worker() -> None:
        for _ in left:
            with tempfile.TemporaryDirectory() as folder:
                for command in COMMANDS:
                    await shell(command, folder)
                assert (await shell(CHECK, folder)).strip() == "done"

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return time.perf_counter() - started


async def palaestra(
    url: str, concurrency: int, tasks: Sequence[Steps], *, exact: bool = False, isolation: str = "best"
) -> float:
    """Run groups of one rollout each, and return the seconds from the first task to the last line on disk."""
    from _exact import saved_tokenizer

    from palaestra import Task, environment
    from palaestra.rollouts.journal.journal import EventStream, Journal
    from palaestra.rollouts.runner import Runner
    from palaestra.rollouts.spec import RunContext
    from palaestra.rollouts.workspaces import Workspaces
    from palaestra_slots.sandbox.backends.local import LocalBackend
    from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
    from palaestra_tokens.config import APIServerConfig
    from palaestra_tokens.server_group import ServerGroup

    @environment(toolsets=["terminal"])
    async def steps():  # the annotations would be looked up in the module
        for number, each in enumerate(tasks):
            yield Task(id=f"t{number}", prompt=PROMPT, files=dict(each.files), data={"answer": each.answer})

    @steps.score
    async def right(task, sandbox):
        return (await sandbox.execute(CHECK)).output.strip() == task.data["answer"]

    with tempfile.TemporaryDirectory() as folder:
        kind = {"server_type": "sglang", "tokenizer_name": saved_tokenizer(folder)} if exact else {}
        engine = ServerGroup(APIServerConfig(base_url=url, model_name="m", health_check=False, **kind))
        await engine.start()
        async with SlotPool(SlotPoolConfig(), LocalBackend.from_isolation(isolation)) as pool:
            workspaces, journal = Workspaces(pool), Journal(Path(folder, "journal.jsonl"))
            run = RunContext(engine, workspaces, EventStream(journal))
            started = time.perf_counter()
            totals = await Runner(steps.build(steps.config_type()()), run, concurrency=concurrency).run()
            took = time.perf_counter() - started
            await workspaces.aclose()
            journal.close()
        await engine.aclose()
    assert (totals.scored, totals.mean_reward) == (len(tasks), 1.0), totals.errors
    return took


async def model_server() -> None:
    """Serve the six replies, as chat completions and as tokens of the tiny model's tokenizer."""
    from _exact import said, saved_tokenizer, turn_counter

    from palaestra_tokens.tokenizers import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(saved_tokenizer(folder))
    calls = [{"name": "terminal", "arguments": {"command": command}} for command in COMMANDS]
    chat = [chat_reply(None, [("terminal", {"command": command})], turn) for turn, command in enumerate(COMMANDS)]
    tokens = said(tokenizer, calls, "All done.")
    await serve([*chat, chat_reply("All done.")], tokens, turn_counter(tokenizer))


def peer(interpreter: str, name: str, url: str, concurrency: int, rollouts: int) -> measure.Sample:
    """Measure one sample of a peer in its own virtual environment."""
    script = str(Path(__file__).with_name("_throughput_peers.py"))
    command = [interpreter, script, name, url, str(concurrency), str(rollouts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{PEERS[name]} failed:\n{done.stderr[-3000:]}")
    sample: measure.Sample = json.loads(done.stdout.splitlines()[-1])
    return sample


def rows(found: Mapping[str, Mapping[str, float]], peers: Mapping[str, str]) -> list[measure.Row]:
    """Return the rows of the table; the target of Palaestra's rates is the rate of the fastest peer."""
    table = []
    for key, numbers in found.items():
        case, _, concurrency = key.rpartition(" at ")
        rate, floor = numbers["per_s"], found[f"commands at {concurrency}"]["per_s"]
        row = measure.Row(key, rate, "rollouts/s", rate / floor)
        if case in OURS and int(concurrency) in COMPARED_AT and peers:
            fastest = max(found[f"{PEERS[name]} at {concurrency}"]["per_s"] for name in peers)
            row = measure.judged(row, fastest, rate >= fastest)
        table.append(row)
    return table


def main() -> int:
    """Measure all cases in turns and print the table."""
    parser = measure.options_parser(__doc__)
    for name, what in PEERS.items():
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"an interpreter that has {what}")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    peers = {name: getattr(options, name) for name in PEERS if getattr(options, name)}
    with measure.serving(__file__, "--serve") as url:
        cases = {}
        for concurrency, rollouts in (QUICK if options.quick else SIZES).items():
            sizes = (str(concurrency), str(rollouts))
            for case in ("commands", *OURS):
                cases[f"{case} at {concurrency}"] = lambda case=case, sizes=sizes: measure.fresh_process(
                    __file__, "--sample", case, url, *sizes
                )
            for name, interpreter in peers.items():
                cases[f"{PEERS[name]} at {concurrency}"] = lambda name=name, interpreter=interpreter, sizes=sizes: peer(
                    interpreter, name, url, int(sizes[0]), int(sizes[1])
                )
        found = measure.interleaved(cases, rounds)
    for name in PEERS.keys() - peers.keys():
        print(f"absent: {PEERS[name]}: give --{name} PYTHON", file=sys.stderr)
    title = f"Whole rollouts, instant server, median of {rounds}; ratios are to the bare commands"
    return measure.report(title, rows(found, peers), options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(model_server())
    elif sys.argv[1:2] == ["--sample"]:
        chosen, address, at_once, total = sys.argv[2:]
        if chosen not in OURS:
            run = commands(address, int(at_once), int(total))
        else:
            run = palaestra(address, int(at_once), [FIVE_STEPS] * int(total), exact=chosen != OURS[0])
        print(json.dumps({"per_s": int(total) / asyncio.run(run)}))
    else:
        sys.exit(main())
