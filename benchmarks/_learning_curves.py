"""Draws the learning curves of training runs, for the benchmarks that train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from palaestra.rollouts.observe.training_steps import EVALUATION, STEP, read_steps
from palaestra_slots.core.types import JSON


def curve(run: Path, kind: str) -> list[tuple[JSON, JSON]]:
    """Return the steps of a run with the mean reward of each: that of the training, or that of the held-out tasks."""
    return [(line["step"], line["reward"]) for line in read_steps(run) if line["kind"] == kind]


def plot(runs: Mapping[str, Path], picture: Path, title: str, *, warm: int = 0) -> None:
    """Draw the rewards of steps and of held-out tasks of runs, by their names. `warm` is the number of steps of a warm
    start."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, run) in enumerate(runs.items()):
        for kind, style in ((STEP, {"alpha": 0.35}), (EVALUATION, {"marker": "o", "label": f"held out, {name}"})):
            if drawn := curve(run, kind):
                axes.plot(*zip(*drawn, strict=True), color=f"C{number}", **style)
    if warm:
        axes.axvspan(0, warm, color="0.93", label="warm start")
    axes.set(xlabel="step", ylabel="mean sampled reward", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
