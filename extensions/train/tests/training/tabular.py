"""A trainer whose whole model is one number per reply: it samples, learns and saves in microseconds.

As a program it trains in the folder of its first argument, `python tabular.py FOLDER [--resume RUN]`, or
takes some words of `palaestra train`.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import palaestra
from palaestra import ConfigError, Rollout, Task, environment
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.token_engine import TokenChat
from palaestra_tokens.testing.fake_engine import toy_tokenizer
from palaestra_tokens.tokenizers import Tokenizer
from palaestra_train.busy import BusyClock
from palaestra_train.trainer import TrainedRow, Weigh

REPLIES = ("bad", "fair", "good")
REWARDS = {"bad": 0.0, "fair": 0.5, "good": 1.0}


@environment(toolsets=[])
def words(n: int = 12) -> Iterator[Task]:
    for i in range(n):
        yield Task(id=f"word-{i}", prompt=f"Say something, {i}")


@words.score
async def score(rollout: Rollout) -> float:
    assert rollout.result is not None
    return REWARDS[str(rollout.result.messages[-1]["content"])]


class TabularEngine(TokenChat):
    def __init__(self, trainer: TabularTrainer, tokenizer: Tokenizer | None) -> None:
        super().__init__(APIServerConfig(model_name=trainer.model), tokenizer=tokenizer or toy_tokenizer())
        self.trainer = trainer
        self.requests = 0
        self.rng = random.Random(0)

    async def aclose(self) -> None: ...

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, Any]) -> Sampled:
        self.requests += 1
        await asyncio.sleep(self.trainer.sampling_s)
        logprobs = self.trainer.reply_logprobs()
        chosen = self.rng.choices(range(len(REPLIES)), [math.exp(each) for each in logprobs])[0]
        ids = [*self.tokenizer.encode(REPLIES[chosen]), self.tokenizer.stop_ids[0]]  # type: ignore[attr-defined]
        given = [logprobs[chosen] + self.trainer.error, *[0.0] * (len(ids) - 1)]
        return Sampled(ids, given, "stop", self.trainer.version)


class TabularTrainer:
    name = "tabular"
    overlaps = True

    def __init__(
        self, *, model: str = "table", error: float = 0.0, loss: float = 0.5, sampling_s: float = 0.0,
        rate: float = 0.5, tokenizer: Tokenizer | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.busy = BusyClock()
        self.error = error
        self.loss = loss
        self.sampling_s = sampling_s
        self.weights = [0.0] * len(REPLIES)
        self.version = "0"
        self.steps: list[list[str]] = []
        self.engine = TabularEngine(self, tokenizer)
        self.rate = rate
        self.gone = False

    def reply_logprobs(self) -> list[float]:
        total = math.log(sum(math.exp(each) for each in self.weights))
        return [each - total for each in self.weights]

    def reply_of(self, row: TrainedRow) -> int:
        text = self.engine.tokenizer.decode(row.row.completion_ids[: sum(row.row.mask)], skip_special_tokens=True)
        return next(place for place, reply in enumerate(REPLIES) if text.strip().startswith(reply))

    async def open(self) -> None: ...

    async def step(self, rows: Sequence[TrainedRow], version: str, weigh: Weigh) -> Mapping[str, float]:
        own = self.reply_logprobs()
        rows = weigh(rows, [[own[self.reply_of(row)], *[0.0] * (len(row.row.completion_ids) - 1)] for row in rows])
        if self.gone:
            raise palaestra.TrainerError("the trainer is gone")
        self.steps.append([row.row.rollout_id for row in rows])
        chances = [math.exp(each) for each in self.reply_logprobs()]
        for row in rows:
            for place in range(len(REPLIES)):
                hit = place == self.reply_of(row)
                self.weights[place] += self.rate * row.advantage * (hit - chances[place]) / len(rows)
        self.version = version
        return {"loss": self.loss}

    async def save(self, folder: Path) -> None:
        (folder / "weights.json").write_text(json.dumps(self.weights))

    async def load(self, folder: Path, version: str) -> None:
        try:
            self.weights = json.loads((folder / "weights.json").read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} cannot be read: {error}") from None
        self.version = version

    async def aclose(self) -> None: ...


def _given(name: str) -> str | None:
    """The value of a flag, as `--name VALUE` or `--name=VALUE`."""
    for place, word in enumerate(sys.argv):
        flag, equals, value = word.partition("=")
        if flag == name:
            return value if equals else sys.argv[place + 1]
    return None


if __name__ == "__main__":
    out = _given("--out")
    report = asyncio.run(
        palaestra.train(
            words(),
            trainer=TabularTrainer(sampling_s=float(_given("--sampling-s") or 0.002), rate=0.15),
            group_size=4,
            folder=sys.argv[1] if out is None else "runs",
            out=out,
            resume=_given("--resume"),
            training={
                "steps": int(_given("--steps") or 12), "groups": 3, "eval_every": 4, "eval_tasks": 4, "save_every": 3
            },
        )
    )  # fmt: skip
    print(json.dumps(report.to_json()))
