"""A training run ends if the server that samples has not taken the new weights."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import palaestra
from palaestra_slots import TrainerError
from palaestra_slots.core.errors import EngineRefused
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.serving.model_server import ModelServer
from palaestra_train.trainer import TrainedRow, sequence_row
from palaestra_train.warm_start import CrossEntropy

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra 'trl': make test-torch"),
]


def rows() -> list[TrainedRow]:
    """Two rows of which one is better."""
    made = []
    for place, advantage in enumerate((1.0, -1.0)):
        tokens = [100 + place, *range(200, 220)]
        row = sequence_row(tokens, [-100] * 5 + tokens[5:], [-5.0] * len(tokens), None, f"row-0/{place}", ())
        assert row is not None
        made.append(TrainedRow(row, advantage))
    return made


def keeping_the_head(engine: Any) -> Any:
    """Return a `load_weights` that leaves the old output layer in place, as vLLM does on a CPU."""
    import torch

    async def load(folder: str, version: str) -> None:
        model = engine.model
        old = model.get_output_embeddings().weight.detach().clone()
        await engine.load_weights(folder, version)
        model.lm_head.weight = torch.nn.Parameter(old)

    return load


@pytest.mark.parametrize("kind", ["right", "keeps the head", "loads nothing"])
@pytest.mark.parametrize("rate", [1e-2, 1e-4])
def test_a_server_with_old_weights_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rate: float
) -> None:
    from palaestra_tokens.engines.transformers import TransformersEngine
    from palaestra_tokens.testing.tiny_model import make_tiny
    from palaestra_train.trl import TrlTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    folder = tmp_path / "tiny"
    make_tiny(folder, seed=1, hidden=64, layers=2)

    async def steps() -> int:
        engine = TransformersEngine(APIServerConfig(model_name=str(folder)), dtype="float32", seed=0)
        await engine.start()

        async def nothing(folder: str, version: str) -> None:
            pass

        kept = keeping_the_head(engine)
        loads = {"right": engine.load_weights, "keeps the head": kept, "loads nothing": nothing}
        async with ModelServer(engine, load=loads[kind]) as server:
            served = APIServerConfig(model_name=str(folder), server_type="sglang", base_url=server.url)
            config = palaestra.TrainingConfig(learning_rate=rate)
            trainer = TrlTrainer(served, config, rollouts=4, temperature=1.0)
            await trainer.open()
            try:
                for number in range(1, 4):
                    await trainer.step(rows(), str(number), CrossEntropy().weigh)
                return number
            finally:
                await trainer.engine.aclose()
                await trainer.aclose()
                await engine.aclose()

    if kind == "right":
        assert asyncio.run(steps()) == 3
    else:
        with pytest.raises(TrainerError, match=r"version [12],.* still uses weights of an earlier step"):
            asyncio.run(steps())


async def test_a_folder_that_the_server_cannot_read_is_named(tmp_path: Path) -> None:
    from palaestra_tokens.engines.token_engine import SGLangEngine
    from palaestra_tokens.engines.transformers import TransformersEngine
    from palaestra_tokens.testing.tiny_model import make_tiny

    folder = tmp_path / "tiny"
    make_tiny(folder, seed=1, hidden=64, layers=2)

    async def load() -> None:
        engine = TransformersEngine(APIServerConfig(model_name=str(folder)), seed=0)
        await engine.start()
        async with ModelServer(engine, load=engine.load_weights) as server:
            client = SGLangEngine(APIServerConfig(model_name=str(folder), base_url=server.url))
            try:
                await client.load_weights(str(tmp_path / "elsewhere"), "1")
            finally:
                await client.aclose()
                await engine.aclose()

    with pytest.raises(EngineRefused, match="elsewhere"):
        await load()
