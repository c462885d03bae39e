"""`Tracker`, which shows the metrics of a run, and `RunLabel`, the names under which the tracker files these metrics.
This module does no I/O.

Invariant: a tracker never breaks the run, and delays only its end. Metrics always go to `metrics.jsonl`; services are
reached through `subprocess_tracker`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from palaestra_slots.core.types import JSON

Shown: TypeAlias = Sequence[tuple[str, float]]
"""Rollouts to display: each as text, with its score."""


@dataclass(frozen=True, slots=True)
class RunLabel:
    """The names under which a run is filed, with its folder and its settings. A resumed run keeps its `run_id`. `group`
    is a larger unit, such as the training run that this run feeds."""

    project: str
    name: str
    run_id: str
    folder: Path
    settings: Mapping[str, JSON] = field(default_factory=dict)
    mode: str | None = None
    group: str | None = None

    def to_json(self) -> dict[str, JSON]:
        """Return the label as JSON data, for the worker process."""
        return asdict(self) | {"folder": str(self.folder), "settings": dict(self.settings)}


class Tracker(Protocol):
    """Receives a run's metrics. `step` is the number of finished groups and never decreases."""

    def log(self, step: int, numbers: Mapping[str, float | str]) -> None:
        """Record metrics, as numbers or strings. Does not block. The first failure is reported; none is raised."""
        ...

    def show(self, step: int, name: str, rollouts: Shown) -> None:
        """Display rollouts. A tracker that shows only numbers ignores them."""
        ...

    async def aclose(self) -> None:
        """Send the remaining data within a time limit. Idempotent."""
        ...
