"""Estimates of pass rates against counting and a published table."""

from __future__ import annotations

from itertools import combinations

import pytest

from palaestra.envs.estimates import interval, pass_at_k


@pytest.mark.parametrize(("n", "passed", "k"), [(5, 0, 2), (5, 2, 1), (5, 2, 3), (6, 3, 2), (4, 4, 4), (1, 1, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_pass(n: int, passed: int, k: int) -> None:
    draws = list(combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(
    ("mean", "count", "low", "high"),
    [(0.0, 20, 0.0, 0.1611), (1.0, 29, 0.8830, 1.0), (15 / 148, 148, 0.0624, 0.1605), (81 / 263, 263, 0.2553, 0.3662)],
)
def test_the_score_interval(mean: float, count: int, low: float, high: float) -> None:
    """The values of Newcombe 1998, table I, method 3."""
    assert interval(mean, count) == pytest.approx((low, high), abs=1e-4)


def test_what_cannot_be_told_is_refused() -> None:
    for n, passed, k in ((2, 3, 1), (2, 1, 3), (2, 1, 0)):
        with pytest.raises(ValueError, match="cannot be told"):
            pass_at_k(n, passed, k)
    with pytest.raises(ValueError, match="no interval"):
        interval(0.5, 0)
