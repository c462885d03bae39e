"""How many calls and transfers may be open. Invariant: a key that opens all that it may keeps no other key waiting."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from palaestra_e2b.wire_errors import ApiError

MOST_CALLS = 256


class OpenCalls:
    """Counts open calls by their target, at most `most` of each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    @contextmanager
    def one(self, target: str) -> Iterator[None]:
        """Count one call. Raises `ApiError` with status 429 if there are too many."""
        if self._open[target] >= self._most:
            raise ApiError(429, f"{self._most} calls are open; wait until one ends")
        self._open[target] += 1
        try:
            yield
        finally:
            self._open[target] -= 1
            if not self._open[target]:
                del self._open[target]


class Lanes:
    """Lets at most `of_key` transfers of a key run, and `at_once` of all keys; further ones wait."""

    def __init__(self, of_key: int, at_once: int) -> None:
        self._of_key = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(of_key))
        self._all = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def one(self, key: str) -> AsyncIterator[None]:
        async with self._of_key[key], self._all:
            yield
