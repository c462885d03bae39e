"""Samplers have the adapter in their weights, where memory is large enough."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from palaestra_tokens.engines.sampling import Sampling

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the extra 'tinker': make test-torch"),
]

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]


def small_model(kind: str) -> Any:
    """A model with random weights: with an output layer that shares the embeddings, and with GPT-2's `Conv1D`."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    sizes = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True))


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def base(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    import torch

    from palaestra_train.tinker.model import BaseModel

    torch.manual_seed(1)
    folder: Path = tmp_path_factory.mktemp(request.param)
    small_model(request.param).save_pretrained(folder)
    return BaseModel(str(folder), device="cpu")


def trained(base: Any, seed: int) -> Any:
    """A model whose adapter is not 0."""
    import torch

    from palaestra_train.tinker.model import LoraSettings, TrainedModel

    model = TrainedModel(base, LoraSettings(4, seed=seed))
    with torch.no_grad():
        torch.manual_seed(seed)
        for tensor in model.trained().values():
            tensor.normal_(std=0.2)
    return model


def sampled(decoder: Any, tokens: int = 6) -> list[list[tuple[int, float]]]:
    decoder.admit(PROMPTS, [Sampling(seed=seed) for seed in range(len(PROMPTS))])
    steps = [decoder.step() for _ in range(tokens)]
    return [list(row) for row in zip(*steps, strict=True)]


def own_logprobs(model: Any, prompt: Sequence[int], row: Sequence[tuple[int, float]]) -> list[float]:
    """Those of the module that is trained, whose adapter is beside the weights."""
    import torch

    ids = [*prompt, *(token for token, _ in row)]
    with torch.no_grad():
        table = model.module(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(table[place - 1, ids[place]]) for place in range(len(prompt), len(ids))]


def test_a_sampler_samples_from_the_trained_model_and_changes_nothing_of_it(base: Any) -> None:
    import torch

    from palaestra_train.tinker.model import Row, SamplingDecoder

    before = {name: tensor.clone() for name, tensor in base.module.named_parameters()}
    model, other = trained(base, 1), trained(base, 2)
    module = model.snapshot()
    decoder = SamplingDecoder(module, base)
    for each, owner in ((decoder, model), (SamplingDecoder(other.snapshot(), base), other), (decoder, model)):
        rows = sampled(each)
        assert each.model not in (module, owner.module)
        for prompt, row in zip(PROMPTS, rows, strict=True):
            assert [logprob for _, logprob in row] == pytest.approx(own_logprobs(owner, prompt, row), abs=2e-5)
        each.keep([])
    assert decoder.model is module, "an idle sampler holds no weights of its own"
    assert base._merged is not None
    row = Row([5, 6, 7], {"target_tokens": torch.tensor([6, 7, 8])})
    model.batch([row], "cross_entropy", {}, backward=False)
    assert base._merged is None, "training has the memory"
    for name, tensor in base.module.named_parameters():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=0)


def test_the_adapter_stays_beside_the_weights_if_memory_is_short(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    module = trained(base, 3).snapshot()
    assert base.merged(module) is not module
    monkeypatch.setattr(base, "_memory", replace(base._memory, free_bytes=1000))
    monkeypatch.setattr(base, "_merged", None)
    assert base.merged(module) is module
    assert base.merged(base.module) is base.module, "without an adapter there is nothing to merge"


def test_weights_of_half_precision_would_round_the_adapter_away(base: Any) -> None:
    from palaestra_train.tinker.model import BaseModel, SamplingDecoder

    half = BaseModel(base.source, device="cpu", dtype="bfloat16")
    module = trained(half, 4).snapshot()
    decoder = SamplingDecoder(module, half)
    assert len(sampled(decoder, 2)) == len(PROMPTS)
    assert decoder.model is module
