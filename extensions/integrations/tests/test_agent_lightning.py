"""Agent-Lightning's own server gives rollouts to our controller, and to its own with our agent class."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentlightning", reason="the package agentlightning is not installed (make faces)")

import aiohttp
import bug_fixing
import uvicorn
from agentlightning.client import AgentLightningAsyncClient
from agentlightning.controller.local_reconciler import LocalReconciler
from agentlightning.server.app import create_app
from agentlightning.server.routes import models, rollouts
from omegaconf import OmegaConf

from palaestra_integrations.agent_lightning import Agent, Controller
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion
from rollout_servers import CALL, refusing

pytestmark = pytest.mark.slots
KEY = "secret"
ENV = f"{bug_fixing.__file__}:fix_calc"


class FixCalc(Agent):
    env = ENV
    settings = {"infra_retries": 0, "folder": "."}  # noqa: RUF012


def solving() -> LoopbackServer:
    """As vLLM answers, with token ids and log-probabilities."""
    replies = []
    for number, given in enumerate(((None, "tool_calls", {"tool_calls": [CALL]}), ("Done", "stop", {}))):
        content, finish, message = given
        reply = {**completion(content, finish, **message), "prompt_token_ids": list(range(10 + number))}
        reply["choices"][0] |= {
            "token_ids": [1, 2, 3],
            "logprobs": {"content": [{"token": "a", "logprob": -0.1 * place} for place in (1, 2, 3)]},
        }
        replies.append(FakeAnswer(reply))
    return LoopbackServer(*replies)


@asynccontextmanager
async def served(model: LoopbackServer, **rollout: Any) -> AsyncIterator[tuple[str, aiohttp.ClientSession, str]]:
    """The server's address, a client, and the id of its one rollout."""
    proxy = {"model_name": "m", "train": {"temperature": 1}, "val": {"temperature": 0}}
    config = uvicorn.Config(create_app({"key": KEY, "default_proxy": proxy}), port=0, log_level="warning")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    headers = {"Authorization": f"Bearer {KEY}"}
    async with model, aiohttp.ClientSession(url, headers=headers, raise_for_status=True) as client:
        await client.post("/api/models", json=[{"model": "m", "endpoint": f"{model.url}/v1", "version": 1}])
        made = await client.post("/api/rollouts", json=[{"input": {"task_id": "calc"}, "rollout_id": "r1", **rollout}])
        assert (await made.json())[0]["rollout_id"] == "r1"
        yield url, client, "r1"
    server.should_exit = True
    await running
    rollouts._rollouts.clear()
    models._models.clear()


async def ended(client: aiohttp.ClientSession) -> tuple[dict[str, Any], list[dict[str, Any]], list[Any]]:
    """The status of the rollout, its rewards, and its triplets."""
    status = (await (await client.get("/api/rollouts/r1")).json())["rollout"]["status"]
    rewards = await (await client.get("/api/rollouts/r1/events?event_type=reward")).json()
    triplets = await (await client.get("/api/rollouts/r1/events?format=triplet")).json()
    return status, rewards, triplets


def controlled(tmp_path: Path, model: LoopbackServer, **rollout: Any) -> Any:
    async def main() -> Any:
        async with served(model, **rollout) as (url, client, _):
            settings = {"folder": tmp_path, "infra_retries": 0}
            async with Controller(ENV, url, KEY, **settings) as controller:
                await controller.play_queued()
                await controller.play_queued()  # begins nothing again
            return await ended(client)

    return asyncio.run(main())


def test_our_controller_plays_a_queued_rollout(tmp_path: Path) -> None:
    status, (reward,), triplets = controlled(tmp_path, solving())
    assert (status["state"], reward["data"]["value"]) == ("succeeded", 1.0)
    told = str(triplets)
    assert "[1, 2, 3]" in told
    assert "-0.2" in told


def test_an_unscored_rollout_fails_without_a_reward(tmp_path: Path) -> None:
    status, rewards, _ = controlled(tmp_path, refusing())
    assert (status["state"], rewards) == ("failed", [])
    assert "api_error/engine" in status["error_message"]


def test_an_unknown_task_fails(tmp_path: Path) -> None:
    status, rewards, _ = controlled(tmp_path, solving(), input="calk")
    assert (status["state"], rewards) == ("failed", [])
    assert "calk" in status["error_message"]


@pytest.mark.parametrize(("model", "state", "value"), [(solving, "succeeded", [1.0]), (refusing, "failed", [])])
def test_its_own_controller_runs_our_agent_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, state: str, value: list[float]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    local = {"agent_class": f"{__name__}:FixCalc", "env_map": {"PALAESTRA_TASK": "input.task_id"}}

    async def main() -> Any:
        async with served(model(), config={"local": local}) as (url, client, _):
            runner = {"maximum_size": 1, "poll_interval": 0.2}
            config = OmegaConf.create(
                {"runner_type": "local", "local_runner": runner, "agl_server": {"url": url, "key": KEY}}
            )
            async with AgentLightningAsyncClient(base_url=url, key=KEY) as api:
                reconciler = LocalReconciler(api, config)
                running = asyncio.create_task(reconciler.run())
                while (await ended(client))[0]["state"] in ("queuing", "running"):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                reconciler.stop()
                await running
            return await ended(client)

    status, rewards, _ = asyncio.run(main())
    assert (status["state"], [each["data"]["value"] for each in rewards]) == (state, value)
