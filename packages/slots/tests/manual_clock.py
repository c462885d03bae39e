"""A clock for tests."""

from __future__ import annotations

import asyncio


class ManualClock:
    """Time that passes only during `sleep` or by setting `now`. `slept` lists the sleeps, in seconds."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)
