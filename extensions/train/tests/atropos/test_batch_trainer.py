"""A trainer that takes batches from the real trajectory server: what it trains, and what a kill leaves."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tabular import REPLIES, REWARDS, TabularTrainer

from palaestra import ConfigError
from palaestra.rollouts.observe.training_steps import read_steps
from palaestra_slots.core.errors import TrainerError, TrainerRefused
from palaestra_train import TrainingConfig
from palaestra_train.atropos import batch_trainer
from palaestra_train.atropos.batch_trainer import BatchTrainer, scored_batch
from palaestra_train.atropos.connection import TrajectoryClient
from palaestra_train.atropos.trajectory_server import serving
from palaestra_train.atropos.wire import RequestRefusal, ScoredData, read_scored
from palaestra_train.trainer import TrainedRow, Weigh

STEPS = 6


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_trainer, "POLL_S", 0.01)


def group(trainer: TabularTrainer, number: int) -> dict[str, Any]:
    """Two rollouts, `bad` and `good`, sampled at the start; the score tells the groups apart."""
    tokenizer = trainer.engine.tokenizer
    prompt = list(tokenizer.encode("Say something"))
    replies = [list(tokenizer.encode(REPLIES[place])) for place in (0, 2)]
    logprob = TabularTrainer().reply_logprobs()[0]
    return {
        "tokens": [[*prompt, *reply] for reply in replies],
        "masks": [[*[-100] * len(prompt), *reply] for reply in replies],
        "inference_logprobs": [[*[1.0] * len(prompt), logprob, *[0.0] * (len(reply) - 1)] for reply in replies],
        "scores": [REWARDS["bad"], REWARDS["good"] + number / 1000],
    }


class Death(BaseException):
    """Ends a process here and now."""


class Dying(TabularTrainer):
    """A trainer that dies somewhere in a step or a checkpoint, as SIGKILL would end it."""

    def __init__(self, at: float, rng: random.Random) -> None:
        super().__init__(rate=0.1)
        self.at, self.rng = at, rng
        self.trained: list[float] = []

    def _die(self) -> None:
        if self.rng.random() < self.at:
            raise Death

    async def step(self, rows: Sequence[TrainedRow], version: str, weigh: Weigh) -> Mapping[str, float]:
        self._die()
        self.trained.append(round(max(row.row.reward or 0.0 for row in rows), 3))
        numbers = await super().step(rows, version, weigh)
        self._die()
        return numbers

    async def save(self, folder: Path) -> None:
        await super().save(folder)
        (folder / "trained.json").write_text(json.dumps(self.trained))
        self._die()

    async def load(self, folder: Path, version: str) -> None:
        await super().load(folder, version)
        self.trained = json.loads((folder / "trained.json").read_text())


def config(**settings: Any) -> TrainingConfig:
    return TrainingConfig(**{"steps": STEPS, "save_every": 2, "max_difference": 5.0, **settings})


async def train(url: str, trainer: TabularTrainer, folder: Path, **settings: Any) -> None:
    client = TrajectoryClient(url)
    try:
        await BatchTrainer(trainer, config(**settings), client, folder, sequences=2, most_tokens=64).run()
    finally:
        await client.aclose()


async def feed(url: str, count: int) -> None:
    """Give the server `count` batches, once a trainer has registered."""
    client = TrajectoryClient(url)
    try:
        for number in range(count):
            while (await client.ask("POST", "/scored_data", group(TabularTrainer(), number))).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await client.aclose()


async def test_batches_are_trained_in_their_order(tmp_path: Path) -> None:
    trainer = Dying(0.0, random.Random(0))
    async with serving() as url, asyncio.TaskGroup() as tasks:
        tasks.create_task(train(url, trainer, tmp_path / "training"))
        tasks.create_task(feed(url, STEPS))
    assert trainer.trained == [round(1 + number / 1000, 3) for number in range(STEPS)]
    assert trainer.weights[2] > 0.2 > trainer.weights[0]
    assert [line["step"] for line in read_steps(tmp_path)] == list(range(1, STEPS + 1))
    assert not list((tmp_path / "training/batches").iterdir())


@pytest.mark.parametrize("seed", range(1, 7))
async def test_a_trainer_that_dies_anywhere_trains_every_batch_once(tmp_path: Path, seed: int) -> None:
    rng, deaths = random.Random(seed), 0

    async def until_done() -> Dying:
        nonlocal deaths
        async with serving(store=tmp_path / "store") as url:
            feeding = asyncio.create_task(feed(url, STEPS))
            while True:
                trainer = Dying(0.3, rng)
                try:
                    await train(url, trainer, tmp_path / "training")
                except Death:
                    deaths += 1
                    continue
                await feeding
                return trainer

    trainer = await until_done()
    assert deaths > 0
    assert trainer.trained == [round(1 + number / 1000, 3) for number in range(STEPS)]


async def test_a_loss_that_is_no_number_ends_the_training_which_can_resume(tmp_path: Path) -> None:
    async with serving() as url, asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(url, STEPS))
        with pytest.raises(TrainerError, match="nan"):
            await train(url, TabularTrainer(loss=math.nan), tmp_path / "training")
        assert not list(read_steps(tmp_path))
        await train(url, TabularTrainer(), tmp_path / "training")
    assert [line["step"] for line in read_steps(tmp_path)] == list(range(1, STEPS + 1))


async def test_ids_of_another_tokenizer_end_the_training_before_they_are_kept(tmp_path: Path) -> None:
    async def both() -> None:
        async with serving() as url:
            client = TrajectoryClient(url)
            training = asyncio.create_task(train(url, TabularTrainer(), tmp_path))
            sent = group(TabularTrainer(), 0)
            sent["tokens"][1][0] = 10**6
            while (await client.ask("POST", "/scored_data", sent)).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await client.aclose()
            await asyncio.wait_for(training, 20)

    with pytest.raises(TrainerRefused, match="1000000"):
        await both()
    assert not list((tmp_path / "batches").iterdir())


def test_rows_beyond_the_trainers_limit_are_left_out() -> None:
    data = group(TabularTrainer(), 0)
    longest = max(map(len, data["tokens"]))
    read = read_scored(json.dumps(data).encode())
    assert len(scored_batch([read], most_tokens=longest).rows) == 2
    batch = scored_batch([read], most_tokens=longest - 1)
    assert len(batch.rows) + batch.refused["rows_too_long"] == 2
    assert batch.refused["rows_too_long"] > 0


def test_a_batch_without_log_probabilities_or_with_equal_scores_trains_nothing(tmp_path: Path) -> None:
    given = group(TabularTrainer(), 0)
    blind = scored_batch([ScoredData(**{**given, "inference_logprobs": None})])
    assert (blind.rows, blind.refused["rollouts_without_tokens"]) == ([], 2)
    equal = scored_batch([ScoredData(**{**given, "scores": [1.0, 1.0]})])
    assert (equal.rows, equal.refused["equal_groups"]) == ([], 1)


def test_the_advantages_of_an_environment_count(tmp_path: Path) -> None:
    given = group(TabularTrainer(), 0)
    batch = scored_batch([ScoredData(**{**given, "advantages": [[-3.0], [0.5]]})])
    assert [row.advantage for row in batch.rows] == [-3.0, 0.5]
    lengths = [len(each) for each in given["tokens"]]
    with pytest.raises(ConfigError, match="advantage"):
        scored_batch([ScoredData(**{**given, "advantages": [[float(at) for at in range(n)] for n in lengths]})])


def versioned(first: str, second: str) -> ScoredData:
    """A group whose rows two versions have sampled."""
    given = group(TabularTrainer(), 0)
    spans = [
        [(tokens.count(-100), len(tokens), version)]
        for tokens, version in zip(given["masks"], (first, second), strict=True)
    ]
    return ScoredData(**{**given, "group_overrides": {"policy_versions": spans}, "delivery_id": "sky"})


def test_versions_of_each_token_arrive_and_late_groups_are_dropped() -> None:
    batch = scored_batch([versioned("3", "5")], version=5, most_behind=2)
    assert [row.row.versions for row in batch.rows] == [
        [(0, len(row.row.mask), row.row.policy_version)] for row in batch.rows
    ]
    assert [row.row.policy_version for row in batch.rows] == ["3", "5"]
    assert batch.staleness(5)["most_staleness"] == 2
    late = scored_batch([versioned("3", "5")], version=5, most_behind=1)
    assert (late.rows, late.late, late.refused["late_groups"]) == ([], ["sky"], 1)


def test_groups_without_versions_are_refused_if_their_age_is_limited() -> None:
    given = ScoredData(**group(TabularTrainer(), 0))
    assert len(scored_batch([given]).rows) == 2
    with pytest.raises(TrainerRefused, match="max_off_policy"):
        scored_batch([given], version=5, most_behind=1)
    damaged = ScoredData(**{**group(TabularTrainer(), 0), "group_overrides": {"policy_versions": [[[0, 1, "3"]]]}})
    with pytest.raises(TrainerRefused, match="1 entries for 2"):
        scored_batch([damaged])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scores", ["nan", 1]),
        ("advantages", [["inf"], [1]]),
        ("inference_logprobs", [["-inf", 0], [0, 0]]),
        ("tokens", [[1, 1 << 40], [1, 2]]),
    ],
)
def test_numbers_that_would_spoil_the_weights_are_refused(field: str, value: Any) -> None:
    whole = {"tokens": [[1, 2], [1, 2]], "masks": [[-100, 2], [-100, 2]], "scores": [0, 1]}
    read_scored(json.dumps(whole).encode())
    with pytest.raises(RequestRefusal) as refused:
        read_scored(json.dumps({**whole, field: value}).encode())
    assert str(refused.value.field).startswith(field)
