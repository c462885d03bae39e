"""A supervised step of a real trainer is a step on the cross entropy, in one pass or in many."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import palaestra
from palaestra import ConfigError
from palaestra_tokens.config import APIServerConfig
from palaestra_train.pass_memory import GIB, PassMemory
from palaestra_train.trainer import TrainedRow, sequence_row
from palaestra_train.warm_start import CrossEntropy

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra 'trl': make test-torch")
needs_tinker = pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("tinker", "peft")), reason="needs the extra 'tinker': make test-torch"
)
RATE = 1e-3


def demonstrations() -> list[TrainedRow]:
    """Rows of different lengths, some with tokens between the trained ones that the environment wrote."""
    rng, rows = random.Random(5), []
    for number, (before, after) in enumerate([(12, 30), (40, 5), (3, 17), (20, 20), (7, 1)]):
        tokens = [rng.randrange(100, 1000) for _ in range(before + after)]
        masks = [-100] * before + [token if rng.random() < 0.8 else -100 for token in tokens[before:]]
        masks[-1] = tokens[-1]
        row = sequence_row(tokens, masks, [0.0] * len(tokens), None, f"demonstration-{number}/0", ())
        assert row is not None
        rows.append(TrainedRow(row, 1.0))
    return rows


@needs_tinker
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["supervised", "sampled", "corrected", "rows left out", "advantages dealt anew"])
async def test_one_pass_or_two_take_the_same_step(tmp_path: Path, kind: str) -> None:
    """A local server's trainer takes the gradient of a step from the pass that compares log-probabilities. The same
    server, named by its address, is trained in two passes."""
    from palaestra_tokens.testing.tiny_model import make_tiny
    from palaestra_train.tinker_client import TinkerTrainer

    folder = tmp_path / "tiny"
    make_tiny(folder, seed=1, hidden=64, layers=2)
    served, config = APIServerConfig(model_name=str(folder)), palaestra.TrainingConfig(learning_rate=RATE)
    rng, rows = random.Random(7), [replace(row, advantage=1.0 - number) for number, row in enumerate(demonstrations())]

    def weigh(given: Sequence[TrainedRow], own: Sequence[Sequence[float]]) -> Sequence[TrainedRow]:
        if kind == "supervised":
            return CrossEntropy().weigh(given, own)
        made = [
            replace(row, own=list(line), weights=list(map(float, row.row.mask)))
            for row, line in zip(given, own, strict=True)
        ]
        if kind == "corrected":
            return [replace(row, weights=[on * rng.choice([1.0, 2.0, 0.4, 0.0]) for on in row.weights]) for row in made]
        if kind == "advantages dealt anew":
            return [replace(row, advantage=-2 * row.advantage + 0.5) for row in made]
        return made[:1] + made[3:] if kind == "rows left out" else made

    async def learned(trainer: TinkerTrainer) -> tuple[list[list[float]], list[list[float]], float]:
        before = await trainer._completion_logprobs(rows, None)
        losses = [(await trainer.step(rows, str(number), weigh))["loss"] for number in (1, 2)]
        return before, await trainer._completion_logprobs(rows, None), losses[0]

    one = TinkerTrainer(served, config, local=tmp_path / "states", seed=3)
    await one.open()
    two = TinkerTrainer(served, config, url=one._url, seed=3)
    await two.open()
    try:
        state = rng.getstate()
        before, after, loss = await learned(one)
        rng.setstate(state)
        before_too, after_too, loss_too = await learned(two)
    finally:
        await two.aclose()
        await one.aclose()
    assert before == before_too
    assert loss == pytest.approx(loss_too, rel=1e-5)
    moved = max(abs(a - b) for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))
    apart = max(
        abs(a - b) for mine, other in zip(after, after_too, strict=True) for a, b in zip(mine, other, strict=True)
    )
    assert moved > 1e-3
    assert apart < moved / 50, (apart, moved)


@needs_trl
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", ["importance_sampling", "dapo"])
@pytest.mark.parametrize("pass_memory", [None, 1e-6])
async def test_a_supervised_step_is_a_step_on_the_cross_entropy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pass_memory: float | None, loss: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from palaestra_tokens.testing.tiny_model import make_tiny
    from palaestra_train.trl import TrlTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    folder = tmp_path / "tiny"
    make_tiny(folder, seed=1, hidden=64, layers=2)
    config = palaestra.TrainingConfig(
        groups=5, learning_rate=RATE, warm_start="oracle", pass_memory=pass_memory, loss=loss
    )
    rows = demonstrations()
    trainer = TrlTrainer(APIServerConfig(model_name=str(folder)), config, rollouts=20, temperature=1.0)
    await trainer.open()
    try:
        learned = CrossEntropy()
        await trainer.step(rows, "1", learned.weigh)
        weights = {name: each.detach().clone() for name, each in trainer._trl.model.state_dict().items()}
    finally:
        await trainer.aclose()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    summed, count = torch.zeros(()), 0
    for row in rows:
        ids, start = torch.tensor([row.tokens]), len(row.row.prompt_ids)
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[start - 1 :, 0]
        mask = torch.tensor(row.row.mask)
        summed, count = summed - (logprobs * mask).sum(), count + int(mask.sum())
    assert learned.nats == pytest.approx(float(summed) / count, rel=1e-4)
    (summed / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0).step()
    for name, mine in model.state_dict().items():
        # AdamW's first step divides a gradient by its size, so only gradients near 0 may go the other way.
        assert (weights[name] - mine).abs().gt(RATE / 10).float().mean() < 0.01, name


@pytest.mark.parametrize(
    ("most_gib", "expected"),
    [(1.0, [[1, 3, 0, 2]]), (0.05, [[1], [3, 0, 2]]), (1e-9, [[1], [3], [0], [2]])],
)
def test_passes_hold_as_many_rows_as_their_memory_allows(most_gib: float, expected: list[list[int]]) -> None:
    memory = PassMemory(token_bytes=100_000.0, most_bytes=most_gib * GIB, free_bytes=8 * GIB)
    assert list(memory.passes([100, 400, 90, 110])) == expected
    assert list(memory.passes([])) == []


@pytest.mark.parametrize(
    ("shared", "rows"),
    [(0, 53), (100, 39), (1000, 3), (1500, 4), (3000, 0)],
    ids=["nothing in common", "short", "long", "half of the free memory", "too long"],
)
def test_rows_beside_a_common_beginning(shared: int, rows: int) -> None:
    memory = PassMemory(
        token_bytes=2e6, most_bytes=GIB, free_bytes=8 * GIB, sharing_bytes=2 * GIB, shared_token_bytes=1.6e6,
        repeated_token_bytes=1e5, most_sharing_bytes=3 * GIB,
    )  # fmt: skip
    assert memory.rows_beside(shared, 20) == rows


def test_a_row_that_cannot_be_trained_is_refused_before_the_memory_is_full() -> None:
    memory = PassMemory(token_bytes=2e6, most_bytes=GIB, free_bytes=0.5 * GIB)
    with pytest.raises(ConfigError, match=r"400 tokens .*0\.7 GiB.*--trainer tinker"):
        list(memory.passes([10, 400]))
