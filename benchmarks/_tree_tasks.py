"""A toy task with several steps, and a learner that consists of one table: softmax weights for each step, trained by
gradient.

The safe opens with one code. Each turn presses one key, which the tool appends to a file in the slot; the reward is the
share of right keys, read from the sealed file. The learner samples tokens through the token-exact server and learns
from the rows and advantages of the training loop, like any trainer.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palaestra import Slot, Task, TrainerError, environment
from palaestra.inference.config import APIServerConfig
from palaestra.inference.engine import Sampled
from palaestra.inference.engines.token_engine import TokenChat
from palaestra.testing.fake_engine import toy_tokenizer
from palaestra.trainers.busy import BusyClock
from palaestra.trainers.trainer import TrainedRow

STEPS, KEYS = 6, 4
CODE = "230132"
_CALL = '<tool_call>\n{{"name": "press", "arguments": {{"key": {key}}}}}\n</tool_call>'
_TEXTS = [_CALL.format(key=key) for key in range(KEYS)] * 20
_PRESSED = re.compile(r'"key": (\d)')
_TURN = "<|im_start|>assistant"


@environment(toolsets=[])
def safe(n: int = 1_000_000, sparse: bool = False) -> Iterator[Task]:
    """Press the keys of the code. With `sparse`, only the whole code earns a reward."""
    for number in range(n):
        yield Task(id=f"safe-{number}", prompt="Open the safe.", answer=CODE, data={"sparse": sparse})


calls = 0
"""The number of commands that ran in slots since the last training run began."""


@safe.tool
async def press(key: int, sandbox: Slot) -> str:
    """Press a key."""
    global calls
    calls += 1
    done = await sandbox.execute(f"echo {key} >> pressed; wc -l < pressed")
    return done.output.strip()


@safe.score
async def share_of_right_keys(task: Task, sandbox: Slot) -> float:
    pressed = (await sandbox.read_text("pressed", missing="")).split()
    hits = sum(key == right for key, right in zip(pressed, str(task.answer), strict=False))
    return float(hits == STEPS) if task.data["sparse"] else hits / STEPS


class TableEngine(TokenChat):
    """Samples one call per turn, and ends after the last step. A call's log-probability is on its first token."""

    def __init__(self, trainer: TableTrainer) -> None:
        self.table_tokenizer = toy_tokenizer(_TEXTS, plain=("<tool_call>", "</tool_call>"))
        super().__init__(APIServerConfig(model_name=trainer.model), tokenizer=self.table_tokenizer)
        self.trainer = trainer
        self.rng = random.Random(trainer.seed)

    async def aclose(self) -> None: ...

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, Any]) -> Sampled:
        step = self.table_tokenizer.decode(list(input_ids), skip_special_tokens=False).count(_TURN) - 1
        text, logprob = "It is open.", 0.0
        if step < STEPS:
            logprobs = self.trainer.logprobs_of(step)
            key = self.rng.choices(range(KEYS), [math.exp(each) for each in logprobs])[0]
            text, logprob = _CALL.format(key=key), logprobs[key]
        ids = [*self.table_tokenizer.encode(text), self.table_tokenizer.stop_ids[0]]
        return Sampled(ids, [logprob, *[0.0] * (len(ids) - 1)], "stop", self.trainer.version)


class Reached(TrainerError):
    """Ends the training, because the table has reached the target."""


class TableTrainer:
    """Implements `Trainer`. The right keys of the first `known` steps are likely from the beginning.

    `history` contains, after each step, the number of commands run so far and the expected reward of the table. A step
    raises `Reached` when the expected reward is at least `target`.
    """

    name = "table"
    overlaps = True

    def __init__(
        self, *, seed: int, known: int = 0, target: float = 1.0, rate: float = 6.0, sparse: bool = False
    ) -> None:
        self.model = "table"
        self.sparse = sparse
        self.seed = seed
        self.rate = rate
        self.target = target
        self.busy = BusyClock()
        self.weights = [[0.0] * KEYS for _ in range(STEPS)]
        for step in range(known):
            self.weights[step][int(CODE[step])] = 3.0
        self.version = "0"
        self.history: list[tuple[int, float]] = [(0, self.expected_reward)]
        self.engine = TableEngine(self)

    def logprobs_of(self, step: int) -> list[float]:
        total = math.log(sum(math.exp(each) for each in self.weights[step]))
        return [each - total for each in self.weights[step]]

    @property
    def expected_reward(self) -> float:
        """The expected reward of the current table."""
        right = [math.exp(self.logprobs_of(step)[int(CODE[step])]) for step in range(STEPS)]
        return math.prod(right) if self.sparse else sum(right) / STEPS

    def _presses(self, row: TrainedRow) -> Iterator[tuple[int, int, int]]:
        """Yield the trained calls of a row: the position of each call in the completion, its step and its key."""
        tokens, begin, mask = row.tokens, len(row.row.prompt_ids), row.row.mask
        for place, on in enumerate(mask):
            if on and (place == 0 or not mask[place - 1]):
                end = next((at for at in range(place, len(mask)) if not mask[at]), len(mask))
                decode = self.engine.table_tokenizer.decode
                step = decode(tokens[: begin + place], skip_special_tokens=False).count(_TURN) - 1
                pressed = _PRESSED.search(decode(tokens[begin + place : begin + end], skip_special_tokens=False))
                if pressed is not None:
                    yield place, step, int(pressed[1])

    async def open(self) -> None: ...

    async def logprobs(self, rows: Sequence[TrainedRow]) -> list[list[float]]:
        found = []
        for row in rows:
            own = [0.0] * len(row.row.completion_ids)
            for place, step, key in self._presses(row):
                own[place] = self.logprobs_of(step)[key]
            found.append(own)
        return found

    async def step(self, rows: Sequence[TrainedRow], version: str) -> Mapping[str, float]:
        chances = [[math.exp(each) for each in self.logprobs_of(step)] for step in range(STEPS)]
        presses = [(row.advantage, step, key) for row in rows for _, step, key in self._presses(row)]
        for advantage, step, key in presses:
            for other in range(KEYS):
                self.weights[step][other] += (
                    self.rate * advantage * ((other == key) - chances[step][other]) / len(presses)
                )
        self.version = version
        self.history.append((calls, self.expected_reward))
        if self.expected_reward >= self.target:
            raise Reached(f"the expected reward is {self.expected_reward:.3f}")
        return {"loss": 0.0, "expected_reward": self.expected_reward}

    async def save(self, folder: Path) -> None:
        (folder / "weights.json").write_text(json.dumps(self.weights))

    async def load(self, folder: Path, version: str) -> None:
        self.weights = json.loads((folder / "weights.json").read_text())
        self.version = version

    async def aclose(self) -> None: ...
