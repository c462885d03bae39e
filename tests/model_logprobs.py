"""What a transformers model itself says of tokens, to compare with what was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palaestra_slots.core.types import JSON
from palaestra_tokens.engines.torch_decoder import load_model


def own_logprobs(model: Path, tokens: list[int], places: list[int]) -> list[float]:
    """The model's log-probabilities of the tokens at some places, all read in one pass."""
    return logprobs_by(load_model(str(model), "cpu"), tokens, places)


def logprobs_by(loaded: Any, tokens: list[int], places: Sequence[int]) -> list[float]:
    """The same by a model that is loaded already. Only the logits before the places are computed."""
    import torch

    before = torch.tensor(places) - 1
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([tokens]), logits_to_keep=before).logits[0]
    chosen = torch.log_softmax(logits.double(), dim=-1)
    return [float(row[tokens[place]]) for row, place in zip(chosen, places, strict=True)]


def row_differences(model: Path | str, rows: Sequence[Mapping[str, JSON]], dtype: str = "float32") -> list[float]:
    """The absolute difference of each sampled token of rows of `palaestra export --to rows`, in nats."""
    loaded, found = load_model(str(model), "cpu", dtype), list[float]()
    for row in rows:
        tokens, start = row["prompt_ids"] + row["completion_ids"], len(row["prompt_ids"])
        sampled = [place for place, mask in enumerate(row["mask"]) if mask]
        own = logprobs_by(loaded, tokens, [start + place for place in sampled])
        found += [abs(value - row["logprobs"][place]) for value, place in zip(own, sampled, strict=True)]
    return found
