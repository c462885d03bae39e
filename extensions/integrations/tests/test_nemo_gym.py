"""NeMo Gym's agent server: `/run` plays and grades, tokens are in its own items, and unscored rollouts are masked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym", reason="the package nemo-gym is not installed (make faces)")

import bug_fixing
from bug_fixing import TOKENIZER, Fixer
from httpx import ASGITransport, AsyncClient
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

from palaestra_integrations.nemo_gym import EnvironmentAgent, EnvironmentAgentConfig
from palaestra_tokens.serving.token_server import TokenLoopback
from rollout_servers import idle, refusing, solving, toy_folder

pytestmark = pytest.mark.slots
ENV = f"{bug_fixing.__file__}:fix_calc"
ROW = {"responses_create_params": {"input": [{"role": "user", "content": "Fix it."}]}, "task_id": "calc"}


def agent(url: str, settings: dict[str, Any], *, named: bool = False) -> EnvironmentAgent:
    host, port = url.removeprefix("http://").split(":")
    known = {"policy_model": {"responses_api_models": {"vllm_model": {"host": host, "port": int(port)}}}}
    reference = {"type": "responses_api_models", "name": "policy_model"}
    address: dict[str, Any] = {"model_server": reference} if named else {"model_base_url": f"{url}/v1"}
    own = {"host": "127.0.0.1", "port": 1, "entrypoint": "app.py", "name": "palaestra_agent"}
    return EnvironmentAgent(
        config=EnvironmentAgentConfig(**own, **address, env=ENV, settings={"infra_retries": 0, **settings}),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(known)
        ),
    )


def answers(tmp_path: Path, server: Any, *requests: tuple[str, Any], named: bool = False, **settings: Any) -> list[Any]:
    """The answers to requests in turn; a callable makes a body of the answers before."""

    async def main() -> list[Any]:
        async with server:
            made = agent(server.url, {"folder": str(tmp_path), **settings}, named=named)
            transport = ASGITransport(app=made.setup_webserver())
            got: list[Any] = []
            async with AsyncClient(transport=transport, base_url="http://agent", timeout=100) as client:
                for path, body in requests:
                    response = await client.post(path, json=body(got) if callable(body) else body)
                    got.append(response.json() | {"status": response.status_code})
            await made._rollout.aclose()
            return got

    return asyncio.run(main())


def test_run_plays_and_grades_and_verify_repeats_it(tmp_path: Path) -> None:
    verify = ("/verify", lambda got: {"rollout_id": got[0]["rollout_id"]})
    ran, verified, unknown = answers(
        tmp_path, solving(), ("/run", ROW), verify, ("/verify", {"rollout_id": "x"}), named=True
    )
    assert (ran["status"], ran["reward"], ran["mask_sample"], ran["task_id"]) == (200, 1.0, False, "calc")
    assert [item["type"] for item in ran["response"]["output"]] == ["function_call", "function_call_output", "message"]
    assert verified == ran
    assert unknown["status"] == 404


def test_the_output_has_every_sampled_token_once(tmp_path: Path) -> None:
    engine = Fixer()
    settings = {"server_type": "vllm", "tokenizer_name": str(toy_folder(tmp_path)), "tool_parser": "hermes"}
    (ran,) = answers(tmp_path, TokenLoopback(engine, TOKENIZER), ("/run", ROW), **settings)
    assert ran["reward"] == 1.0
    response = NeMoGymResponse.model_validate(ran["response"])
    trained = [item for item in response.output if getattr(item, "generation_token_ids", None)]
    assert len(trained) == 2
    assert sum(len(item.generation_token_ids) for item in trained) == engine.sampled
    assert all(len(item.generation_log_probs) == len(item.generation_token_ids) for item in trained)
    first, second = trained
    known = [*first.prompt_token_ids, *first.generation_token_ids]
    assert second.prompt_token_ids[: len(known)] == known


def test_an_unscored_rollout_is_masked_and_in_no_metric(tmp_path: Path) -> None:
    (ran,) = answers(tmp_path / "a", refusing(), ("/run", ROW))
    assert (ran["mask_sample"], ran["failure_kind"]) == (True, "api_error/engine")
    assert ran["failure_reason"]
    graded, metrics = answers(
        tmp_path / "b",
        idle(),
        ("/run", ROW),
        ("/aggregate_metrics", lambda got: {"verify_responses": [_row(got[0], 1.0), _row(ran, 0.0)]}),
    )
    assert graded["mask_sample"] is False
    assert metrics["agent_metrics"]["mean/reward"] == 1.0


def _row(answer: dict[str, Any], reward: float) -> dict[str, Any]:
    return {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": reward, "mask_sample": answer["mask_sample"]}


def test_requests_without_a_known_task_are_refused(tmp_path: Path) -> None:
    wrong = {**ROW, "task_id": "calk"}
    got = answers(tmp_path, solving(), ("/run", wrong), ("/v1/responses", ROW["responses_create_params"]))
    assert [each["status"] for each in got] == [422, 422]
    assert "calk" in got[0]["detail"]


def test_responses_are_those_of_the_task_in_the_metadata(tmp_path: Path) -> None:
    body = {**ROW["responses_create_params"], "metadata": {"task_id": "calc"}}
    (got,) = answers(tmp_path, idle(), ("/v1/responses", body))
    assert [item["type"] for item in got["output"]] == ["message"]
