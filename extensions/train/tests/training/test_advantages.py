"""Advantages, and what is refused before a model learns from it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import structs
from recorded import one_segment, rollout, two_segments

from palaestra import ConfigError, Group, Label, Trajectory
from palaestra_slots import TrainerError
from palaestra_train import TrainingConfig
from palaestra_train import advantages as batches
from palaestra_train.advantages import Batch, advantages
from palaestra_train.importance import SamplerMismatch
from palaestra_train.trainer import TrainedRow


def group(*rewards: float | None, error: str = "") -> Group:
    record = one_segment().record()
    return Group(
        group_id="000000-sky",
        number=0,
        task_id="sky",
        trajectories=[rollout(place, [], reward, ledger=record) for place, reward in enumerate(rewards)],
        error=error,
    )


def take(batch: Batch, group: Group, *, version: int = 5, most_behind: int = 1) -> bool:
    return batch.add(group, version=version, most_behind=most_behind)


def test_advantages_have_mean_zero_and_deviation_one() -> None:
    assert advantages([0.0, 1.0, 1.0, 0.0]) == [-1.0, 1.0, 1.0, -1.0]
    assert advantages([0.0, 1.0, 0.5], scaled=False) == [-0.5, 0.5, 0.0]


def test_an_unscored_rollout_neither_trains_nor_counts_for_the_others() -> None:
    batch = Batch()
    assert take(batch, group(1.0, None, 0.0))
    assert [(row.row.index, row.advantage) for row in batch.rows] == [(0, 1.0), (2, -1.0)]
    assert batch.refused[batches.UNSCORED] == 1
    assert (batch.groups, batch.rewards, batch.rollouts) == (1, [1.0, 0.0], 3)
    assert batch.verdicts.numbers() == {}


def test_official_verdicts_and_labels_of_scored_rollouts_are_counted() -> None:
    batch, made = Batch(), group(1.0, None, 0.0, 0.0)
    signs = [Label("tests_edited", "test_a.py"), Label("tests_edited", "test_b.py"), Label("live_processes", "2")]
    made.trajectories[2] = structs.replace(made.trajectories[2], official=1.0, labels=signs)
    made.trajectories[3] = structs.replace(made.trajectories[3], labels=signs[:1])
    take(batch, made)
    assert batch.verdicts.numbers() == {"official": 2 / 3, "labels/live_processes": 1, "labels/tests_edited": 2}


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (group(0.5, 0.5, None), batches.EQUAL),
        (group(0.5), batches.EQUAL),
        (group(None, None), batches.FAILED),
        (group(), batches.FAILED),
        (group(1.0, 0.0, error="PrepareError: no"), batches.FAILED),
    ],
)
def test_a_group_that_teaches_nothing_is_refused(refused: Group, reason: str) -> None:
    batch = Batch()
    assert not take(batch, refused)
    assert (batch.rows, batch.refused[reason]) == ([], 1)


def test_every_sampled_token_of_all_segments_is_trained_once() -> None:
    record = two_segments().record()
    both: list[Trajectory] = [rollout(place, [], float(place), ledger=record) for place in range(2)]
    batch = Batch()
    assert take(batch, Group(group_id="000000-sky", number=0, task_id="sky", trajectories=both))
    assert [(row.row.index, row.row.segment, row.advantage) for row in batch.rows] == [
        (0, 0, -1.0),
        (0, 1, -1.0),
        (1, 0, 1.0),
        (1, 1, 1.0),
    ]
    assert [row.sampled for row in batch.rows] == [3, 2, 3, 2]
    assert batch.rows[0].tokens == [1, 2, 3, 10, 11, 9]


@pytest.mark.parametrize(("version", "kept"), [(4, 2), (5, 2), (6, 0)])
def test_rows_of_weights_that_are_too_old_are_refused(version: int, kept: int) -> None:
    old = group(1.0, 0.0)
    for each in old.trajectories:
        assert each.ledger is not None
        segment = each.ledger.segments[0]
        segment.spans = [msgspec.structs.replace(span, version="4") for span in segment.spans]
    batch = Batch()
    assert take(batch, old, version=version) == bool(kept)
    assert (len(batch.rows), batch.refused[batches.STALE]) == (kept, 2 - kept)


def long_rows(count: int, tokens: int = 400) -> Batch:
    """Rows whose tokens are all sampled, with the log-probabilities of a model that is usually sure."""
    batch, rng = Batch(), random.Random(3)
    take(batch, group(1.0, 0.0))
    for number in range(count):
        logprobs = [-rng.expovariate(2.0) for _ in range(tokens)]
        ids = list(range(tokens))
        row = structs.replace(batch.rows[0].row, index=number, completion_ids=ids, mask=[1] * tokens, logprobs=logprobs)
        batch.rows.append(TrainedRow(row, 1.0))
    del batch.rows[:2]
    return batch


def weigh(batch: Batch, own: list[list[float]], **settings: Any) -> SamplerMismatch:
    batch.weighing(TrainingConfig(**settings), step=1)(batch.rows, own)
    return batch.mismatch


def test_rows_that_differ_by_precision_alone_are_kept() -> None:
    batch, rng = long_rows(200), random.Random(5)
    # bfloat16: small differences, and now and then a large one on an unlikely token
    own = [
        [each + rng.gauss(0, 0.02) + (rng.gauss(0, 0.5) if rng.random() < 0.01 else 0.0) for each in row.logprobs]
        for row in batch.rows
    ]
    pairs = [zip(row.logprobs, theirs, strict=True) for row, theirs in zip(batch.rows, own, strict=True)]
    assert sum(max(abs(a - b) for a, b in each) > 0.1 for each in pairs) > 50
    found = weigh(batch, own)
    assert len(batch.rows) == 200
    assert 0.01 < found.mean < 0.03
    assert 0 < found.k3 < 0.01
    assert found.tokens == 200 * 400


@pytest.mark.parametrize(
    "spoil",
    [
        lambda theirs: [*theirs[1:], -1.0],  # every token is compared with its neighbour's
        lambda theirs: [each - 0.2 for each in theirs],  # other weights
        lambda theirs: [math.nan, *theirs[1:]],
    ],
    ids=["shifted", "other-weights", "not-a-number"],
)
def test_a_step_of_other_weights_or_tokens_ends_the_training(spoil: Callable[[list[float]], list[float]]) -> None:
    batch = long_rows(20)
    with pytest.raises(TrainerError, match=r"max_difference 0\.1"):
        weigh(batch, [spoil(list(row.logprobs)) for row in batch.rows])


def test_each_token_has_a_truncated_weight_and_far_tokens_are_masked() -> None:
    batch = long_rows(1, tokens=100)
    own = list(batch.rows[0].logprobs)
    steps = [math.log(1.5), math.log(3), math.log(9), -math.log(9), -0.5]
    own[:5] = [each + step for each, step in zip(own, steps, strict=False)]
    found = weigh(batch, [own], max_difference=1.0)
    (row,) = batch.rows
    assert list(row.weights[:6]) == pytest.approx([1.5, 2.0, 0.0, 0.0, math.exp(-0.5), 1.0])
    assert (found.truncated, found.masked) == (1, 2)
    assert row.own == own
    ratios = [1.5, 3.0, math.exp(-0.5)]
    assert found.k1 == pytest.approx(-(math.log(1.5) + math.log(3) - 0.5) / 100)
    assert found.k3 == pytest.approx(sum(each - 1 - math.log(each) for each in ratios) / 98)


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({}, "importance_sampling"),
        ({"async_steps": 2}, "dapo"),
        ({"max_off_policy": 1}, "dapo"),
        ({"async_steps": 2, "loss": "importance_sampling"}, "importance_sampling"),
    ],
)
def test_the_loss_clips_if_rows_may_be_off_policy(settings: dict[str, Any], loss: str) -> None:
    config = TrainingConfig(**settings)
    assert config.loss_name == loss
    assert (config.clips[0] == math.inf) is (loss == "importance_sampling")


def test_only_sampled_tokens_are_compared() -> None:
    batch = Batch()
    take(batch, group(1.0, 0.0))
    own = [list(row.logprobs) for row in batch.rows]
    own[0][2] = 99.0  # not sampled: the environment wrote it
    assert weigh(batch, own).largest == 0.0
    assert [list(row.weights) for row in batch.rows] == [[float(on) for on in row.row.mask] for row in batch.rows]


def test_a_row_of_which_every_token_is_masked_is_refused() -> None:
    batch = long_rows(20, tokens=50)
    own = [list(row.logprobs) for row in batch.rows]
    own[3] = [each - 5 for each in own[3]]
    weigh(batch, own, max_difference=1.0)
    assert (len(batch.rows), batch.refused[batches.DIFFERENT]) == (19, 1)


def test_rloo_compares_with_the_others() -> None:
    assert advantages([1.0, 0.0, 0.0], kind="rloo") == pytest.approx([1.0, -0.5, -0.5])


def test_staleness_counts_tokens() -> None:
    old = group(1.0, 0.0)
    for each, version in zip(old.trajectories, "35", strict=True):
        each.ledger = one_segment().record()
        segment = each.ledger.segments[0]
        segment.spans = [msgspec.structs.replace(span, version=version) for span in segment.spans]
    batch = Batch()
    assert take(batch, old, version=5, most_behind=2)
    assert batch.staleness(5) == {"staleness": 1.0, "most_staleness": 2}
    late = Batch()
    assert not take(late, old, version=5, most_behind=1)  # the whole group, although one rollout is new enough
    assert (late.late, late.refused[batches.LATE], late.refused[batches.STALE]) == (["000000-sky"], 1, 1)


def test_an_engine_without_tokens_is_refused() -> None:
    both = [rollout(place, [], float(place)) for place in range(2)]
    with pytest.raises(ConfigError, match="000000-sky/0"):
        take(Batch(), Group(group_id="000000-sky", number=0, task_id="sky", trajectories=both))
