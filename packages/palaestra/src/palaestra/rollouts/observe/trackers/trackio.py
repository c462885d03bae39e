"""The Trackio client of the worker process: metrics as a run's history, kept on this machine.

It writes to Trackio's usual folder (which the variable `TRACKIO_DIR` changes), so that `trackio show` finds the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import trackio


class TrackioClient:
    """One run of Trackio, which records no system metrics of the machine."""

    def __init__(self, label: Mapping[str, Any]) -> None:
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        known = inspect.signature(trackio.init).parameters  # a later release added the last parameter
        self._run = trackio.init(
            project=label["project"],
            name=label["name"],
            group=label["group"],
            config=dict(label["settings"]),
            resume="allow",
            **{name: value for name, value in quiet.items() if name in known},
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add metrics to the history."""
        self._run.log(dict(numbers), step=step)

    def show(self, step: int, name: str, rows: list[tuple[str, float]]) -> None:
        """Show texts and scores as one entry each, since Trackio's tables need pandas."""
        for number, (text, score) in enumerate(rows):
            self._run.log({f"{name}/{number}/text": text, f"{name}/{number}/score": score}, step=step)

    def finish(self) -> None:
        """Send the remaining data."""
        self._run.finish()
