"""The one method of intervals: textbook values, its coverage in simulation, and agreement between scores."""

from __future__ import annotations

import random

import pytest

from palaestra.rollouts.observe.intervals import (
    Cluster,
    clustered_interval,
    mean_interval,
    pass_interval,
    share_interval,
    student,
)


def near(low: float, high: float) -> object:
    return pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("freedom", "tabulated"), [(1, 12.7062), (3, 3.1824), (5, 2.5706), (30, 2.0423)])
def test_the_quantiles_are_those_of_the_tables(freedom: int, tabulated: float) -> None:
    assert student(freedom) == pytest.approx(tabulated, rel=2e-4)


def test_values_that_do_not_vary_have_wilsons_interval_for_the_tasks() -> None:
    assert mean_interval([[0.0] * 4] * 5) == near(0, 0.4345)
    assert mean_interval([[0.0]] * 20) == near(0, 0.1611)  # Wilson's, for 0 of 20
    assert mean_interval([[1.0]] * 20) == near(0.8389, 1)
    assert mean_interval([[0.5, 0.5]] * 5) == near(0.5 * 0.5655, 0.5 * 0.5655 + 0.4345)
    assert clustered_interval([Cluster(1, 1)] * 3, 0, (-1, 1)) == near(2 * 0.43850 - 1, 1), "3 wins of 3 prove nothing"


def test_one_value_per_task_has_wilsons_interval_with_students_quantile() -> None:
    t = student(9)
    middle, reach = (0.8 + t * t / 18) / (1 + t * t / 9), t * (0.8 * 0.2 / 9 + t * t / 324) ** 0.5 / (1 + t * t / 9)
    assert mean_interval([[1.0]] * 8 + [[0.0]] * 2) == near(middle - reach, middle + reach)


def test_rollouts_of_one_task_add_no_certainty_if_they_are_alike() -> None:
    one = mean_interval([[0.0], [1.0]] * 50)
    assert one == near(0.4022, 0.5978)
    assert mean_interval([[0.0] * 3, [1.0] * 3] * 50) == pytest.approx(one)
    apart = mean_interval([[0.0, 1.0] * 3] * 6)
    alike = mean_interval([[0.0] * 6, [1.0] * 6] * 3)
    assert apart is not None
    assert alike is not None
    assert alike[0] < apart[0] < 0.5 < apart[1] < alike[1]


def test_rewards_without_bounds_have_the_t_interval_or_none() -> None:
    assert mean_interval([[2.0], [4.0], [6.0]]) == near(4 - 4.9683, 8.9683)
    assert mean_interval([[2.0], [2.0]]) is None
    assert mean_interval([[2.0, 3.0]]) is None
    assert mean_interval([[], []]) is None


@pytest.mark.parametrize("tasks", [[[0, 0, 0, 0]] * 5, [[1, 0, 0, 0], [0] * 4, [1, 1, 1, 0]], [[1, 0]] * 6, [[1, 0]]])
def test_mean_share_and_pass_at_1_agree(tasks: list[list[float]]) -> None:
    interval = mean_interval(tasks)
    assert share_interval([Cluster(sum(task), len(task)) for task in tasks]) == pytest.approx(interval)
    rates = [sum(task) / len(task) for task in tasks]
    assert pass_interval(rates, sum(map(len, tasks))) == pytest.approx(interval)


@pytest.mark.parametrize(("tasks", "rollouts"), [(3, 4), (5, 4), (10, 1), (30, 4), (100, 8)])
@pytest.mark.parametrize("shape", [(1, 1), (0.3, 3), (300, 300), (0.2, 0.2)])
def test_the_interval_holds_the_true_mean_as_often_as_it_claims(
    tasks: int, rollouts: int, shape: tuple[float, float]
) -> None:
    rng, held, tries = random.Random(f"{tasks} {rollouts} {shape}"), 0, 600
    for _ in range(tries):
        rates = [rng.betavariate(*shape) for _ in range(tasks)]
        interval = mean_interval([[float(rng.random() < rate) for _ in range(rollouts)] for rate in rates])
        assert interval is not None
        assert 0 <= interval[0] < interval[1] <= 1
        held += interval[0] <= shape[0] / sum(shape) <= interval[1]
    assert held / tries > 0.92
