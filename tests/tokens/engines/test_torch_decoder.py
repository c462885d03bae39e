"""The decoder's rows come and leave in every order, and each has the log-probabilities that it has alone."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from palaestra_tokens.engines.sampling import Sampling
from palaestra_tokens.testing.tiny_model import make_tiny

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra 'train': make test-torch"),
]

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "a"
    make_tiny(out, seed=1, hidden=64, layers=2)
    return out


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_come_and_leave_do_not_change_the_others(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from palaestra_tokens.engines import growing_cache, torch_decoder
    from palaestra_tokens.engines.torch_decoder import TorchDecoder, load_model

    monkeypatch.setattr(growing_cache, "LEAST_ROOM", 2)  # so that rows outgrow it
    monkeypatch.setattr(torch_decoder, "LEAST_SHARED", 2)
    model, rng = load_model(str(folder), device="cpu"), random.Random(seed)
    decoder = TorchDecoder(model)
    rows: list[tuple[list[int], list[int], list[float]]] = []
    done: list[tuple[list[int], list[int], list[float]]] = []
    for _ in range(30):
        if not rows or rng.random() < 0.2:
            beginning = [3, 4, 5, 6, 7, 8][: rng.randint(0, 6)]
            prompts = [
                beginning + [rng.randrange(3, 90) for _ in range(rng.randint(1, 20))] for _ in range(rng.randint(1, 4))
            ]
            if rows and rng.random() < 0.5:  # a prompt that continues a row
                prompts.append(rows[-1][0] + rows[-1][1] + [9])
            prompts += rng.sample(prompts, rng.randint(0, len(prompts)))
            decoder.admit(
                prompts, [Sampling(seed=rng.randrange(99), temperature=rng.choice([1.0, 0.7])) for _ in prompts]
            )
            rows += [(prompt, [], []) for prompt in prompts]
        for (_, ids, logprobs), (token, logprob) in zip(rows, decoder.step(), strict=True):
            ids.append(token)
            logprobs.append(logprob)
        if rng.random() < 0.4:
            staying = [row for row in range(len(rows)) if rng.random() < 0.6]
            done += [row for place, row in enumerate(rows) if place not in staying]
            rows = [rows[place] for place in staying]
            decoder.keep(staying)
    for prompt, ids, logprobs in [*rows, *done]:
        with torch.inference_mode():
            found = model(input_ids=torch.tensor([prompt + ids])).logits[0].float().log_softmax(-1)
        alone = [float(found[len(prompt) - 1 + place, token]) for place, token in enumerate(ids)]
        assert alone == pytest.approx(logprobs, abs=TOLERANCE)


def test_the_memory_of_keys_and_values_limits_a_batch(folder: Path) -> None:
    from palaestra_tokens.engines.growing_cache import length_with_room
    from palaestra_tokens.engines.torch_decoder import TorchDecoder, load_model

    model = load_model(str(folder), device="cpu")
    decoder = TorchDecoder(model)
    prompts = [[5] * 10, [6] * 40, [7] * 20, [8] * 20]
    assert decoder.room(prompts) == 4
    decoder.admit(prompts[:1], [Sampling()])
    layer = decoder._cache.layers[0]
    of_token = sum(each[0, :, 0].nbytes for each in (layer.keys, layer.values)) * len(decoder._cache.layers)
    for rows, room in ((3, 2), (2, 1), (1.9, 0), (0, 0)):
        decoder._most_bytes = rows * length_with_room(40) * of_token
        assert decoder.room(prompts[1:]) == room
    decoder.keep([])
    assert decoder.room(prompts[1:]) == 1, "an empty batch takes a row of any length"


def test_rows_that_join_a_batch_are_not_kept_twice() -> None:
    import torch

    from palaestra_tokens.engines.growing_cache import append_rows, new_cache

    batch, fresh = new_cache(), new_cache()
    with torch.inference_mode():
        for cache in (batch, fresh):
            for number in range(2):
                cache.update(torch.rand(3, 1, 8, 4), torch.rand(3, 1, 8, 4), number)
        wanted = [
            torch.cat([old.keys, new.keys[[2, 0, 2]]]) for old, new in zip(batch.layers, fresh.layers, strict=True)
        ]
    append_rows(batch, fresh, [2, 0, 2])
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(batch.layers, wanted, strict=True))
    assert sum(layer.keys.untyped_storage().nbytes() for layer in fresh.layers) == 0
    assert not any(layer._rooms for layer in fresh.layers)
