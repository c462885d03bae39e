"""`TrainingConfig`: the settings of a training run, apart from those of its environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from palaestra.core.config import Settings


class TrainingConfig(Settings, use_attribute_docstrings=True):
    """How long to train, on what, and when to evaluate, save and stop."""

    steps: int = Field(default=100, ge=1)
    """The number of optimizer steps."""

    groups: int = Field(default=8, ge=1)
    """The number of groups to train on in each step. Groups with equal scores do not count."""

    most_draws: float = Field(default=3.0, ge=1)
    """The maximum number of tasks drawn for one step, as a multiple of `groups`. Groups with equal scores are
    replaced."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """The learning rate, which is constant."""

    scale_advantages: bool = True
    """Divide advantages by the standard deviation of their group's rewards."""

    max_off_policy: int = Field(default=0, ge=0)
    """Refuse rows sampled by weights that are more than this many versions old."""

    max_difference: float = Field(default=0.1, gt=0)
    """Refuse rows whose sampled tokens differ by more than this many nats on average between sampler and trainer."""

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

    max_tasks: int = Field(default=1000, ge=2)
    """The maximum number of tasks taken from an environment, which may yield tasks without end."""

    lora_rank: int = Field(default=32, ge=0)
    """The rank of the adapter that `tinker` trains; 0 trains all weights, as `trl` does."""


TrainerName = Literal["trl", "tinker"]
