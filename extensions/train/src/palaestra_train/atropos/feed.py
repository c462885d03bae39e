"""Feeds an environment's groups to the trajectory API: keeps in step with the trainer, and sends each group once.

Invariants: a group is sent under the same delivery id until the server has it, even across restarts. Beyond the
off-policy limit, a group begins only if the next batch needs it.

This project's server accepts each delivery only once, so repeating a delivery is safe. The original server has no
delivery ids: if an answer is lost, the feed compares the server's last group with its own before it sends the group
again. The original server does not store groups either: `UnsavedGroups` decides which groups are sent again after a
restart. The original server also never recovers from a group that arrives before its trainer, so before each group the
feed asks whether the server still knows this environment.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import TrainerRefused, TrainerUnavailable
from palaestra_slots.core.exits import plural
from palaestra_slots.core.retry import RetryPolicy
from palaestra_slots.core.types import JSON
from palaestra_train.atropos.connection import (
    FeedSettings,
    ServerAnswer,
    Standing,
    TrainerConnection,
    TrajectoryClient,
)
from palaestra_train.atropos.groups import Deliveries, UnsavedGroups

logger = logging.getLogger(__name__)

CONCURRENT_DELIVERIES = 4
"""The maximum number of concurrent deliveries: enough to fill a network link, and few enough to keep their compressed
bodies in memory."""

BACK_OFF = RetryPolicy(first_s=0.25, longest_s=5.0)


class Feed:
    """Sends an environment's groups to a trainer; use it through `feeding`. `admit` allows a group to begin; `offer`
    accepts the finished group."""

    def __init__(
        self,
        settings: FeedSettings,
        client: TrajectoryClient,
        deliveries: Deliveries,
        tasks: asyncio.TaskGroup,
        *,
        note: Callable[[str], None] = logger.info,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.refusals: list[str] = []
        self._client = client
        self._deliveries = deliveries
        self._tasks = tasks
        self._note = note
        self._clock = clock or SystemClock()
        self._rng = random.Random()
        self._sending = asyncio.Semaphore(CONCURRENT_DELIVERIES)
        self._one_by_one = asyncio.Lock()
        self._unsaved = UnsavedGroups(settings.group_size)
        self.connection = TrainerConnection(
            settings, client, self._unsaved, note=note, clock=self._clock, returned=self._send_again
        )
        self._flushing = False
        self._admitted = 0
        self._out = 0
        self._unsent = 0

    async def admit(self) -> bool:
        """Wait until one more group may begin. Returns False if the trainer needs no more groups."""
        connection = self.connection
        await connection.standing()
        async with connection.changed:
            await connection.changed.wait_for(lambda: connection.finished or self._has_room())
            if not connection.finished:
                self._admitted += 1
                self._out += 1
            return not connection.finished

    def _has_room(self) -> bool:
        """Return whether the off-policy limit leaves room, or the groups that wait or have begun are too few for the
        next batch.

        If the waiting groups do not fill a batch, one more group at a time may begin; otherwise the trainer would wait
        forever.
        """
        standing, settings = self.connection.current, self.settings
        if standing is None:
            return False
        size = max(1, settings.group_size)
        share = settings.max_batches_offpolicy * standing.batch_size * standing.weight / size
        lacking = math.ceil(standing.batch_size / size)
        room = self._out + standing.own_queue < share or self._out + standing.queue < lacking
        return room or (standing.starving and not self._out)

    def offer(self, delivery_id: str, line: dict[str, JSON] | None) -> None:
        """Send a finished group in the background. `line` is None for a group that must not be sent.

        A group that was finished before the run was resumed has not been admitted, so it counts from here on.
        """
        if self._admitted:
            self._admitted -= 1
        else:
            self._out += 1
        if line is None or delivery_id in self._deliveries:
            self._tasks.create_task(self._done(sent=False))
            return
        self._unsent += 1
        self._tasks.create_task(self._deliver_line(delivery_id, line), name=f"deliver-{delivery_id}")

    async def drained(self) -> None:
        """Wait until the server has accepted or refused each offered group. Raises `TrainerRefused` if it refused
        any."""
        async with self.connection.changed:
            self._flushing = True
            self.connection.changed.notify_all()
            await self.connection.changed.wait_for(lambda: not self._unsent)
        if self.refusals:
            refused = plural(len(self.refusals), "group")
            raise TrainerRefused(f"the trainer's server refused {refused}; the last refusal: {self.refusals[-1]}")

    async def _done(self, *, sent: bool) -> None:
        async with self.connection.changed:
            self._out -= 1
            standing = self.connection.current
            if sent and standing is not None:
                standing.queue += 1
                standing.own_queue += 1
                standing.starving = False  # until the server reports it again, with this group counted
            self.connection.changed.notify_all()

    async def _deliver_line(self, delivery_id: str, line: dict[str, JSON]) -> None:
        keeps = (await self.connection.standing()).keeps
        async with self._sending if keeps else self._one_by_one:
            sent = await self._send_group(delivery_id, line)
            if not keeps and self.connection.current is not None:
                with suppress(TrainerUnavailable):
                    await self.connection.ask(self.connection.current)
        self._unsent -= 1
        if sent and delivery_id not in self._deliveries:
            self._deliveries.add(delivery_id)
        await self._done(sent=sent)

    async def _send_group(self, delivery_id: str, line: dict[str, JSON]) -> bool:
        """Retry until the server has the group (returns True) or refuses it permanently (returns False)."""
        failures = 0
        while True:
            standing = await self.connection.standing()
            answer: ServerAnswer | None = None
            taken = False
            try:
                if standing.keeps or await self._may_give(standing):
                    answer, taken = await self._give(standing, delivery_id, line)
            except TrainerUnavailable as error:
                self.connection.lose_patience(error)
            if taken:
                return True
            if self.connection.current is not standing:
                continue
            if answer is not None and answer.status == 404:
                await self.connection.forget(standing)
            elif answer is not None and answer.status < 500 and answer.status != 429:
                self.refusals.append(f"{delivery_id}: {answer.detail}")
                self._note(f"the trainer's server refused the group {self.refusals[-1]}")
                return False
            failures += 1
            asked_s = answer.retry_s if answer is not None else None
            await self._clock.sleep(BACK_OFF.wait_s(failures, asked_s, self._rng))

    async def _give(
        self, standing: Standing, delivery_id: str, line: dict[str, JSON]
    ) -> tuple[ServerAnswer | None, bool]:
        """Try once to deliver a group; return the answer, if any, and whether the server has the group."""
        answer, taken = None, False
        if not standing.keeps:
            self._unsaved.begin()
        try:
            payload = {**line, "env_id": standing.env_id, "delivery_id": delivery_id}
            answer = await self._client.ask("POST", "/scored_data", payload)
            taken = answer.status == 200
        except TrainerUnavailable as error:
            taken = await self._arrived(line)
            if not taken:
                self.connection.lose_patience(error)
        finally:
            if not standing.keeps:
                self._unsaved.end(delivery_id, line, taken=taken)
        return answer, taken

    async def _may_give(self, standing: Standing) -> bool:
        """Wait for room in an original server. Returns False if the server has forgotten the environment in the
        meantime."""
        connection = self.connection
        async with connection.changed:
            await connection.changed.wait_for(
                lambda: self._flushing or connection.current is not standing or self._unsaved.room(standing.batch_size)
            )
        return connection.current is standing and await connection.ask(standing)

    async def _arrived(self, line: dict[str, JSON]) -> bool:
        """Return whether the server's last group is this one, or False if the server does not answer. Called when an
        answer was lost."""
        try:
            answer = await self._client.ask("GET", "/latest_example")
        except TrainerUnavailable:
            return False
        return isinstance(answer.body, dict) and answer.body.get("tokens") == line["tokens"]

    def _send_again(self, before: Standing, now: Standing) -> None:
        """Send the groups that the server lost in its restart, except for groups that its trainer may already have."""
        again, perhaps = self._unsaved.lost(before.batch_size, alone=before.alone)
        if now.step > before.step:  # the trainer took a batch that the server could no longer report
            again, perhaps = [], [*again, *perhaps]
        if again:
            self._note(f"sending {len(again)} groups again, because the trainer's server lost them")
        if perhaps:
            ids = ", ".join(each.delivery_id for each in perhaps)
            self._note(f"not sending groups again that the trainer may have got before the server's restart: {ids}")
        for each in again:
            self._out += 1
            self._unsent += 1
            self._tasks.create_task(self._deliver_line(each.delivery_id, each.line), name=f"again-{each.delivery_id}")


@asynccontextmanager
async def feeding(
    settings: FeedSettings,
    url: str,
    deliveries: Deliveries,
    *,
    token: str | None = None,
    note: Callable[[str], None] = logger.info,
    clock: Clock | None = None,
) -> AsyncIterator[Feed]:
    """Yield a registered feed. At the end of the block, all offered groups have been sent, and the environment has
    disconnected.

    Raises `TrainerUnavailable` and `TrainerRefused`, alone or in an exception group with the error that ended the work.
    """
    client = TrajectoryClient(url, token=token, clock=clock)
    feed: Feed | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            feed = Feed(settings, client, deliveries, tasks, note=note, clock=clock)
            await feed.connection.standing()
            asking = [
                tasks.create_task(feed.connection.beat(), name="heartbeat"),
                tasks.create_task(feed.connection.watch()),
            ]
            yield feed
            await feed.drained()
            for each in asking:
                each.cancel()
    finally:
        if feed is not None:
            await feed.connection.disconnect()
        await client.aclose()
