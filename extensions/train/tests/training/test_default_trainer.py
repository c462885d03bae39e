"""Which trainer is the default, on this machine with what it has."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_tokens.config import APIServerConfig
from palaestra_train.config import TrainingConfig
from palaestra_train.train_run import make_trainer

HAS_BOTH = all(map(importlib.util.find_spec, ("peft", "tinker", "torch", "trl")))


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@pytest.mark.torch
@pytest.mark.skipif(not HAS_BOTH, reason="needs the extras 'trl' and 'tinker': make test-torch")
@pytest.mark.parametrize(
    ("given", "server", "temperature", "key", "expected"),
    [
        (None, "openai", 1.0, None, "tinker"),
        ("trl", "openai", 1.0, None, "trl"),
        (None, "vllm", 1.0, None, "trl"),
        (None, "sglang", 1.0, None, "trl"),
        (None, "openai", 0.7, None, "trl"),
        (None, "openai", 1.0, "tml-paid", "trl"),  # the service costs money
    ],
)
def test_without_a_gpu_the_default_is_an_adapter_on_this_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: Any,
    server: Any,
    temperature: float,
    key: str | None,
    expected: str,
) -> None:
    if key is None:
        monkeypatch.delenv("TINKER_API_KEY", raising=False)
    else:
        monkeypatch.setenv("TINKER_API_KEY", key)
    config = APIServerConfig(model_name="Qwen/Qwen3-0.6B", server_type=server)
    parsed: Any = SimpleNamespace(
        env_config=HermesAgentEnvConfig(agent_temperature=temperature), server_configs=[config]
    )
    chosen = make_trainer(given, parsed, TrainingConfig(), None, tmp_path)
    asyncio.run(chosen.aclose())
    assert chosen.name == ("trl" if has_gpu() else expected)


def test_an_address_chooses_tinker(tmp_path: Path) -> None:
    config = APIServerConfig(model_name="Qwen/Qwen3-0.6B")
    parsed: Any = SimpleNamespace(env_config=HermesAgentEnvConfig(), server_configs=[config])
    assert make_trainer(None, parsed, TrainingConfig(), "http://127.0.0.1:1", tmp_path).name == "tinker"
