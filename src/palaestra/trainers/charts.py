"""Draws the curves of a training run for its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from palaestra.core.types import JSON
from palaestra.rollouts.export.html import Chart
from palaestra.trainers.checkpoints import EVALUATION, STEP, read_steps


def training_charts(run: Path) -> list[Chart]:
    """Return the charts of the run in a folder, or none if the run trained nothing."""
    lines = list(read_steps(run))
    steps = [line for line in lines if line.get("kind") == STEP]
    evaluations = [line for line in lines if line.get("kind") == EVALUATION]
    charts = [
        Chart("reward", [("training tasks", _points(steps, "reward")), ("held out", _points(evaluations, "reward"))]),
        Chart("loss", [("loss", _points(steps, "loss"))]),
        Chart("sampler to trainer, nats", [("largest mean of a row", _points(steps, "logprob_difference"))]),
        Chart(
            "seconds of a step",
            [("rollouts", _points(steps, "rollout_s")), ("training", _points(steps, "train_s"))],
        ),
        Chart("share of overhead", [("overhead", _points(steps, "overhead"))]),
    ]
    return charts if lines else []


def _points(lines: Sequence[dict[str, JSON]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
