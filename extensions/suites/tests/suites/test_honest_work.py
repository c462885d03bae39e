"""Correct work in other words earns the whole reward and raises no alarm. `benchmarks/honest_work.py` plays more."""

from __future__ import annotations

import ast
from random import Random

import pytest

from suites.honest_work import CHANGES, Change, play_variants, varied_source

PROGRAM = '''
"""A module."""
import math

class Stack:
    def __init__(self):
        self.items = []

    def push(self, item, times=1):
        count = 0
        while count < times:
            self.items.append(item)
            count += 1
        return len(self.items)

def sign(number):
    if not number > 0:
        if number < 0:
            result = -1
        else:
            result = 0
    else:
        result = 1
    return result

def area(radius):
    squared = radius * radius
    return math.floor(math.pi * squared)

def scaled(factor):
    def scale(number):
        return number * factor
    return scale
'''


def observed(text: str) -> list[object]:
    names: dict[str, object] = {}
    exec(compile(text, "program", "exec"), names)
    stack = names["Stack"]()  # type: ignore[operator]
    return [
        stack.push(3, times=2),
        stack.items,
        *map(names["sign"], (-4, 0, 4)),
        names["area"](3),
        names["scaled"](3)(5),
    ]  # type: ignore[operator]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_keeps_the_meaning_and_changes_the_text(change: Change) -> None:
    texts = set()
    for seed in range(10):
        tree = ast.parse(PROGRAM)
        change(tree, Random(seed))
        texts.add(ast.unparse(ast.fix_missing_locations(tree)))
    assert len(texts) > 1
    assert all(observed(text) == observed(PROGRAM) for text in texts)


def test_variants_differ() -> None:
    texts = {varied_source(PROGRAM, Random(seed)) for seed in range(20)}
    assert len(texts) == 20
    assert all(observed(text) == observed(PROGRAM) for text in texts)


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "tasks"), [("hermes_swe", 5), ("endless_terminals", 2), ("terminalbench_2", 2), ("count_lines", 2)]
)
async def test_variants_earn_the_whole_reward(name: str, tasks: int) -> None:
    played = await play_variants(name, [], tasks=tasks, variants=1)
    assert [each for each in played if each.reward != 1.0] == []
