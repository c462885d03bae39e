"""A feed as the tests run one, and what it notes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from palaestra_slots.core.types import JSON
from palaestra_train.atropos.connection import FeedSettings
from palaestra_train.atropos.feed import Feed, feeding
from palaestra_train.atropos.groups import Deliveries

SETTINGS = FeedSettings(name="words", group_size=2, max_token_length=32, poll_s=0.01, heartbeat_s=0.01)


class Said:
    """What a feed noted. `until` waits for a note."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._changed = asyncio.Event()

    def __call__(self, note: str) -> None:
        self.notes.append(note)
        self._changed.set()

    async def until(self, part: str) -> None:
        while not any(part in note for note in self.notes):
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def fed(path: Path, url: str, said: Said, settings: FeedSettings = SETTINGS) -> AsyncIterator[Feed]:
    deliveries = Deliveries(path / "deliveries.jsonl")
    try:
        async with feeding(settings, url, deliveries, note=said) as feed:
            yield feed
    finally:
        deliveries.close()


def marks(batch: Sequence[JSON]) -> list[int]:
    return [each["tokens"][0][0] for each in batch]
