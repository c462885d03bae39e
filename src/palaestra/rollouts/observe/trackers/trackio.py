"""Trackio, in the worker's process: figures as a run's history, kept on this machine.

It writes where Trackio always does (its own variable `TRACKIO_DIR` moves that), so that `trackio show` finds the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import trackio


class TrackioClient:
    """One run, without measurements of the machine."""

    def __init__(self, label: Mapping[str, Any]) -> None:
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        known = inspect.signature(trackio.init).parameters  # the last came later than the others
        self._run = trackio.init(
            project=label["project"],
            name=label["name"],
            group=label["group"],
            config=dict(label["settings"]),
            resume="allow",
            **{name: value for name, value in quiet.items() if name in known},
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add to the history."""
        self._run.log(dict(numbers), step=step)

    def show(self, step: int, name: str, rows: list[tuple[str, float]]) -> None:
        """Texts and scores, one entry each: a table of Trackio's would need pandas."""
        for number, (text, score) in enumerate(rows):
            self._run.log({f"{name}/{number}/text": text, f"{name}/{number}/score": score}, step=step)

    def finish(self) -> None:
        """Send the rest."""
        self._run.finish()
