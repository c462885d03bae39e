"""verl's agent loop: exactly the sampled tokens in its own output, and unscored rollouts outside its advantages."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="the package verl is not installed (make faces)")

import bug_fixing
import numpy as np
import torch
from bug_fixing import TOKENIZER, Fixer
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from palaestra_integrations.verl import EnvironmentLoop, grpo_scored
from palaestra_slots.core.errors import ConfigError
from rollout_servers import toy_folder

pytestmark = pytest.mark.slots


class Client:
    """verl's client of its model servers, over a toy engine."""

    def __init__(self, *, logprobs: bool = True) -> None:
        self.engine, self.logprobs = Fixer(), logprobs
        self.seen: list[tuple[str, dict[str, Any]]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        self.seen.append((request_id, sampling_params))
        sampled = await self.engine.generate(prompt_ids, sampling_params)
        given = sampled.logprobs if self.logprobs else None
        return TokenOutput(
            token_ids=sampled.ids, log_probs=given, stop_reason="completed", extra_fields={"global_steps": 3}
        )


def environment_loop(tmp_path: Path, client: Client | None = None) -> EnvironmentLoop:
    rollout = {"prompt_length": 8192, "response_length": 2048}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    return EnvironmentLoop(
        DictConfigWrap(config),
        client or Client(),
        AutoTokenizer.from_pretrained(toy_folder(tmp_path), use_fast=True),
        None,
        None,
        DictConfigWrap(config.data),
        env=f"{bug_fixing.__file__}:fix_calc",
        settings={"folder": str(tmp_path), "infra_retries": 0, "tool_parser": "hermes"},
    )


def looped(tmp_path: Path, client: Client, *, task: str = "calc") -> AgentLoopOutput:
    async def main() -> AgentLoopOutput:
        loop = environment_loop(tmp_path, client)
        asked = {"temperature": 0.7, "top_p": 1.0, "logprobs": False}
        try:
            return await loop.run(asked, task_id=task, raw_prompt=[])
        finally:
            await (await loop._session()).__aexit__(None, None, None)

    return asyncio.run(main())


def test_the_output_has_every_sampled_token_once(tmp_path: Path) -> None:
    client = Client()
    output = looped(tmp_path, client)
    assert (output.reward_score, output.num_turns) == (1.0, 2)
    assert sum(output.response_mask) == client.engine.sampled
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
    assert all(logprob < 0 for logprob, on in zip(output.response_logprobs, output.response_mask, strict=True) if on)
    (name,) = {name for name, _ in client.seen}
    assert name
    assert {(asked["temperature"], asked["logprobs"]) for _, asked in client.seen} == {(0.7, True)}
    assert set(output.as_dict()) >= {"prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"}
    assert TOKENIZER.decode(output.prompt_ids).startswith("<|im_start|>system")


def test_an_unscored_rollout_is_masked_and_outside_the_mean_of_its_group(tmp_path: Path) -> None:
    dropped = looped(tmp_path, Client(logprobs=False))
    assert (dropped.response_mask, dropped.reward_score) == ([0], 0.0)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    groups = np.array(["a", "a", "a"], dtype=object)
    advantages, _ = grpo_scored(rewards, mask, groups, config={"norm_adv_by_std_in_grpo": False})
    assert torch.allclose(advantages, torch.tensor([[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]))


def test_a_row_without_a_task_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task_id"):
        looped(tmp_path, Client(), task="")


def test_verl_finds_the_advantage_estimator() -> None:
    code = "from verl.trainer.ppo.core_algos import get_adv_estimator_fn as find; print(find('grpo_scored').__module__)"
    environ = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "palaestra_integrations.verl"}
    found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert found.stdout.strip().endswith("palaestra_integrations.verl"), found.stderr[-2000:]
