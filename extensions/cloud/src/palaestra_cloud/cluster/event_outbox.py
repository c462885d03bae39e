"""What happens in the groups of a worker, on its way to the driver.

Entries are sent in batches, because each message costs the driver about a millisecond in Ray. Signs of life are sent
once per second and rollout. If the driver takes too long, `commit` waits, and so do the rollouts that end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec

from palaestra.rollouts.events import (
    Alive,
    CostSpent,
    Graded,
    Handlers,
    JournalEvent,
    MemoryEvent,
    Note,
    RolloutBegun,
    TokensSpent,
)
from palaestra.rollouts.journal.journal import EventT, Journal, line_of
from palaestra_cloud.cluster.messages import FAILED, FINISHED, KINDS, GroupEntry, Happened

MOST_WAITING = 8 << 20
"""The bytes that may wait to be sent before rollouts wait too."""

FULL_BATCH = 1 << 18
"""The bytes with which a batch is sent at once."""

SIGNS_EVERY_S = 1.0
"""How often a rollout's latest sign of life is sent: as often as `status.json` is written."""

_KIND = {kind: place for place, kind in enumerate(KINDS)}
_encoder = msgspec.json.Encoder()


class EventOutbox:
    """The entries that wait to be sent with `send`, at most `flush_s` seconds after they happened."""

    def __init__(self, send: Callable[[Happened], Awaitable[None]], flush_s: float) -> None:
        self._send = send
        self._flush_s = flush_s
        self._entries: list[GroupEntry] = []
        self._signs: dict[str, tuple[int, Alive]] = {}
        self._signs_sent_at = 0.0
        self._bytes = 0
        self._some, self._full, self._room = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._room.set()

    def put(self, key: int, kind: int, index: int, data: bytes) -> None:
        """Add an entry."""
        self._entries.append(GroupEntry(key, kind, index, data))
        self._bytes += len(data) + 8
        self._some.set()
        if self._bytes >= FULL_BATCH:
            self._full.set()
        if self._bytes >= MOST_WAITING:
            self._room.clear()

    def put_sign(self, key: int, event: Alive) -> None:
        """Keep the latest sign of life of a rollout or a group until signs are sent again, or its play ends."""
        self._signs[event.name] = (key, event)
        self._some.set()

    async def room(self) -> None:
        """Wait until the driver has taken enough."""
        await self._room.wait()

    async def run(self) -> None:
        """Send what is put, until this is cancelled."""
        while True:
            try:
                async with asyncio.timeout(SIGNS_EVERY_S if self._signs else None):
                    await self._some.wait()
            except TimeoutError:
                pass
            if not self._full.is_set():
                try:
                    async with asyncio.timeout(self._flush_s):
                        await self._full.wait()
                except TimeoutError:
                    pass
            await self.flush()

    async def flush(self) -> None:
        """Send everything that has been put so far."""
        entries = self._due_signs() + self._entries  # the signs first: a play's last entry ends it
        self._entries, self._bytes = [], 0
        self._some.clear()
        self._full.clear()
        if entries:
            await self._send(Happened(entries))
        if self._bytes < MOST_WAITING:
            self._room.set()

    def _due_signs(self) -> list[GroupEntry]:
        if not self._signs:
            return []
        signs, now = self._signs, time.monotonic()
        if now - self._signs_sent_at >= SIGNS_EVERY_S:
            self._signs, self._signs_sent_at = {}, now
        else:
            ended = {each.key for each in self._entries if each.kind in (FINISHED, FAILED)}
            signs = {name: sign for name, sign in signs.items() if sign[0] in ended} if ended else {}
            for name in signs:
                del self._signs[name]
        return [GroupEntry(key, _KIND[Alive], -1, _encoder.encode(each)) for key, each in signs.values()]


class ForwardedJournal(Journal):
    """The journal of a play (`PlayGroup`): its lines go to the driver, which writes them."""

    def __init__(self, outbox: EventOutbox, key: int) -> None:
        self.path = Path("journal.jsonl")
        self._outbox = outbox
        self._key = key

    def append(self, event: EventT, check: Callable[[EventT], None] | None = None) -> EventT:
        event, line = line_of(event, check)
        self._outbox.put(self._key, _KIND[type(event)], _index(event), line)
        return event

    def append_line(self, line: bytes) -> None:
        raise NotImplementedError("a line goes to the driver with its event")

    async def commit(self) -> None:
        """Wait until there is room. The driver announces nothing before it is on its disk."""
        await self._outbox.room()

    def close(self) -> None:
        """Do nothing: the driver owns the file."""


class Forwarding:
    """Subscribes to the events of a play that are not in the journal, and forwards them, except for the `unheard`
    kinds."""

    def __init__(self, outbox: EventOutbox, key: int, unheard: Collection[int] = ()) -> None:
        self._outbox = outbox
        self._key = key
        self._unheard = unheard

    def handlers(self) -> Handlers:
        heard = [
            each for each in (RolloutBegun, TokensSpent, CostSpent, Graded, Note) if _KIND[each] not in self._unheard
        ]
        return dict.fromkeys(heard, self._forward) | {Alive: self._on_alive}

    def _forward(self, event: MemoryEvent) -> None:
        self._outbox.put(self._key, _KIND[type(event)], _index(event), _encoder.encode(event))

    def _on_alive(self, event: Alive) -> None:
        self._outbox.put_sign(self._key, event)


def _index(event: JournalEvent | MemoryEvent) -> int:
    """Return the index of the event's rollout in its group; -1 for an event of the group itself."""
    trajectory = getattr(event, "trajectory", None)
    if trajectory is not None:
        return int(trajectory.index)
    named: str = getattr(event, "rollout_id", "")
    return int(named.rpartition("/")[2]) if named else -1
