"""`BatchTrainer` takes batches from a trajectory API and trains on them. Any environment may feed the API.

A batch is written to disk before the trainer uses it, and stays there until a checkpoint includes it. A trainer that
was killed and restarted therefore trains exactly once on each batch that it received. The API forgets a batch once it
has sent the batch, so a batch is lost if the answer does not arrive. The protocol has no means to prevent that.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path

import msgspec

from palaestra.rollouts.observe.training_steps import STEP
from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import ConfigError, TrainerError, TrainerRefused, TrainerUnavailable
from palaestra_slots.core.io.durable_files import replaced, writing
from palaestra_train.advantages import EQUAL, TOO_LONG, WITHOUT_TOKENS, Batch, advantages
from palaestra_train.atropos.connection import TrajectoryClient
from palaestra_train.atropos.groups import VERSIONS
from palaestra_train.atropos.wire import RequestRefusal, ScoredData, checked
from palaestra_train.checkpoints import TrainingFiles, TrainingState
from palaestra_train.config import TrainingConfig
from palaestra_train.trainer import TrainedRow, Trainer, sequence_row

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between requests for a batch."""

PATIENCE_S = 600.0
"""Seconds that the API may be silent before the training run ends."""


class BatchTrainer:
    """Trains with `trainer`, which must be open. `folder` holds the training run's files; `sequences` is the number of
    sequences in a batch. `run` returns after the last step."""

    def __init__(
        self,
        trainer: Trainer,
        config: TrainingConfig,
        client: TrajectoryClient,
        folder: Path,
        *,
        sequences: int,
        most_tokens: int,
        note: Callable[[str], None] = lambda text: None,
        clock: Clock | None = None,
    ) -> None:
        self.trainer = trainer
        self.config = config
        self._client = client
        self._folder = folder
        self._sequences = sequences
        self._most_tokens = most_tokens
        self._note = note
        self._clock = clock or SystemClock()

    async def run(self) -> TrainingState:
        """Train up to the last step. Raises `ConfigError`, `DiskError` and `TrainerError`, the latter also if the API
        is gone."""
        self._files = TrainingFiles(self._folder)
        self._batches = self._folder / "batches"
        with writing(self._batches):
            self._batches.mkdir(exist_ok=True)
        state = self._files.latest()
        if state is None:
            state = TrainingState(trainer=self.trainer.name, model=self.trainer.model)
        else:
            state.check(self.trainer.name, self.trainer.model)
            await self.trainer.load(self._files.checkpoint(state.step), str(state.step))
            self._note(f"continues after step {state.step}")
        await self._register(state.step)
        while state.step < self.config.steps:
            groups = self._received(state.step + 1) or await self._next_batch(state.step + 1)
            await self._step(state, groups)
            if state.step % self.config.save_every == 0 or state.step == self.config.steps:
                part = self._files.begin(state.step)
                await self.trainer.save(part)
                await asyncio.to_thread(self._files.commit, part, state, self.config.keep)
                self._remove_batches(state.step)
        return state

    async def _register(self, step: int) -> None:
        answer = await self._asked(
            "POST",
            "/register",
            {
                "wandb_group": None,
                "wandb_project": None,
                "batch_size": self._sequences,
                "max_token_len": self._most_tokens,
                "checkpoint_dir": "",
                "save_checkpoint_interval": -1,
                "starting_step": step,
                "num_steps": self.config.steps,
            },
        )
        if answer is None:
            raise TrainerRefused(f"{self._client.url} did not register the trainer")

    async def _next_batch(self, step: int) -> list[ScoredData]:
        """Wait for a batch and store it on the disk."""
        while True:
            answer = await self._asked("GET", "/batch")
            if answer is not None and answer.get("batch"):
                break
            await self._clock.sleep(POLL_S)
        try:
            groups = [checked(each) for each in msgspec.convert(answer["batch"], list[ScoredData], strict=False)]
            self._check_ids(groups)
        except (msgspec.ValidationError, RequestRefusal) as error:
            raise TrainerRefused(f"{self._client.url} sent a batch that cannot be trained on: {error}") from None
        path = self._batch_file(step)
        with writing(path), replaced(path) as file:
            file.write(msgspec.json.encode(groups))
        return groups

    def _check_ids(self, groups: Sequence[ScoredData]) -> None:
        """Raise `RequestRefusal` for a token id that the model does not have, which means that the environment uses a
        different tokenizer."""
        tokenizer = getattr(self.trainer.engine, "tokenizer", None)
        if not isinstance(tokenizer, Sized):
            return
        count = len(tokenizer)
        for number, group in enumerate(groups):
            wrong = [each for row in group.tokens for each in (min(row, default=0), max(row, default=0))]
            wrong = [each for each in wrong if not 0 <= each < count]
            if wrong:
                field = f"batch[{number}].tokens"
                message = (
                    f"{field} contains the id {wrong[0]}, but model '{self.trainer.model}' has only {count} ids; use "
                    "the model's tokenizer in the environment"
                )
                raise RequestRefusal(422, message, field=field)

    def _received(self, step: int) -> list[ScoredData] | None:
        """Return the batch of a step, or None if no earlier process received it."""
        path = self._batch_file(step)
        try:
            return msgspec.json.decode(path.read_bytes(), type=list[ScoredData])
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} cannot be read: {error}. Remove it to train on the next batch instead") from None

    def _remove_batches(self, step: int) -> None:
        for path in self._batches.glob("*.json"):
            if int(path.stem) <= step:
                path.unlink(missing_ok=True)

    def _batch_file(self, step: int) -> Path:
        return self._batches / f"{step:06d}.json"

    async def _step(self, state: TrainingState, groups: Sequence[ScoredData]) -> None:
        config = self.config
        batch = scored_batch(
            groups,
            most_tokens=self._most_tokens,
            scaled=config.scale_advantages,
            advantage=config.advantage,
            version=state.step,
            most_behind=config.max_off_policy,
        )
        for name in batch.late:
            self._note(f"step {state.step + 1}: {name} is dropped, because older weights than allowed sampled it")
        version = str(state.step + 1)
        numbers: Mapping[str, float] = {"loss": 0.0}
        if batch.rows:
            numbers = await self.trainer.step(batch.rows, version, batch.weighing(config, state.step + 1))
        else:
            self._note(f"step {version}: no row of the batch can be trained on ({dict(batch.refused)})")
        if not math.isfinite(numbers["loss"]):
            raise TrainerError(f"step {version}: the loss is {numbers['loss']}; resume with a lower learning_rate")
        state.step += 1
        reward = statistics.fmean(batch.rewards)
        self._files.log(
            STEP,
            state.step,
            {
                "reward": reward,
                **batch.mismatch.numbers(),
                **batch.staleness(int(version) - 1),
                "rows": len(batch.rows),
                "groups": batch.groups,
                "dull_groups": batch.refused[EQUAL],
                **batch.refused,
                **numbers,
            },
        )
        self._note(f"step {state.step}/{self.config.steps}: reward {reward:.3f}, loss {numbers['loss']:.3g}")

    async def _asked(
        self, method: str, path: str, payload: Mapping[str, object] | None = None
    ) -> dict[str, object] | None:
        """Send a request, and return the answer's body, or None if the request may succeed later. If the API is silent,
        the request is repeated for up to `PATIENCE_S`. Raises `TrainerRefused` for a permanent refusal."""
        until = self._clock.monotonic() + PATIENCE_S
        while True:
            try:
                answer = await self._client.ask(method, path, payload)
            except TrainerUnavailable:
                if self._clock.monotonic() > until:
                    raise
                await self._clock.sleep(POLL_S)
                continue
            if answer.status in (401, 403, 404, 409, 422):
                raise TrainerRefused(f"{self._client.url}{path}: {answer.detail}")
            return answer.body if answer.status == 200 and isinstance(answer.body, dict) else None


