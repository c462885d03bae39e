"""Choices of groups that sum to a batch: against brute force."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from palaestra_train.atropos.exchange import combined, exact

sizes = st.lists(st.integers(1, 9), max_size=9)


def possible(numbers: list[int], target: int) -> bool:
    return any(sum(some) == target for n in range(len(numbers) + 1) for some in itertools.combinations(numbers, n))


@given(sizes, st.integers(0, 30))
def test_a_choice_is_found_exactly_where_there_is_one(numbers: list[int], target: int) -> None:
    found = exact(numbers, target)
    assert (found is not None) == possible(numbers, target)
    if found is not None:
        assert found == sorted(set(found))
        assert sum(numbers[place] for place in found) == target


def test_the_oldest_go_first() -> None:
    assert exact([4, 4, 4, 4], 8) == [0, 1]
    assert exact([3, 4, 4, 1, 3], 8) == [1, 2]
    assert exact([3, 4, 1, 4], 8) == [0, 1, 2]
    assert exact([5], -1) is None


@given(st.integers(1, 8).flatmap(lambda unit: st.tuples(st.just(unit), st.lists(st.integers(1, 9), min_size=unit))))
def test_so_many_groups_as_a_whole_one_has_rows_never_all_wait(drawn: tuple[int, list[int]]) -> None:
    unit, numbers = drawn
    found = combined(numbers, unit)
    assert found
    assert sum(numbers[place] for place in found) % unit == 0
