"""`BusyClock` measures how long a training run samples, runs slots or computes. The rest of the time is overhead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from palaestra.rollouts.events import Alive, Handlers

_SLOT_STAGES = frozenset({"prepare", "setup", "tool", "user", "seal", "grade"})
"""Stages in which a slot or a user works."""


class BusyClock:
    """Counts the seconds in which a model samples, a slot works or a trainer computes; overlapping work counts once. It
    subscribes to a run's events to learn when slots work."""

    def __init__(self) -> None:
        self._stages: set[tuple[str, str]] = set()
        self._others = 0
        self._since = 0.0
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """The busy seconds so far."""
        return self._seconds + (time.monotonic() - self._since if self._is_working else 0.0)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time of the block."""
        self._settle()
        self._others += 1
        try:
            yield
        finally:
            self._settle()
            self._others -= 1

    def handlers(self) -> Handlers:
        return {Alive: self._on_alive}

    def _on_alive(self, event: Alive) -> None:
        if event.entered in _SLOT_STAGES:
            self._settle()
            self._stages.add((event.name, event.entered))
        elif event.left in _SLOT_STAGES:
            self._settle()
            self._stages.discard((event.name, event.left))

    @property
    def _is_working(self) -> bool:
        return bool(self._stages) or self._others > 0

    def _settle(self) -> None:
        now = time.monotonic()
        if self._is_working:
            self._seconds += now - self._since
        self._since = now
