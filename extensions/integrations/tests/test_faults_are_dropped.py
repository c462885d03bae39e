"""Real faults, and what each trainer is given: an unscored rollout is dropped in the trainer's own word, none becomes a
reward. An agent that does not end, or calls after its end, is not an infrastructure failure: its work is graded.

Each fault is rolled out once. Adapters that play rollouts by themselves get the result of that rollout; everything
else of them, and of the trainers' packages, is real.
"""

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
from bug_fixing import Fixer, fix_calc

import palaestra
from faults.injected import kill_slot
from palaestra import Scored, Task, Trajectory, Unscored, environment
from palaestra.rollouts.export.exporter import ExportMeta
from palaestra.rollouts.export.formats import exporter_named
from palaestra.rollouts.records import Group
from palaestra_integrations import trl
from palaestra_slots.core.retry import RetryPolicy
from palaestra_slots.core.types import JSON, Blame, Limits
from palaestra_tokens.chat_server import ServerEngine
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion
from palaestra_train.advantages import UNSCORED, Batch
from palaestra_train.atropos.groups import fitting, scored_data
from programs import nap
from rollout_servers import solving

pytestmark = [pytest.mark.slots, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SLEEP = nap()
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
"""Each fault and its blame. The last two are the agent's doing, which is graded: a budget of time ends every agent."""


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
    from palaestra_integrations.openenv import verify_result

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


class Played:
    """In place of a `RolloutFunction`: gives the result of a rollout that was played."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory

    async def __call__(self, *asked: JSON, **settings: JSON) -> Scored | Unscored:
        met = self._trajectory
        if met.reward is None:
            return Unscored(met.blame or Blame.RUN, met.error, met)
        return Scored(met.reward, met)

    async def aclose(self) -> None: ...


def areal(good: Trajectory, other: Trajectory) -> list[float | None]:
    """AReaL: `run` raises, which rejects the sample."""
    from palaestra_integrations.areal import Agent
    from palaestra_integrations.blame import Dropped

    async def rewarded(met: Trajectory) -> float | None:
        agent = Agent(fix_calc)
        agent._rollout = Played(met)
        try:
            return await agent.run({"task_id": "calc"}, base_url="http://proxy")
        except Dropped as dropped:
            return None if dropped.kind == f"{met.outcome}/{met.blame}" else 0.0

    return [asyncio.run(rewarded(each)) for each in (good, other)]


def agent_lightning(good: Trajectory, other: Trajectory) -> list[float | None]:
    """Agent-Lightning: the state is `failed`, and no reward event is sent."""
    pytest.importorskip("agentlightning", reason="the package agentlightning is not installed (make faces)")
    from palaestra_integrations.agent_lightning import Controller
    from test_agent_lightning import ENV, KEY, ended, served, solving

    async def rewarded(met: Trajectory) -> float | None:
        async with served(solving()) as (url, client, _):
            async with Controller(ENV, url, KEY) as controller:
                controller._rollout = Played(met)
                await controller.play_queued()
            status, rewards, _ = await ended(client)
        assert status["state"] == ("succeeded" if met.scored else "failed")
        return rewards[0]["data"]["value"] if rewards else None

    return [asyncio.run(rewarded(each)) for each in (good, other)]


def verifiers(good: Trajectory, other: Trajectory) -> list[float | None]:
    """verifiers and prime-rl: an error on the trace, which has no reward."""
    pytest.importorskip("verifiers.v1", reason="the package verifiers is not installed (make faces)")
    from palaestra_integrations import verifiers as adapter
    from test_verifiers import plugged, traced

    def rewarded(met: Trajectory) -> float | None:
        with tempfile.TemporaryDirectory() as folder, plugged(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "RolloutFunction", lambda env, **settings: Played(met))
            trace = traced(Path(folder), solving())
        assert (trace.ok, bool(trace.errors)) == (met.scored, not met.scored)
        return trace.rewards["environment"].score if trace.rewards else None

    return [rewarded(good), rewarded(other)]


def nemo_gym(good: Trajectory, other: Trajectory) -> list[float | None]:
    """NeMo Gym: `mask_sample`, and the rollout is in no metric."""
    pytest.importorskip("nemo_gym", reason="the package nemo-gym is not installed (make faces)")
    from nemo_gym.base_resources_server import AggregateMetricsRequest

    from palaestra_integrations.nemo_gym import EnvironmentRunRequest
    from test_nemo_gym import ROW, agent

    async def main() -> list[float | None]:
        made, rewards = agent("http://model:1", {}), []
        rows = []
        for met in (good, other):
            made._rollout = Played(met)
            row = await made.run(EnvironmentRunRequest.model_validate(ROW))
            assert (row.mask_sample, bool(row.failure_kind)) == (not met.scored, not met.scored)
            rows.append(row.model_dump() | {"_ng_task_index": 0, "_ng_rollout_index": len(rows)})
            rewards.append(None if row.mask_sample else row.reward)
        metrics = await made.aggregate_metrics(AggregateMetricsRequest(verify_responses=rows))
        assert metrics.agent_metrics["mean/reward"] == 1.0
        return rewards

    return asyncio.run(main())


def verl(good: Trajectory, other: Trajectory) -> list[float | None]:
    """verl: a mask of zeros, which `grpo_scored` leaves out of the mean of the group."""
    pytest.importorskip("verl", reason="the package verl is not installed (make faces)")
    import numpy as np
    import torch

    from palaestra_integrations.verl import grpo_scored
    from test_verl import environment_loop

    with tempfile.TemporaryDirectory() as folder:
        loop = environment_loop(Path(folder))
        outputs = [loop._output(group(each)) for each in (good, other)]
    assert any(outputs[1].response_mask) == other.scored
    longest = max(len(output.response_mask) for output in outputs)
    mask = torch.tensor([[*output.response_mask, *[0] * (longest - len(output.response_mask))] for output in outputs])
    rewards = torch.zeros(mask.shape)
    rewards[:, -1] = torch.tensor([output.reward_score for output in outputs])
    settings = {"norm_adv_by_std_in_grpo": False}
    advantages, _ = grpo_scored(rewards, mask, np.array(["a", "a"], dtype=object), config=settings)
    assert not advantages[1].any()
    return [outputs[0].reward_score, outputs[1].reward_score if any(outputs[1].response_mask) else None]


def slime(good: Trajectory, other: Trajectory) -> list[float | None]:
    """slime: `ABORTED`, `remove_sample` and no reward; the filter leaves the group out."""
    pytest.importorskip("slime.utils.types", reason="slime is not on the path (make faces SLIME=FOLDER)")
    from argparse import Namespace

    from slime.utils.types import Sample

    from palaestra_integrations import slime as adapter
    from test_slime import SAMPLING

    def sampled(met: Trajectory) -> Sample:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "RolloutFunction", lambda env, **settings: Played(met))
            generate = adapter.custom_generate(fix_calc)
            args = Namespace(sglang_router_ip="x", sglang_router_port=1, hf_checkpoint="x")
            return asyncio.run(generate(args, Sample(index=7, metadata={"task_id": "calc"}), dict(SAMPLING)))

    samples = [sampled(good), sampled(other)]
    assert samples[1].remove_sample == (not other.scored)
    assert (samples[1].status is Sample.Status.ABORTED) == (not other.scored)
    assert adapter.keep_scored(None, samples) == other.scored
    return [sample.reward for sample in samples]


def rllm(good: Trajectory, other: Trajectory) -> list[float | None]:
    """rLLM: the flow raises; a remote result is not finished, and `mask_error` leaves it out."""
    pytest.importorskip("rllm.types", reason="rLLM is not on the path (make faces RLLM=FOLDER)")
    from rllm.engine.remote_runtime.protocol import TaskSubmission
    from rllm.trainer.algorithms.config import CompactFilteringConfig
    from rllm.types import AgentConfig

    from palaestra_integrations.blame import Dropped
    from palaestra_integrations.rllm import EnvironmentFlow, EnvironmentRuntime

    async def rewarded(met: Trajectory) -> float | None:
        flow, runtime = EnvironmentFlow(fix_calc), EnvironmentRuntime(fix_calc)
        flow._rollout = runtime._rollout = Played(met)
        (result,) = await runtime.execute_tasks([TaskSubmission({"task_id": "calc"}, "s", "calc", "http://model")])
        filtering = CompactFilteringConfig(enable=True, mask_error=True)
        assert (result.finished, filtering.should_mask(result.termination_reason)) == (met.scored, not met.scored)
        try:
            config = AgentConfig(base_url="http://model", model="m", session_uid="calc:0")
            episode = await flow.arun({"task_id": "calc"}, config)
        except Dropped:
            return result.reward
        assert episode.trajectories[0].reward == result.reward
        return result.reward

    return [asyncio.run(rewarded(each)) for each in (good, other)]


def tinker_cookbook(good: Trajectory, other: Trajectory) -> list[float | None]:
    """The Tinker cookbook: a `RolloutError` in place of a trajectory."""
    pytest.importorskip("tinker_cookbook", reason="the package tinker-cookbook is not installed (make test-torch)")
    from palaestra_integrations.tinker import EnvGroupBuilder, RolloutStrategy

    class Builder(EnvGroupBuilder):
        async def roll_out(self, *asked: JSON, **settings: JSON) -> Group:
            return group(good, other)

    result = asyncio.run(RolloutStrategy().execute(Builder(fix_calc, "calc", "m", 2), None))
    rewards = [sum(step.reward for step in each.transitions) for each in result.trajectories]
    assert (len(rewards), len(result.errors)) == (1 + other.scored, 1 - other.scored)
    return [*rewards, *([None] * len(result.errors))]


Face = Callable[[Trajectory, Trajectory], list[float | None]]
TRAINERS: Mapping[str, Face] = {
    "atropos": atropos,
    "trainers": trainers,
    "trl": trl_rows,
    "openenv": openenv,
    "areal": areal,
    "agent_lightning": agent_lightning,
    "verifiers": verifiers,
    "nemo_gym": nemo_gym,
    "verl": verl,
    "slime": slime,
    "rllm": rllm,
    "tinker_cookbook": tinker_cookbook,
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
