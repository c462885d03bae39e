"""Sampling settings as requests carry them: read as they are meant, or refused by name."""

from __future__ import annotations

import pytest

from palaestra_slots.core.errors import EngineRefused
from palaestra_slots.core.types import JSON
from palaestra_tokens.engines.sampling import Sampling


def test_nothing_said_means_the_model_as_it_is() -> None:
    assert Sampling.read({}, [7]) == Sampling(stop_ids=frozenset({7}))
    assert Sampling.read({"temperature": None, "seed": None, "top_k": -1, "n": 1, "logprobs": 1}) == Sampling()


def test_everything_said() -> None:
    read = Sampling.read(
        {
            "max_tokens": 5,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 3,
            "seed": 11,
            "stop_token_ids": [1, 2],
            "logprobs_mode": "processed_logprobs",
        },
        [7],
    )
    assert read == Sampling(5, 0, 0.5, 3, 11, frozenset({1, 2, 7}), True)
    assert Sampling.read({"ignore_eos": True, "stop_token_ids": [1]}, [7]).stop_ids == {1}
    assert Sampling.read({"max_completion_tokens": 3, "max_tokens": 9}).max_tokens == 3


def test_settings_that_say_nothing_pass() -> None:
    assert Sampling.read({"frequency_penalty": 0.0, "stop": [], "min_p": 0}) == Sampling()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"presence_penalty": 0.5}, "no sampling setting 'presence_penalty'"),
        ({"stop": ["\n"]}, "no sampling setting 'stop'"),
        ({"temperature": -1}, "temperature=-1 is not a number from 0"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": True}, "temperature=True"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"max_tokens": 0}, "max_tokens=0 is not a positive integer"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"seed": [1]}, r"seed=\[1\] is not an integer"),
        ({"logprobs_mode": "raw_logits"}, "raw_logprobs or processed_logprobs"),
    ],
)
def test_what_is_not_done_is_refused(settings: dict[str, JSON], message: str) -> None:
    with pytest.raises(EngineRefused, match=message):
        Sampling.read(settings)


def test_a_seed_of_its_own() -> None:
    assert Sampling(top_k=4).seeded(9) == Sampling(top_k=4, seed=9)
