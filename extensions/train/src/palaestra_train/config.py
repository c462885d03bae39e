"""`TrainingConfig`: the settings of a training run, apart from those of its environment."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from palaestra_slots.core.config import Settings

LossName: TypeAlias = Literal["importance_sampling", "ppo", "dapo", "cispo", "gspo"]

CLIPS: dict[LossName, tuple[float, float]] = {
    "ppo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "cispo": (1.0, 4.0),
    "gspo": (3e-4, 4e-4),
}
"""How far each loss lets the ratio of probabilities be below and above 1. Sources: PPO, arXiv 1707.06347; DAPO, arXiv
2503.14476; CISPO, arXiv 2506.13585, which has no lower bound, with the cap 5 of ScaleRL, arXiv 2510.13786; GSPO, arXiv
2507.18071."""

ON_POLICY_NATS, OFF_POLICY_NATS = 0.1, 2.0
"""The default of `max_difference`. In bfloat16, samplers of the same weights differ by 0.03 to 0.04 nats on average;
other weights or another tokenizer are above 0.5."""


class TrainingConfig(Settings, use_attribute_docstrings=True):
    """How long to train, on what, and when to evaluate, save and stop."""

    steps: int = Field(default=100, ge=1)
    """The number of optimizer steps."""

    groups: int = Field(default=8, ge=1)
    """The number of groups to train on in each step. Groups with equal scores do not count: as many groups are drawn at
    once as the last steps needed."""

    most_draws: float = Field(default=3.0, ge=1)
    """The maximum number of tasks drawn for one step, as a multiple of `groups`. Groups with equal scores are
    replaced."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """The learning rate, at its highest."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes after the warm-up: not at all, or down to 0 at the last step."""

    warmup: int = Field(default=0, ge=0)
    """The number of steps in which the learning rate rises from 0."""

    advantage: Literal["grpo", "rloo"] = "grpo"
    """A rollout's advantage: its reward minus the mean of its group (`grpo`), or minus the mean of the group's other
    rollouts (`rloo`)."""

    scale_advantages: bool = True
    """Divide advantages by the standard deviation of their group's rewards. `rloo` never does."""

    loss: LossName | None = None
    """The loss: policy gradient with truncated importance weights (`importance_sampling`), or one that clips the ratio
    of the new to the sampler's probability. None: `importance_sampling`, or `dapo` if rows may be off policy."""

    clip_low: float | None = Field(default=None, gt=0)
    """How far the ratio may be below 1; None takes the value of the loss's paper."""

    clip_high: float | None = Field(default=None, gt=0)
    """How far the ratio may be above 1; None takes the value of the loss's paper."""

    kl_weight: float = Field(default=0.0, ge=0)
    """The weight of the KL divergence from the model before training."""

    importance_cap: float = Field(default=2.0, ge=1)
    """The maximum importance weight of a token: larger ratios of the trainer's to the sampler's probability are
    truncated."""

    importance_limit: float = Field(default=8.0, gt=1)
    """Do not train tokens whose probability differs by more than this factor between sampler and trainer."""

    max_off_policy: int | None = Field(default=None, ge=0)
    """Refuse rows sampled by weights that are more than this many versions old. None: `async_steps`, and no limit with
    batches of a trajectory API."""

    max_difference: float | None = Field(default=None, gt=0)
    """End the training if the log-probabilities of sampler and trainer differ by more than this many nats on average
    over the tokens of a step. None: 0.1, or 2 if rows may be off policy."""

    async_steps: int = Field(default=0, ge=0)
    """How many steps the rollouts may be ahead of the weights. 0: rollouts and steps take turns."""

    least_rate: float = Field(default=0.1, ge=0, lt=1)
    """Set a task aside while the remembered mean of its rewards is below this value."""

    most_rate: float = Field(default=0.9, gt=0)
    """Set a task aside while the remembered mean of its rewards is above this value."""

    replay: float = Field(default=1.0, ge=0, le=1)
    """The share of draws that choose among all tasks. 1 draws all tasks alike, in random order, so that no task is set
    aside."""

    eval_every: int = Field(default=10, ge=0)
    """The number of steps between evaluations on held-out tasks; 0 disables evaluations."""

    eval_tasks: int = Field(default=16, ge=1)
    """The number of tasks that are never trained on, drawn with the seed."""

    eval_samples: int = Field(default=1, ge=1)
    """The number of rollouts of each held-out task in an evaluation."""

    save_every: int = Field(default=1, ge=1)
    """The number of steps between checkpoints. A resumed training run repeats the steps since the last checkpoint from
    the record."""

    keep: int = Field(default=2, ge=1)
    """The number of latest checkpoints that are kept, in addition to the best."""

    patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations in a row that are not better than the best one."""

    target: float | None = None
    """Stop when the mean reward of an evaluation reaches this value."""

    warm_start: str | None = None
    """Train on demonstrations before the first rollouts: `oracle` plays the reference solutions of the training tasks;
    or a run, or a JSONL file in the format of `export --to openai`."""

    warm_steps: int = Field(default=10, ge=1)
    """The number of optimizer steps of the warm start, each on `groups` demonstrations."""

    only: Literal["warm-start"] | None = None
    """End after the warm start: supervised fine-tuning without rollouts, apart from evaluations."""

    pass_memory: float | None = Field(default=None, gt=0)
    """The most memory of one forward and backward pass, in GiB; a step has as many passes as needed. None: 0.125 on a
    CPU, half of the free memory of a GPU."""

    max_tasks: int = Field(default=1000, ge=2)
    """The maximum number of tasks taken from an environment, which may yield tasks without end."""

    lora_rank: int = Field(default=32, ge=0)
    """The rank of the adapter that `tinker` trains; 0 trains all weights, as `trl` does."""

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.least_rate >= self.most_rate:
            raise ValueError(f"least_rate ({self.least_rate:g}) must be below most_rate ({self.most_rate:g})")
        if self.only and self.warm_start is None:
            raise ValueError("only: warm-start needs warm_start, for example oracle")
        if self.max_off_policy is not None and self.max_off_policy < self.async_steps:
            raise ValueError(
                f"max_off_policy ({self.max_off_policy}) must be at least async_steps ({self.async_steps}), or rows of "
                "rollouts that are ahead would all be refused"
            )
        return self

    @property
    def warm(self) -> int:
        """The number of steps of the warm start, which come first; 0 without one."""
        return self.warm_steps if self.warm_start is not None else 0

    @property
    def last_step(self) -> int:
        """The number of the last step. Steps of the warm start count."""
        return self.warm if self.only else self.warm + self.steps

    @property
    def most_behind(self) -> int:
        """The maximum number of versions by which rows may be old."""
        return self.async_steps if self.max_off_policy is None else self.max_off_policy

    @property
    def most_nats(self) -> float:
        """The limit of `max_difference`."""
        if self.max_difference is not None:
            return self.max_difference
        return OFF_POLICY_NATS if self.most_behind else ON_POLICY_NATS

    @property
    def loss_name(self) -> LossName:
        """The loss. Off policy, it clips: several batches of one old policy would otherwise push a token on and on."""
        return self.loss or ("dapo" if self.most_behind else "importance_sampling")

    @property
    def clips(self) -> tuple[float, float]:
        """How far the loss lets the ratio be below and above 1; infinity if the loss does not clip."""
        low, high = CLIPS.get(self.loss_name, (math.inf, math.inf))
        return self.clip_low or low, self.clip_high or high

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: the highest one in the warm start, and then the numbers
        of transformers' schedulers `constant_with_warmup`, `linear` and `cosine`, whose functions need torch."""
        if step < self.warm:
            return self.learning_rate
        step -= self.warm
        if step < self.warmup:
            return self.learning_rate * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        left = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[self.schedule]
        return self.learning_rate * max(0.0, left)


TrainerName = Literal["trl", "tinker"]
