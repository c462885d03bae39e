"""AReaL's agent: rewards as floats, and rollouts without a reward raise; with AReaL itself, its proxy workflow."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from bug_fixing import fix_calc

from palaestra_integrations.areal import Agent
from palaestra_integrations.blame import Dropped
from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer
from rollout_servers import idle, refusing, solving

pytestmark = pytest.mark.slots


def rewarded(tmp_path: Path, server: LoopbackServer) -> float:
    async def main() -> float:
        agent = Agent(fix_calc, folder=tmp_path, infra_retries=0)
        try:
            async with server:
                reward = await agent.run({"task_id": "calc"}, base_url=server.url, api_key="k", http_client=None)
                assert {seen.path for seen in server.seen} == {"/chat/completions"}
                assert {seen.headers["Authorization"] for seen in server.seen} == {"Bearer k"}
                return reward
        finally:
            await agent.aclose()

    return asyncio.run(main())


def test_the_reward_is_a_float_of_the_rollouts_own_model(tmp_path: Path) -> None:
    solved = rewarded(tmp_path / "a", solving())
    assert (solved, type(solved)) == (1.0, float)
    assert rewarded(tmp_path / "b", idle()) == 0.0


def test_a_failed_model_server_rejects_the_sample(tmp_path: Path) -> None:
    with pytest.raises(Dropped) as dropped:
        rewarded(tmp_path, refusing())
    assert dropped.value.kind == "api_error/engine"


def test_a_rollout_without_an_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inline"):
        asyncio.run(Agent(fix_calc, folder=tmp_path).run({"task_id": "calc"}))


class Proxy(LoopbackServer):
    """AReaL's proxy as its workflow calls it: sessions, rewards and the export beside chat completions."""

    def __init__(self, model: LoopbackServer) -> None:
        super().__init__(*model.answers)
        self.rewards: list[float] = []

    async def _answer(self, request):
        from aiohttp import web

        if request.path == "/rl/start_session":
            return web.json_response({"session_id": "s", "api_key": "session-key"})
        if request.path == "/rl/set_reward":
            self.rewards.append((await request.json())["reward"])
        if request.path != "/chat/completions":
            return web.json_response({"interactions": {}, "message": "ok", "interaction_count": 0})
        return await super()._answer(request)


def test_areals_own_workflow_sends_the_reward_or_rejects_the_sample(tmp_path: Path) -> None:
    workflow = pytest.importorskip(
        "areal.experimental.openai.proxy.workflow", reason="the package areal is not installed (make faces)"
    )

    async def played(folder: str, model: LoopbackServer) -> list[float]:
        agent = Agent(fix_calc, folder=tmp_path / folder, infra_retries=0)
        async with Proxy(model) as proxy:
            try:
                made = workflow.OpenAIProxyWorkflow("inline", agent=agent, proxy_addr=proxy.url)
                await made.arun_episode(None, {"task_id": "calc"})
            finally:
                await agent.aclose()
        return proxy.rewards

    assert asyncio.run(played("a", solving())) == [1.0]
    refused = LoopbackServer(FakeAnswer({"error": {"message": "wrong key"}}, status=401))
    with pytest.raises(Dropped):
        asyncio.run(played("b", refused))
