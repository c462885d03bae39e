"""Whole numbers of JSON: `true` is not one, although it is an int in Python."""

from __future__ import annotations

import pytest

from palaestra_slots.core.errors import EngineRefused
from palaestra_tokens.engines.sampling import Sampling
from palaestra_tokens.http.chat_completions import ListedModel


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "seed", "top_k", "temperature"])
def test_true_is_not_a_number_of_a_request(name: str) -> None:
    assert Sampling.read({name: 1})
    with pytest.raises(EngineRefused, match=name.removeprefix("max_completion_")):
        Sampling.read({name: True})


@pytest.mark.parametrize("name", ["max_model_len", "context_length", "context_window", "max_context_length"])
def test_true_is_not_a_window(name: str) -> None:
    assert ListedModel("m", **{name: True}).window_tokens is None
    assert ListedModel("m", **{name: 9}).window_tokens == 9
