"""Instances that a program makes and calls itself, as the unit tests of existing environments do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from palaestra import AgentResult, ToolCall
from palaestra_contract import (
    AgentEnv,
    AgentEnvConfig,
    BaseEnv,
    BaseEnvConfig,
    HermesAgentBaseEnv,
    HermesAgentEnvConfig,
    ScoredDataItem,
    ToolContext,
)
from palaestra_contract.exec_tool import ExecTool
from palaestra_slots.core.types import JSON
from palaestra_tokens import APIServerConfig

pytestmark = pytest.mark.slots

ORACLE = APIServerConfig(server_type="scripted", model_name="oracle")
NOOP = APIServerConfig(server_type="scripted", model_name="noop")


class Words(HermesAgentBaseEnv):
    name = "words"
    setups = 0

    async def setup(self) -> None:
        self.setups += 1
        self.left = ["a", "b"]

    async def get_next_item(self) -> JSON:
        word = self.left.pop(0) if self.left else None
        return word and {"id": word, "word": word, "solution": f"echo {word} > word.txt; grep -c : /proc/net/dev > n"}

    def format_prompt(self, item: JSON) -> str:
        return f"Write {item['word']} to word.txt"

    async def compute_reward(self, item: JSON, result: AgentResult, ctx: ToolContext) -> float:
        self.interfaces = ctx.terminal("cat n")["output"].strip()
        return float(ctx.terminal("cat word.txt")["output"].strip() == item["word"])

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        done = await self.evaluate_items(
            [{"id": word, "word": word, "solution": f"echo {word} > word.txt"} for word in "xy"]
        )
        return {"reward": [each.reward for each in done]}


class Collecting(Words):
    async def collect_trajectory(self, item: JSON) -> tuple[ScoredDataItem | None, list[JSON]]:
        row, later = await super().collect_trajectory(item)
        assert row is not None
        row["scores"] += 1
        return row, later


class Broken(Words):
    async def compute_reward(self, item: JSON, result: AgentResult, ctx: ToolContext) -> float:
        raise ValueError("no")


class Managed(Words):
    managed = 0

    async def process_manager(self) -> None:
        self.managed += 1
        await super().process_manager()


class Texts(AgentEnv[AgentEnvConfig]):
    name = "texts"
    setups = 0

    async def setup_agent_env(self) -> None:
        self.setups += 1
        self.left = ["a", "b"]

    async def get_next_item(self) -> JSON:
        word = self.left.pop(0) if self.left else None
        return word and {"id": word, "word": word, "solution": f"echo {word} > word.txt"}

    def build_task(self, item: JSON) -> str:
        return f"Write {item['word']} to word.txt"

    async def score_trajectory(self, item: JSON, final_response: str) -> float:
        raise AssertionError("the verification replaces this")

    async def verify_and_score_trajectory(  # type: ignore[override]  # a shape that existing environments use
        self, item: JSON, final_response: str, *, trajectory_id: str, exec_tool: ExecTool, **more: JSON
    ) -> tuple[float, dict[str, JSON]]:
        done = await exec_tool(ToolCall("bash", {"command": "cat word.txt"}))
        return float(done.output.strip() == item["word"]), {}


class Rows(BaseEnv):
    name = "rows"
    setups = 0

    async def setup(self) -> None:
        self.setups += 1
        self.left = ["a"]

    async def get_next_item(self) -> JSON:
        return self.left.pop() if self.left else None

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        return {}

    async def collect_trajectory(self, item: JSON) -> tuple[ScoredDataItem | None, list[JSON]]:
        done = await self.server.chat_completion(messages=[{"role": "user", "content": item}])
        return ScoredDataItem(tokens=[1], masks=[1], scores=float(bool(done.choices))), []


async def one(env: JSON) -> list[float]:
    row, later = await env.collect_trajectory(await env.get_next_item())
    assert later == []
    return [row["scores"]]


async def two_at_a_time(env: JSON) -> list[float]:
    items = [await env.get_next_item(), await env.get_next_item()]
    done = await asyncio.gather(*(env.collect_trajectory(item) for item in items))
    return [row["scores"] for row, _ in done]


async def one_after_the_other(env: JSON) -> list[float]:
    return [*await one(env), *await one(env)]


async def a_group(env: JSON) -> list[float]:
    group, _ = await env.collect_trajectories(await env.get_next_item())
    scores: list[float] = group["scores"]
    return scores


async def an_evaluation(env: JSON) -> list[float]:
    scores: list[float] = (await env.evaluate())["reward"]
    return scores


async def a_reply(env: JSON) -> list[float]:
    done = await env.server.chat_completion(messages=[{"role": "user", "content": "hi"}])
    return [float(len(done.choices))]


async def an_agent(env: JSON) -> list[float]:
    said, debug = await env.run_agent("Say something")
    again, _ = await env.run_agent("Say something else")
    return [float(bool(said) and bool(again) and debug["success"])]


async def after_a_run(env: JSON) -> list[float]:
    await env.process_manager()
    assert len(list(Path("runs").glob("*/*/journal.jsonl"))) == 1
    env.left = ["z"]
    return await one(env)


CALLS: list[tuple[type[BaseEnv], Callable[[JSON], Awaitable[list[float]]], Sequence[float]]] = [
    (Words, one, [1.0]),
    (Words, two_at_a_time, [1.0, 1.0]),
    (Words, one_after_the_other, [1.0, 1.0]),
    (Words, a_group, [1.0, 1.0]),
    (Words, an_evaluation, [1.0, 1.0]),
    (Words, a_reply, [1.0]),
    (Words, after_a_run, [1.0]),
    (Collecting, one, [2.0]),
    (Collecting, a_group, [2.0, 2.0]),
    (Collecting, after_a_run, [2.0]),
    (Managed, after_a_run, [1.0]),
    (Texts, one, [1.0]),
    (Texts, two_at_a_time, [1.0, 1.0]),
    (Texts, a_group, [1.0, 1.0]),
    (Texts, an_agent, [1.0]),
    (Rows, one, [1.0]),
    (Rows, a_group, [1.0, 1.0]),
    (Rows, a_reply, [1.0]),
]


def instance(cls: type[BaseEnv], server: APIServerConfig = ORACLE, **settings: JSON) -> JSON:
    kinds = {Texts: AgentEnvConfig, Rows: BaseEnvConfig}
    kind = kinds.get(cls, HermesAgentEnvConfig)
    if kind is not BaseEnvConfig:
        settings.setdefault("enabled_toolsets", ["terminal"])
    config = kind(group_size=2, use_wandb=False, total_steps=1, ensure_scores_are_not_same=False, **settings)
    return cls(config, [server], slurm=False, testing=True)


@pytest.mark.parametrize(("cls", "call", "scores"), CALLS, ids=lambda each: getattr(each, "__name__", ""))
async def test_a_program_calls_an_instance(
    cls: type[BaseEnv],
    call: Callable[[JSON], Awaitable[list[float]]],
    scores: Sequence[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    env = instance(cls, NOOP if cls is Rows or call in (a_reply, an_agent) else ORACLE)
    await env.setup()
    assert await call(env) == scores
    assert env.setups == (2 if call is after_a_run else 1)  # as in the original, the manager calls it
    assert getattr(env, "managed", 1) == 1
    assert call is after_a_run or list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("allowed", "count"), [(True, "2"), (False, "1")])
async def test_the_settings_of_an_instance_hold(allowed: bool, count: str) -> None:
    env = instance(Words, allow_network=allowed)
    await env.setup()
    assert await one(env) == [1.0]
    assert env.interfaces == count


async def test_a_failed_rollout_has_no_row() -> None:
    env = instance(Broken)
    await env.setup()
    assert await env.collect_trajectory(await env.get_next_item()) == (None, [])
