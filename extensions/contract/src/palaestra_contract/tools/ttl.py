"""Expires trajectories that make no more calls, so that their owner can free their resources.

Invariant: a trajectory in use never expires. Calls of an expired trajectory (one of the latest `_MOST_EXPIRED`) are
refused until a caller releases it by name, so that no client mistakes a new workspace for its old one. A trajectory
whose calls all failed has nothing to lose; it is dropped, and its later calls are not refused.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import StaleLease

logger = logging.getLogger(__name__)

Busy: TypeAlias = Callable[[str], Awaitable[bool]]
"""Returns whether a trajectory is active without a call, because it has a background process."""

_MOST_EXPIRED = 10_000
"""The maximum number of expired trajectories that are remembered."""


class Leases:
    """Trajectories with a time to live: they expire `ttl_s` seconds after their last call."""

    def __init__(self, ttl_s: float, clock: Clock | None = None) -> None:
        self.ttl_s = ttl_s
        self._clock = clock or SystemClock()
        self._calls: dict[str, int] = {}
        self._used: dict[str, float] = {}
        self._worked: set[str] = set()
        self._expired: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    @contextmanager
    def in_use(self, trajectory_id: str) -> Iterator[None]:
        """Mark a trajectory as in use during the block. Raises `StaleLease` if it has expired."""
        if trajectory_id in self._expired:
            raise StaleLease(
                f"trajectory {trajectory_id} made no call for {self.ttl_s:g} s, so its resources were released. "
                "Release it, then call again to start over"
            )
        self._calls[trajectory_id] = self._calls.get(trajectory_id, 0) + 1
        self._used[trajectory_id] = self._clock.monotonic()
        try:
            yield
            self._worked.add(trajectory_id)
        finally:
            self._calls[trajectory_id] -= 1
            if not self._calls[trajectory_id]:
                del self._calls[trajectory_id]
            if trajectory_id in self._used:
                self._used[trajectory_id] = self._clock.monotonic()

    def end(self, trajectory_id: str) -> None:
        """Forget a trajectory, expired or not."""
        self._used.pop(trajectory_id, None)
        self._worked.discard(trajectory_id)
        self._expired.pop(trajectory_id, None)

    async def sweep(self, release: Callable[[str], Awaitable[None]], busy: Busy | None = None) -> None:
        """Expire and `release` trajectories until cancelled; a `busy` trajectory gets more time."""
        while True:
            await self._clock.sleep(self.ttl_s / 4)
            for name in self._overdue():
                if busy is not None and await _is_busy(busy, name):
                    if name in self._used:
                        self._used[name] = self._clock.monotonic()
                    continue
                if name not in self._overdue():  # a call used it meanwhile
                    continue
                del self._used[name]
                if name in self._worked:
                    self._worked.discard(name)
                    self._expired[name] = None
                    if len(self._expired) > _MOST_EXPIRED:
                        self._expired.popitem(last=False)
                logger.warning("trajectory %s made no call for %g s and will be released", name, self.ttl_s)
                try:
                    await release(name)
                except Exception:
                    logger.exception("releasing trajectory %s failed", name)

    def _overdue(self) -> list[str]:
        limit = self._clock.monotonic() - self.ttl_s
        return [name for name, used in self._used.items() if used <= limit and name not in self._calls]


async def _is_busy(busy: Busy, name: str) -> bool:
    try:
        return await busy(name)
    except Exception:  # its slot is dead, so nothing runs there; an error would end the sweep of all others
        return False
