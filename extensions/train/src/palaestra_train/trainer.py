"""Defines `Trainer`, which turns rows with advantages into new weights, and owns the engine that samples with these
weights. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from palaestra.rollouts.export.token_rows import ExportedRow
from palaestra_tokens.chat_server import ServerEngine
from palaestra_tokens.ledger import UNTRAINED
from palaestra_train.busy import BusyClock


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """One segment of a rollout, with the advantage of its trained tokens.

    `own[T]` are the trainer's log-probabilities of the completion, and `weights[T]` the importance weight of each of
    its tokens, 0 for tokens that must not be trained. Both are empty until `importance.corrected` has set them.
    """

    row: ExportedRow
    advantage: float
    own: Sequence[float] = ()
    weights: Sequence[float] = ()

    @property
    def tokens(self) -> list[int]:
        """The tokens of the prompt and the completion."""
        return [*self.row.prompt_ids, *self.row.completion_ids]

    @property
    def logprobs(self) -> list[float]:
        """The sampler's log-probabilities, one for each token of the completion; 0.0 where nothing was sampled."""
        return self.row.logprobs or [0.0] * len(self.row.completion_ids)

    @property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return sum(self.row.mask)

    @property
    def importance(self) -> list[float]:
        """The importance weight of each token of the completion; 0.0 where nothing is trained."""
        return [float(each) for each in (self.weights or self.row.mask)]


Weigh: TypeAlias = Callable[[Sequence[TrainedRow], Sequence[Sequence[float]]], Sequence[TrainedRow]]
"""Is given the rows of a step and the trainer's log-probabilities of their completions before it. Returns the rows with
`own` and `weights`, in their order; rows may be left out. Raises `TrainerError` to refuse the step."""


def sequence_row(
    tokens: list[int],
    masks: Sequence[int],
    logprobs: Sequence[float],
    score: float | None,
    name: str,
    versions: Sequence[tuple[int, int, str]],
) -> ExportedRow | None:
    """Return a sequence as a row. Returns None if no token is trained, or if the first token is trained, because a row
    needs a prompt."""
    start = next((place for place, mask in enumerate(masks) if mask != UNTRAINED), None)
    if not start:  # without a prompt, no token predicts the first one
        return None
    on = [int(mask != UNTRAINED) for mask in masks[start:]]
    policies = {version for _, _, version in versions}
    return ExportedRow(
        prompt_ids=tokens[:start],
        completion_ids=tokens[start:],
        mask=on,
        logprobs=[logprob * kept for logprob, kept in zip(logprobs[start:], on, strict=True)],
        reward=score,
        group_id=name.partition("/")[0],
        segment=0,
        policy_version=next(iter(policies)) if len(policies) == 1 else None,
        versions=[(begin - start, stop - start, version) for begin, stop, version in versions],
        spans=[],
        segments=1,
        rollout_id=name,
        task_id="",
        index=int(name.partition("/")[2]),
        outcome="",
        reason="start",
        finish_reason="",
        source="engine",
    )


class Trainer(Protocol):
    """Trains a model. Calls never overlap. No rollout is in flight during `step`, `save` or `load`, unless the trainer
    `overlaps`.

    Each method raises `TrainerError` if the trainer fails, and `ConfigError` for settings or a checkpoint that the
    trainer cannot use.
    """

    name: str
    model: str
    """Identifies the model whose weights are trained; checkpoints of other models are refused."""

    busy: BusyClock
    """The clock of busy time, which runs while the engine samples."""

    overlaps: bool
    """Whether the engine can sample while the trainer takes a step. Requests in progress then continue with the new
    weights, and each token is recorded with the version that sampled it."""

    @property
    def engine(self) -> ServerEngine:
        """The engine that samples with the current weights, once `open` has returned. The run starts and closes it."""
        ...

    async def open(self) -> None:
        """Load the model."""
        ...

    async def step(self, rows: Sequence[TrainedRow], version: str, weigh: Weigh) -> Mapping[str, float]:
        """Take one optimizer step on the rows that `weigh` returns, and let the engine sample with the new weights as
        `version`. `weigh` is called once, before the weights change. If it raises, the state must be loaded again
        before another step. Returns metrics, including `loss`."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights and the optimizer's state into a new folder."""
        ...

    async def load(self, folder: Path, version: str) -> None:
        """Continue from the files that `save` wrote; the engine samples with these weights as `version`."""
        ...

    async def aclose(self) -> None:
        """Release the model. Idempotent."""
        ...
