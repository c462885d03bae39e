"""Reads the steps of a training run, which its trainer writes to `training/steps.jsonl` in the run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from palaestra_slots.core.io.durable_files import read_lines
from palaestra_slots.core.types import JSON

FOLDER, STEPS = "training", "steps.jsonl"

STEP, EVALUATION, WARM_START = "step", "evaluation", "warm-start"
"""The kinds of lines in `steps.jsonl`."""


@dataclass(frozen=True, slots=True)
class StepsVerdict:
    """The number of checked steps and groups, and the first violation."""

    steps: int = 0
    groups: int = 0
    violation: str = ""


def read_steps(run: Path) -> Iterator[dict[str, JSON]]:
    """Yield the metrics of a training run's steps (`kind` step, or warm-start for supervised ones) and evaluations
    (`kind` evaluation), in order, or none if the run trained nothing. A damaged line is left out."""
    for line in read_lines(run / FOLDER / STEPS):
        if line.get("kind") in (STEP, EVALUATION, WARM_START) and type(line.get("step")) is int:
            yield line
