"""What a transformers model itself says of tokens, to compare with what was recorded."""

from __future__ import annotations

from pathlib import Path

from palaestra_tokens.engines.torch_decoder import load_model


def own_logprobs(model: Path, tokens: list[int], places: list[int]) -> list[float]:
    """The model's log-probabilities of the tokens at some places, all read in one pass."""
    import torch

    with torch.no_grad():
        logits = load_model(str(model), "cpu")(input_ids=torch.tensor([tokens])).logits[0]
    before = torch.tensor(places) - 1
    chosen = torch.log_softmax(logits[before].double(), dim=-1)
    return [float(row[tokens[place]]) for row, place in zip(chosen, places, strict=True)]
