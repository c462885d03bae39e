"""Draws of toolsets: the contract's numbers, repeatable from a seed, never empty, never shared by accident."""

from __future__ import annotations

import math
import random

import pytest

from golden_messages import raises
from palaestra.tools.registry.distributions import (
    DISTRIBUTIONS,
    get_distribution,
    list_distributions,
    print_distribution_info,
    sample_toolsets_from_distribution,
    validate_distribution,
)
from palaestra.tools.registry.toolsets import TOOLSETS
from palaestra_slots.core.errors import ConfigError


def test_there_are_the_seventeen_of_the_contract_and_they_name_toolsets() -> None:
    assert len(DISTRIBUTIONS) == 17
    for distribution in DISTRIBUTIONS.values():
        assert set(distribution.chances) <= set(TOOLSETS)
        assert all(0 < chance <= 100 for chance in distribution.chances.values())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_each_toolset_is_drawn_as_often_as_its_number_says(name: str) -> None:
    draws, rng, chances = 2000, random.Random(7), DISTRIBUTIONS[name].chances
    drawn = [sample_toolsets_from_distribution(name, rng) for _ in range(draws)]
    likeliest = max(chances, key=lambda toolset: chances[toolset])
    empty = math.prod(1 - chance / 100 for chance in chances.values())
    for toolset, chance in chances.items():
        share = sum(toolset in one for one in drawn) / draws
        assert share == pytest.approx(chance / 100 + (empty if toolset == likeliest else 0), abs=0.04)
    assert all(drawn)


def test_equal_generators_draw_equally() -> None:
    def draws(seed: int) -> list[list[str]]:
        rng = random.Random(seed)
        return [sample_toolsets_from_distribution("balanced", rng) for _ in range(20)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_a_draw_leaves_the_global_generator_alone() -> None:
    before = random.getstate()
    sample_toolsets_from_distribution("balanced")
    assert random.getstate() == before


class Never(random.Random):
    """Draws nothing."""

    def random(self) -> float:
        return 0.999999


def test_an_empty_draw_becomes_the_likeliest_toolset() -> None:
    assert sample_toolsets_from_distribution("image_gen", Never()) == ["image_gen"]
    assert sample_toolsets_from_distribution("reasoning", Never()) == ["moa"]


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with raises(ConfigError, "terminal_task", "terminal_tasks"):
        sample_toolsets_from_distribution("terminal_task")
    assert not validate_distribution("terminal_task")
    assert validate_distribution("terminal_tasks")
    assert get_distribution("nothing") is None


def test_what_callers_get_is_their_own() -> None:
    first = get_distribution("minimal")
    assert first is not None
    first["toolsets"]["terminal"] = 100
    assert list_distributions()["minimal"]["toolsets"] == {"web": 100}


def test_a_distribution_prints_likeliest_first(capsys: pytest.CaptureFixture[str]) -> None:
    print_distribution_info("development")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["80%", "terminal"]
    assert lines[-1].split() == ["10%", "vision"]
