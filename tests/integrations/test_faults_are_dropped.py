"""Real faults, and what each trainer is given: an unscored rollout is dropped in the trainer's own word, none becomes a
reward. An agent that does not end, or calls after its end, is not the world's failure: its work is graded."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from bug_fixing import Fixer

import palaestra
from faults.injected import kill_slot
from palaestra import Task, Trajectory, environment
from palaestra.core.retry import RetryPolicy
from palaestra.core.types import JSON, Blame, Limits
from palaestra.inference.chat_server import ServerEngine
from palaestra.inference.config import APIServerConfig
from palaestra.inference.engines.openai import OpenAIEngine
from palaestra.integrations import trl
from palaestra.rollouts.export.exporter import ExportMeta, exporter_named
from palaestra.rollouts.records import Group
from palaestra.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion
from palaestra.trainers.atropos.groups import fitting, scored_data
from palaestra.trainers.batch import UNSCORED, Batch

pytestmark = [pytest.mark.slots, pytest.mark.long]

SLEEP = "sleep 31417.25"
AGENT = """
import json, os, subprocess, sys, time, urllib.request
def ask(messages):
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "bash", "parameters": parameters}}]
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
def work():
    messages = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": sys.stdin.read()}]
    while True:
        said = ask(messages)
        messages.append(said)
        if not said.get("tool_calls"):
            return
        for call in said["tool_calls"]:
            subprocess.run(json.loads(call["function"]["arguments"])["command"], shell=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": ""})
"""
TWICE = 'ask([{"role": "user", "content": "one"}])\nask([{"role": "user", "content": "two"}])'
LATE = """work()
if not os.fork():
    os.setsid()
    time.sleep(2)
    while True:
        try: ask([{"role": "user", "content": "too late"}])
        except OSError: time.sleep(0.05)
"""
PROGRAMS: Mapping[str, str] = {
    "429": TWICE,
    "dead engine": TWICE,
    "killed slot": f'ask([{{"role": "user", "content": "one"}}])\nos.execvp("sleep", {SLEEP.split()})'.replace(
        "'", '"'
    ),
    "never ends": "work()\ntime.sleep(99)",
    "calls after its end": LATE,
}
ANSWERS: Mapping[str, list[FakeAnswer]] = {
    "429": [FakeAnswer(completion("ok")), FakeAnswer({"error": {"message": "slow down"}}, status=429)],
    "dead engine": [FakeAnswer(completion("ok")), FakeAnswer(cut=True)],
}
FAULTS: Mapping[str, Blame | None] = {
    "429": Blame.ENGINE,
    "dead engine": Blame.ENGINE,
    "killed slot": Blame.SANDBOX,
    "full disk": Blame.GRADER,
    "lost reward file": Blame.GRADER,
    "never ends": Blame.MODEL,
    "calls after its end": None,
}
"""Each fault and its blame. The last two are the agent's doing, which is graded."""


def world(fault: str) -> object:
    @environment
    def fixing():  # type: ignore[no-untyped-def]
        files = {"calc.py": "def add(a, b):\n    return a - b\n"}
        yield Task(id="calc", prompt="Fix calc.py.", files=files, limits=Limits(disk_bytes=8 << 20))

    @fixing.score
    async def score(task, sandbox):  # type: ignore[no-untyped-def]
        if fault == "full disk":
            await sandbox.write_bytes("verdict", bytes(32 << 20))
        if fault == "lost reward file":
            return float(await sandbox.read_text("reward.txt"))
        done = await sandbox.execute("python3 -c 'from calc import add; assert add(2, 3) == 5'")
        return 1.0 if done.success else 0.0

    return fixing


async def roll_out(fault: str, folder: Path) -> Trajectory:
    program = AGENT + PROGRAMS.get(fault, "work()")
    assert "'" not in program

    async def play(engine: ServerEngine) -> Trajectory:
        run = await palaestra.run(
            world(fault),
            server=engine,
            agent=f"python3 -c '{program}'",
            folder=folder,
            group_size=1,
            infra_retries=0,
            worker_timeout=8.0,
        )
        return run.trajectories[0]

    if fault in ANSWERS:
        async with LoopbackServer(*ANSWERS[fault]) as server:
            config = APIServerConfig(base_url=f"{server.url}/v1", model_name="m")
            return await play(OpenAIEngine(config, retry=RetryPolicy(attempts=2, first_s=0.01)))
    killing = asyncio.create_task(kill_slot(SLEEP)) if fault == "killed slot" else None
    try:
        return await play(Fixer())
    finally:
        if killing is not None:
            killing.cancel()


@functools.cache
def trajectory(fault: str) -> Trajectory:
    """The rollout that meets a fault; the empty name is none."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(roll_out(fault, Path(folder)))


def group(*trajectories: Trajectory) -> Group:
    numbered = [
        msgspec.structs.replace(each, index=index, rollout_id=f"g/{index}") for index, each in enumerate(trajectories)
    ]
    return Group(group_id="g", number=0, task_id="calc", toolsets=(), trajectories=numbered)


def atropos(good: Trajectory, other: Trajectory) -> list[float | None]:
    """Groups to a trajectory API: the rollout is not sent."""
    sent = scored_data(fitting(group(good, other), None), group_size=2)
    assert sent is not None
    lone = scored_data(fitting(group(other), None), group_size=1)
    assert (lone is None) == (not other.scored)
    return [*sent["scores"], *([None] if not other.scored else [])]


def trainers(good: Trajectory, other: Trajectory) -> list[float | None]:
    """Our training loop, whose trainers are TRL and Tinker: the rollout is counted as refused."""
    batch = Batch()
    bad = msgspec.structs.replace(good, reward=0.0)
    batch.add(group(good, bad, other), version=0, most_behind=0)
    assert {row.row.rollout_id for row in batch.rows} == {"g/0", "g/1", *(["g/2"] if other.scored else [])}
    assert batch.refused[UNSCORED] == (not other.scored)
    return [batch.rewards[0], *(batch.rewards[2:] or [None])]


def trl_rows(good: Trajectory, other: Trajectory) -> list[float | None]:
    """TRL's `rollout_func`: the row has the reward None, and a mask of zeros."""
    rows = list(trl._group_rows(group(good, other), 2, filler=0))
    assert any(rows[1]["mask"]) == other.scored
    return trl.reward(completions=rows, reward=[row["reward"] for row in rows])


def openenv(good: Trajectory, other: Trajectory) -> list[float | None]:
    """OpenEnv: `env_reward` is None."""
    pytest.importorskip("openenv.core.harness", reason="the package openenv is not installed")
    from palaestra.integrations.openenv import verify_result

    assert verify_result(other).artifacts["blame"] == other.blame
    return [verify_result(good).env_reward, verify_result(other).env_reward]


def exported(name: str, good: Trajectory, other: Trajectory) -> list[float | None]:
    """A file of rows or messages: the rollout has no line, and is counted as left out."""
    out = io.BytesIO()
    report = exporter_named(name).export([group(good, other)], out, ExportMeta())
    assert report.left_out["unscored"] == (not other.scored)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(lines) == 1 + other.scored
    return [good.reward, other.reward if other.scored else None]


Face = Callable[[Trajectory, Trajectory], list[float | None]]
TRAINERS: Mapping[str, Face] = {
    "atropos": atropos,
    "trainers": trainers,
    "trl": trl_rows,
    "openenv": openenv,
    "rows": functools.partial(exported, "rows"),
    "openai": functools.partial(exported, "openai"),
}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_becomes_a_reward(fault: str, trainer: str) -> None:
    good, met = trajectory(""), trajectory(fault)
    assert good.reward == 1.0, good.error
    graded = FAULTS[fault] in (None, Blame.MODEL)
    assert (met.blame, met.reward) == (FAULTS[fault], 1.0 if graded else None), met.error
    assert TRAINERS[trainer](good, met) == [1.0, met.reward]


def test_calls_after_the_end_are_not_recorded() -> None:
    late: JSON = trajectory("calls after its end").messages
    assert "too late" not in json.dumps(late)
    assert len(trajectory("calls after its end").turns) == len(trajectory("").turns)
