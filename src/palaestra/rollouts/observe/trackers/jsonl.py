"""`metrics.jsonl`: the tracker that every run has, one line per call."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.types import JSON
from palaestra.rollouts.observe.trackers.tracker import Shown

logger = logging.getLogger(__name__)

METRICS_SCHEMA = "palaestra.metrics/1"


class MetricsFile:
    """Each line is handed to the operating system at once and never rewritten.

    A last line that a kill or a full disk tore is closed off with a newline, so that what follows stays readable. A
    line that the disk does not take is lost, and said: that a run cannot go on is the journal's to find.
    """

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._clock = clock or SystemClock()
        self._file = path.open("ab", buffering=0)
        self._torn = _torn(path)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a line. A number that is not finite becomes null."""
        line: dict[str, JSON] = {"schema": METRICS_SCHEMA, "time": self._clock.wall(), "step": step, **numbers}
        text = b"\n" * self._torn + msgspec.json.encode(line) + b"\n"
        try:
            self._torn = self._file.write(text) != len(text)
        except OSError as error:
            self._torn = True
            logger.warning("figures are missing in %s: %s", self.path, error)

    def show(self, step: int, name: str, rollouts: Shown) -> None:
        """Nothing: the journal has every rollout whole."""

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    async def aclose(self) -> None:
        """The same."""
        self.close()


def _torn(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
