"""Estimates of pass rates against counting."""

from __future__ import annotations

from itertools import combinations

import pytest

from palaestra.envs.estimates import pass_at_k


@pytest.mark.parametrize(("n", "passed", "k"), [(5, 0, 2), (5, 2, 1), (5, 2, 3), (6, 3, 2), (4, 4, 4), (1, 1, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_pass(n: int, passed: int, k: int) -> None:
    draws = list(combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_what_cannot_be_told_is_refused() -> None:
    for n, passed, k in ((2, 3, 1), (2, 1, 3), (2, 1, 0)):
        with pytest.raises(ValueError, match="cannot be told"):
            pass_at_k(n, passed, k)
