"""Rows that share their beginning have the same log-probabilities and gradients as rows computed one by one."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the extra 'tinker': make test-torch"),
]

LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; that of Gemma 2 has a soft cap on its logits and layers that attend only to the last tokens."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.5}  # fmt: skip
    if request.param == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, final_logit_softcapping=3.0, sliding_window=24))
    out = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(out)
    return out


def rows(loss: str) -> list[Any]:
    """Two groups with different beginnings, one row alone, one without a gradient, and one that is another's prefix."""
    import torch

    from palaestra_train.tinker.model import Row

    rng = random.Random(3)
    made = []

    def row(ids: list[int], prompt: int, advantage: float) -> None:
        count = len(ids) - 1
        on = [float(place >= prompt - 1 and rng.random() < 0.8) * advantage for place in range(count)]
        targets = torch.tensor([*ids[1:]])
        inputs = {"target_tokens": targets}
        if loss == "cross_entropy":
            inputs["weights"] = torch.tensor(on)
        else:
            inputs |= {"logprobs": torch.rand(count) * -3 - 1, "advantages": torch.tensor(on)}
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = torch.tensor([float(place >= prompt - 1) for place in range(count)])
        made.append(Row(ids[:-1], inputs))

    torch.manual_seed(2)
    for prompt in (40, 25):
        start = [rng.randrange(200) for _ in range(prompt)]
        for length, advantage in ((9, 1.0), (3, -0.5), (14, 0.25), (6, 0.0)):
            row(start + [rng.randrange(200) for _ in range(length)], prompt, advantage)
        row(start, prompt - 2, 0.7)
    row([rng.randrange(200) for _ in range(30)], 8, 1.0)
    rng.shuffle(made)
    return made


def trained(folder: Path, loss: str, pass_memory: float | None, *, together: bool) -> tuple[Any, Any, float]:
    import torch

    from palaestra_train.tinker.model import BaseModel, LoraSettings, TrainedModel

    base = BaseModel(str(folder), device="cpu", pass_memory=pass_memory)
    model = TrainedModel(base, LoraSettings(4, 0, True, True, True))
    with torch.no_grad():  # a fresh adapter changes nothing, and one of its halves has no gradient
        torch.manual_seed(5)
        for tensor in model.trained().values():
            tensor.normal_(std=0.1)
    given = rows(loss)
    batches = [given] if together else [[each] for each in given]
    results = [model.batch(batch, loss, {}, backward=True) for batch in batches]
    logprobs = [each for result in results for each in result.logprobs]
    gradients = {name: tensor.grad for name, tensor in model.trained().items()}
    return logprobs, gradients, sum(result.loss for result in results)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("pass_memory", [None, 0.5e-3, 1e-9], ids=["one pass", "some passes", "recomputed"])
def test_shared_beginnings_change_no_loss_and_no_gradient(folder: Path, loss: str, pass_memory: float | None) -> None:
    import torch

    logprobs, gradients, summed = trained(folder, loss, pass_memory, together=True)
    expected, single, one_by_one = trained(folder, loss, None, together=False)
    assert summed == pytest.approx(one_by_one, rel=1e-4, abs=1e-4)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    assert gradients.keys() == single.keys()
    scale = max(float(each.abs().max()) for each in single.values())
    for name, each in gradients.items():
        torch.testing.assert_close(each, single[name], atol=1e-4 * scale, rtol=1e-3, msg=name)


def test_the_log_probabilities_are_those_of_the_whole_model(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from palaestra_train.tinker.model import BaseModel, TrainedModel

    given = rows("cross_entropy")
    found = TrainedModel(BaseModel(str(folder), device="cpu"), None).batch(given, "cross_entropy", {}, backward=False)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row, logprobs in zip(given, found.logprobs, strict=True):
        with torch.no_grad():
            own = whole(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        targets = row.inputs["target_tokens"]
        torch.testing.assert_close(logprobs, own.gather(1, targets[:, None])[:, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_the_keys_of_a_beginning_are_not_kept_for_each_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers.integrations import sdpa_attention

    from palaestra_train.tinker.forward_pass import FORCE_GROUPS, Targets
    from palaestra_train.tinker.model import BaseModel, LoraSettings, TrainedModel

    if FORCE_GROUPS not in Path(sdpa_attention.__file__).read_text():
        pytest.skip("this version of transformers always repeats keys and values")
    base = BaseModel(str(folder), device="cpu")
    trained = TrainedModel(base, LoraSettings(4, 0, True, True, True))
    ids = [[*range(1, 41), *end] for end in ([50, 51, 52], [60, 61], [70])]
    targets = [Targets(torch.tensor([*row[1:], 0]), torch.ones(len(row), dtype=torch.bool)) for row in ids]

    def kept_heads() -> set[int]:
        """Return how many heads the tensors have that are kept of all tokens, for the backward pass."""
        shapes: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda each: (shapes.append(each.shape), each)[1], lambda e: e):
            base.output.logprobs(trained.module, ids, targets, 40, recompute=False)
        return {shape[1] for shape in shapes if len(shape) == 4 and shape[0] == len(ids) and shape[2] > 40}

    assert kept_heads() == {2}
    assert FORCE_GROUPS not in os.environ
    monkeypatch.setenv(FORCE_GROUPS, "0")  # a user's own setting stays
    assert kept_heads() == {4}


def test_rows_are_clustered_by_what_they_share() -> None:
    from palaestra_train.tinker.forward_pass import clusters

    one, two = list(range(100, 140)), list(range(50, 80))
    given = [[*one, 1, 2], [*two, 9], [*one, 3], [7], [*two, 8, 9], [*one, 1, 5], [*one[:20], 400]]
    found = {tuple(sorted(chosen)): shared for chosen, shared in clusters(given)}
    assert found == {(0, 2, 5): 40, (1, 4): 30, (3,): 0, (6,): 0}


def test_groups_whose_prompts_begin_alike_stay_apart() -> None:
    from palaestra_train.tinker.forward_pass import clusters

    rng, system = random.Random(0), list(range(100))
    prompts = [[*system, *(rng.randrange(200, 300) for _ in range(30))] for _ in range(4)]
    given = [[*prompts[place % 4], *(rng.randrange(300, 305) for _ in range(40))] for place in range(32)]
    found = [(sorted(chosen), shared) for chosen, shared in clusters(given)]
    assert sorted(chosen for chosen, _ in found) == [list(range(place, 32, 4)) for place in range(4)]
    assert all(shared >= 130 for _, shared in found)
