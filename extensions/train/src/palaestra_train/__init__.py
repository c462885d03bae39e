"""Trainers that learn from rollouts, and the protocols that deliver rollouts to trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palaestra_slots.core.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
