"""Trainers that learn from rollouts, and the protocols that deliver rollouts to trainers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaestra_train.config import TrainingConfig
    from palaestra_train.train_run import TrainingReport, train
    from palaestra_train.trainer import TrainedRow, Trainer

_MODULES = {
    "TrainedRow": "trainer",
    "Trainer": "trainer",
    "TrainingConfig": "config",
    "TrainingReport": "train_run",
    "train": "train_run",
}

__all__ = [
    "TrainedRow",
    "Trainer",
    "TrainingConfig",
    "TrainingReport",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'palaestra_train' has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    value: object = getattr(
        import_module(module if module.startswith("palaestra") else f"palaestra_train.{module}"), attribute or name
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
