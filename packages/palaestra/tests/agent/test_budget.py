"""Ceilings and token estimates."""

from __future__ import annotations

import pytest

from palaestra.agent.budget import Budget, Used, estimated_tokens
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import Prices

PRICES = Prices(prompt=1_000_000, completion=2_000_000)


@pytest.mark.parametrize(
    ("budget", "used", "word"),
    [
        (Budget(), Used(10**6, 10**9, 10**9, 10**9, 10.0**9), ""),
        (Budget(turns=3), Used(turns=2), ""),
        (Budget(turns=3), Used(turns=3), "3 turns"),
        (Budget(tokens=10), Used(prompt_tokens=5, completion_tokens=4), ""),
        (Budget(tokens=10), Used(prompt_tokens=5, completion_tokens=6), "10 tokens used up (11)"),
        (Budget(completion_tokens=10), Used(prompt_tokens=99, completion_tokens=9), ""),
        (Budget(completion_tokens=10), Used(completion_tokens=12), "10 completion tokens used up (12)"),
        (Budget(output_bytes=10), Used(output_bytes=9), ""),
        (Budget(output_bytes=10), Used(output_bytes=30), "10 bytes of tool output used up (30)"),
        (Budget(cost=7, prices=PRICES), Used(prompt_tokens=2, completion_tokens=2), ""),
        (Budget(cost=7, prices=PRICES), Used(prompt_tokens=3, completion_tokens=2), "cost budget of 7 used up (7)"),
        (Budget(wall_s=1.5), Used(elapsed_s=1.4), ""),
        (Budget(wall_s=1.5), Used(elapsed_s=1.5), "1.5 seconds"),
    ],
)
def test_which_ceiling_is_reached(budget: Budget, used: Used, word: str) -> None:
    found = budget.used_up(used)
    assert word in found
    assert bool(found) is bool(word)


def test_a_cost_needs_prices() -> None:
    with pytest.raises(ConfigError, match="needs token prices"):
        Budget(cost=1.0)


def test_a_reply_may_use_what_is_left() -> None:
    assert Budget().reply_tokens(None, 5) is None
    assert Budget().reply_tokens(7, 5) == 7
    assert Budget(completion_tokens=10).reply_tokens(None, 4) == 6
    assert Budget(completion_tokens=10).reply_tokens(3, 4) == 3
    assert Budget(completion_tokens=10).reply_tokens(3, 9) == 1
    assert Budget(completion_tokens=10).reply_tokens(None, 99) == 1


def test_estimates_count_the_text_wherever_it_stands() -> None:
    call = {"id": "1234", "function": {"name": "abcd", "arguments": "x" * 32}}
    assert estimated_tokens([]) == 0
    assert estimated_tokens([{"role": "tool", "content": "é" * 18}]) == 10
    assert estimated_tokens([{"role": "assistant", "content": None, "tool_calls": [call]}]) == 12