def scored_batch(
    groups: Sequence[ScoredData],
    *,
    most_tokens: int | None = None,
    scaled: bool = True,
    advantage: str = "grpo",
    version: int = 0,
    most_behind: int | None = None,
) -> Batch:
    """Return the rows of a batch. Rows of more than `most_tokens` tokens, groups without log-probabilities, and groups
    with equal scores and no advantages are left out, and so are groups that weights more than `most_behind` versions
    older than `version` sampled. The advantages are those that a group contains or, if it contains none, those that
    `trainers.advantages` computes. Raises `TrainerRefused` if `most_behind` is set and a group has no versions.
    """
    batch = Batch()
    for number, group in enumerate(groups):
        batch.rewards += group.scores
        batch.rollouts += len(group.scores)
        if not group.inference_logprobs:
            batch.refused[WITHOUT_TOKENS] += len(group.tokens)
            continue
        if not group.advantages and len(set(group.scores)) == 1:
            batch.refused[EQUAL] += 1
            continue
        versions = _versions(group, number)
        if versions is None and most_behind is not None:
            raise TrainerRefused(
                f"group {number} of the batch has no policy versions, so max_off_policy cannot be enforced: feed it "
                "with `palaestra feed` from the server that the trainer serves, or leave max_off_policy out"
            )
        given = [_only(each) for each in group.advantages] if group.advantages else None
        gains = given or advantages(group.scores, scaled=scaled, kind=advantage)
        made = []
        rows = zip(group.tokens, group.masks, group.inference_logprobs, group.scores, gains, strict=True)
        for place, (tokens, masks, logprobs, score, gain) in enumerate(rows):
            if most_tokens is not None and len(tokens) > most_tokens:
                batch.refused[TOO_LONG] += 1
                continue
            row = sequence_row(tokens, masks, logprobs, score, f"{number}/{place}", versions[place] if versions else ())
            if row is not None:
                made.append(TrainedRow(row, gain))
        batch.keep(made, group.delivery_id or f"group {number} of the batch", version, most_behind)
    return batch


def _versions(group: ScoredData, number: int) -> list[list[tuple[int, int, str]]] | None:
    """Return the policy versions of each row's sampled spans, or None if the group has none. Raises `TrainerRefused` if
    they are damaged."""
    found = (group.group_overrides or {}).get(VERSIONS)
    if not found:
        return None
    try:
        versions = msgspec.convert(found, list[list[tuple[int, int, str]]])
    except msgspec.ValidationError as error:
        raise TrainerRefused(f"group {number} of the batch: group_overrides.{VERSIONS}: {error}") from None
    if len(versions) != len(group.tokens):
        raise TrainerRefused(
            f"group {number} of the batch: group_overrides.{VERSIONS}: {len(versions)} entries for "
            f"{len(group.tokens)} sequences"
        )
    return versions


def _only(values: Sequence[float]) -> float:
    """Return the one advantage of a row's tokens, ignoring zeros, or 0.0 if all are zero. Raises `ConfigError` if there
    are several."""
    found = {value for value in values if value}
    if len(found) > 1:
        raise ConfigError("tokens of one sequence have different advantages, but this trainer accepts one per sequence")
    return found.pop() if found else 0.0
