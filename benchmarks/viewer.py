"""Measure the viewer on a large run: `python benchmarks/viewer.py [--rollouts 10000] [--turns 40]`.

Writes a run of that size with the journal's own writer, starts `palaestra view` on it, and prints the time to the first
page of the run (cold, and with the index in the cache), the time of a rollout, a page of rows and a search, and the
server's memory. `--tokens` adds exact tokens to each rollout. With Chromium, the page itself is measured too, and the
frame times while 100,000 tokens scroll.
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

from palaestra.core.types import Blame, Label, Message, Outcome
from palaestra.inference.engine import Sampled
from palaestra.inference.ledger import Ledger, Piece, SegmentReason
from palaestra.inference.ledger.records import LedgerRecord
from palaestra.rollouts.events import GroupEnded, GroupStarted, RolloutEnded, RunEnded, RunStarted, TurnTaken
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.records import Beside, Group, Trajectory, TurnRecord

WORDS = "the test fails because parse returns None for an empty line so we open file src main py and read it again".split()
MANY_TOKENS = 100_000


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


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


def rollout(rng: random.Random, group: str, task: str, index: int, turns: int, tokens: LedgerRecord | None) -> Trajectory:
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
        turns=[TurnRecord(number=n, finish_reason="tool_calls", prompt_tokens=900, completion_tokens=90) for n in range(turns)],
        tool_calls_attempted=turns, tool_calls_schema_valid=turns, ledger=tokens,
        detail={"category": rng.choice(["files", "text", "network"])},
        beside=Beside(started_at=1_760_000_000.0, duration_s=rng.uniform(60, 300), stages={"agent": 80.0, "grade": 3.0, "acquire": 0.1},
                      turn_s=[(rng.uniform(1, 4), rng.uniform(0, 1)) for _ in range(turns)]),
    )  # fmt: skip


def write_run(folder: Path, rollouts: int, turns: int, *, tokens: bool, group_size: int = 16) -> None:
    """Write the journal of a run, its groups one after another."""
    rng, folder = random.Random(7), folder
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
    journal.append(GroupStarted(at=1_760_000_000.0, group=Group(group_id="999999-long", number=999_999, task_id="long")))
    journal.append(RolloutEnded(at=1_760_000_000.0, trajectory=long))
    journal.append(GroupEnded(at=1_760_000_000.0, group_id="999999-long", number=999_999))
    journal.append(RunEnded(at=1_760_000_000.0, reason="done"))
    journal.close()
