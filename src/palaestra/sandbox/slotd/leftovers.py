"""Output pipes that nobody waits for any more: emptied, slowly, so that a daemon which still holds one can write."""

from __future__ import annotations

import os

from .executions import Rounds

_EVERY_S, _BYTES, _MOST = 0.05, 256 << 10, 32


class Leftovers:
    """Those of one slot. Nobody reads what comes, so there is no hurry; beyond some, the oldest is closed."""

    def __init__(self, loop: Rounds) -> None:
        self._loop = loop
        self._pipes: list[int] = []

    def add(self, fd: int) -> None:
        """One more, which does not block and is closed here at its end."""
        self._pipes.append(fd)
        if len(self._pipes) == 1:
            self._loop.later(_EVERY_S, self._drain)
        if len(self._pipes) > _MOST:
            os.close(self._pipes.pop(0))

    def close(self) -> None:
        """The slot is dead."""
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()

    def _drain(self) -> None:
        for fd in list(self._pipes):
            try:
                if not os.read(fd, _BYTES):
                    self._pipes.remove(fd)
                    os.close(fd)
            except BlockingIOError:
                continue
        if self._pipes:
            self._loop.later(_EVERY_S, self._drain)
