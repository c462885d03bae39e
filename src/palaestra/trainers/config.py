"""`TrainingConfig`: the settings of a training, apart from those of its environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from palaestra.core.config import Settings


class TrainingConfig(Settings, use_attribute_docstrings=True):
    """How long to train, on what, and when to evaluate, save and stop."""

    steps: int = Field(default=100, ge=1)
    """Steps of the optimizer."""

    groups: int = Field(default=8, ge=1)
    """Groups with different scores in each step."""

    most_draws: float = Field(default=3.0, ge=1)
    """Tasks drawn for one step, at most, as a multiple of `groups`: groups of equal scores are replaced."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """The learning rate, constant."""

    scale_advantages: bool = True
    """Divide advantages by the standard deviation of their group's rewards."""

    max_off_policy: int = Field(default=0, ge=0)
    """Rows that weights of more than this many versions before the trained ones sampled are refused."""

    max_difference: float = Field(default=0.1, gt=0)
    """Rows whose log-probabilities differ by more nats between sampler and trainer are refused."""

    eval_every: int = Field(default=10, ge=0)
    """Steps between evaluations on held-out tasks; 0 evaluates never."""

    eval_tasks: int = Field(default=16, ge=1)
    """Tasks that are never trained on, drawn from the seed."""

    eval_samples: int = Field(default=1, ge=1)
    """Rollouts of each held-out task in an evaluation."""

    save_every: int = Field(default=1, ge=1)
    """Steps between checkpoints. A resumed training takes the steps since the last one again, from the record."""

    keep: int = Field(default=2, ge=1)
    """The latest checkpoints that are kept, besides the best."""

    patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations without a better one."""

    target: float | None = None
    """Stop when the mean reward of an evaluation reaches this."""

    max_tasks: int = Field(default=1000, ge=2)
    """Tasks taken from an environment without an end, or with more."""

    lora_rank: int = Field(default=32, ge=0)
    """The rank of the adapter that `tinker` trains; 0 trains all weights, as `trl` does."""


TrainerName = Literal["trl", "tinker"]
