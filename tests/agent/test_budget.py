"""Ceilings and token estimates."""

from __future__ import annotations

import pytest

from palaestra.agent.budget import Budget, estimated_tokens


@pytest.mark.parametrize(
    ("budget", "used", "word"),
    [
        (Budget(), (10**6, 10**9, 10.0**9), ""),
        (Budget(turns=3), (2, 0, 0.0), ""),
        (Budget(turns=3), (3, 0, 0.0), "3 turns"),
        (Budget(completion_tokens=10), (0, 9, 0.0), ""),
        (Budget(completion_tokens=10), (0, 12, 0.0), "10 completion tokens used up (12)"),
        (Budget(wall_s=1.5), (0, 0, 1.4), ""),
        (Budget(wall_s=1.5), (0, 0, 1.5), "1.5 seconds"),
    ],
)
def test_which_ceiling_is_reached(budget: Budget, used: tuple[int, int, float], word: str) -> None:
    found = budget.used_up(*used)
    assert word in found
    assert bool(found) is bool(word)


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
