"""Where the numbers of a run go: `Tracker`, and what a tracker is told about the run. No I/O.

A tracker takes figures and shows them; it is never asked for one, and no record depends on it. Invariant: it neither
holds the run up nor breaks it. `metrics.jsonl` is always one of them; what reaches a service goes through `child`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from palaestra.core.types import JSON

Shown: TypeAlias = Sequence[tuple[str, float]]
"""Rollouts to look at: each as text, with its score."""


@dataclass(frozen=True, slots=True)
class RunLabel:
    """How a run is filed. `run_id` is the same when the run is gone on with; `folder` is the run's own; `group` is what
    else it belongs to, such as the training that it feeds."""

    project: str
    name: str
    run_id: str
    folder: Path
    settings: Mapping[str, JSON] = field(default_factory=dict)
    mode: str | None = None
    group: str | None = None

    def to_json(self) -> dict[str, JSON]:
        """For another process."""
        return asdict(self) | {"folder": str(self.folder), "settings": dict(self.settings)}


class Tracker(Protocol):
    """Takes a run's figures as they come. `step` is how many groups have ended and never goes back."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take figures. Returns at once; what fails is said once and is not raised."""
        ...

    def show(self, step: int, name: str, rollouts: Shown) -> None:
        """Take rollouts to look at. A tracker for numbers alone leaves them."""
        ...

    async def aclose(self) -> None:
        """Hand over what is left, for as long as that may take. Idempotent."""
        ...
