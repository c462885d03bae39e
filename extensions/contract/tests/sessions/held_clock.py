"""A clock that moves when a test says so, and says when somebody has gone to sleep by it."""

from __future__ import annotations

import asyncio


class HeldClock:
    """`pass_by` moves time and lets the one sleeper do its round, until it sleeps again."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._asleep = asyncio.Event()
        self._go = asyncio.Event()

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self._asleep.set()
        await self._go.wait()
        self._go.clear()

    async def pass_by(self, seconds: float) -> None:
        await self._asleep.wait()
        self._asleep.clear()
        self.now += seconds
        self._go.set()
        await self._asleep.wait()
