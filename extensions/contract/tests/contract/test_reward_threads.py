"""Reward hooks that make tool calls in threads or loops of their own, and hooks that are async where they are usually
plain."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from palaestra_contract import HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext
from palaestra_slots.core import sync_bridge
from palaestra_slots.core.types import JSON
from palaestra_tokens import APIServerConfig

pytestmark = pytest.mark.slots


def pool(ctx: ToolContext) -> Any:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda command: ctx.terminal(command)["output"], ["cat out.txt", "echo b"]))


def bare_thread(ctx: ToolContext) -> Any:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(ctx.terminal("cat out.txt")["output"]))
    thread.start()
    thread.join()
    return [*found, ctx.terminal("echo b")["output"]]


def own_loop(ctx: ToolContext) -> Any:
    async def both() -> Any:
        first, second = await asyncio.gather(ctx.terminal_async("cat out.txt"), ctx.terminal_async("echo b"))
        return [first["output"], second["output"]]

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: asyncio.run(both())).result()


async def pool_then_await(ctx: ToolContext) -> Any:
    first, _ = pool(ctx)
    return [first, (await ctx.terminal_async("echo b"))["output"]]


async def await_then_pool(ctx: ToolContext) -> Any:
    second = (await ctx.terminal_async("echo b"))["output"]
    return [pool(ctx)[0], second]


async def to_thread(ctx: ToolContext) -> Any:
    return await asyncio.to_thread(pool, ctx)


async def plain_calls(ctx: ToolContext) -> Any:
    return [ctx.terminal("cat out.txt")["output"], ctx.terminal("echo b")["output"]]


class Base(HermesAgentBaseEnv):
    check: Any = None

    async def setup(self) -> None: ...

    async def get_next_item(self) -> JSON:
        return {"id": "a", "solution": "echo A > out.txt"}

    def format_prompt(self, item: JSON) -> str:
        return "Write A"

    async def compute_reward(self, item: JSON, result: JSON, ctx: ToolContext) -> float:
        answer = self.check(ctx)
        return float((await answer if asyncio.iscoroutine(answer) else answer) == ["A\n", "b\n"])

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON: ...


class Plain(Base):
    def compute_reward(self, item: JSON, result: JSON, ctx: ToolContext) -> float:  # type: ignore[override]
        return float(self.check(ctx) == ["A\n", "b\n"])


class AsyncPrompt(Base):
    async def format_prompt(self, item: JSON) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return "Write A"

    async def compute_reward(self, item: JSON, result: JSON, ctx: ToolContext) -> float:
        return float(result.messages[0]["content"] == "Write A")


class AsyncMessages(AsyncPrompt):
    async def format_prompt(self, item: JSON) -> Any:
        return [{"role": "user", "content": "Write A"}]


def reward(kind: type[Base], check: Any = None) -> float:
    async def main() -> float:
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"])
        env = kind(config, [APIServerConfig(server_type="scripted", model_name="oracle")])
        env.check = check
        await env.setup()
        row, _ = await env.collect_trajectory(await env.get_next_item())
        assert row is not None
        return row["scores"]

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [Base, Plain])
@pytest.mark.parametrize("check", [pool, bare_thread, own_loop])
def test_a_reward_may_wait_for_its_own_threads(check: Any, kind: type[Base], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_bridge, "BLOCKED_S", 1.0)
    monkeypatch.setattr(sync_bridge, "_blocking", set())
    assert reward(kind, check) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("check", [pool_then_await, await_then_pool, to_thread, plain_calls])
def test_an_async_reward_mixes_awaits_and_threads(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_bridge, "BLOCKED_S", 1.0)
    monkeypatch.setattr(sync_bridge, "_blocking", set())
    assert reward(Base, check) == 1.0


@pytest.mark.parametrize("kind", [AsyncPrompt, AsyncMessages])
def test_a_prompt_may_be_async(kind: type[Base]) -> None:
    assert reward(kind) == 1.0
