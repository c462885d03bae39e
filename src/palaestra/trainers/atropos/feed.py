"""An environment's side of the trajectory API: keep in step with the trainer, send each group once.

Not for being registered (`link`). Invariants: a group is sent until the server has it, under one delivery id, whatever
restarts in between; no more groups are begun than the trainer's off-policy limit allows.

A server of this project takes a delivery once, so that trying again is safe. The original knows no delivery ids: when
an answer is lost, its last group is compared with ours before sending again. It keeps nothing either: `volatile` says
what is sent again when it was restarted. It also never recovers from a group that comes before its trainer, so it is
asked whether it still knows us before each group.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.errors import TrainerRefused, TrainerUnavailable
from palaestra.core.retry import RetryPolicy
from palaestra.core.types import JSON
from palaestra.trainers.atropos.connection_state import Link
from palaestra.trainers.atropos.feed_settings import FeedSettings, Standing
from palaestra.trainers.atropos.groups import Deliveries
from palaestra.trainers.atropos.http_client import Answer, TrajectoryClient
from palaestra.trainers.atropos.unsaved_groups import Memory

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Groups under way to the server: enough to fill a link, few enough to hold in memory packed."""

BACK_OFF = RetryPolicy(first_s=0.25, longest_s=5.0)


class Feed:
    """Use it through `feeding`. `admit` says when to begin a group; `offer` takes it when it is finished."""

    def __init__(
        self,
        settings: FeedSettings,
        client: TrajectoryClient,
        deliveries: Deliveries,
        tasks: asyncio.TaskGroup,
        *,
        note: Callable[[str], None] = logger.info,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self.refusals: list[str] = []
        self._client = client
        self._deliveries = deliveries
        self._tasks = tasks
        self._note = note
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._sending = asyncio.Semaphore(AT_ONCE)
        self._one_by_one = asyncio.Lock()
        self._memory = Memory(settings.group_size)
        self.link = Link(settings, client, self._memory, note=note, clock=self._clock, returned=self._send_again)
        self._flushing = False
        self._admitted = 0
        self._out = 0
        self._unsent = 0

    async def admit(self) -> bool:
        """Wait until one more group may begin; False when the trainer needs no more."""
        await self.link.standing()
        async with self.link.changed:
            await self.link.changed.wait_for(lambda: self.link.finished or self._has_room())
            if not self.link.finished:
                self._admitted += 1
                self._out += 1
            return not self.link.finished

    def _has_room(self) -> bool:
        """Whether the share of the off-policy limit has room, or the next batch lacks groups whoever makes them.

        One more at a time may begin where those that wait make up no batch: else the trainer would wait for ever.
        """
        standing, settings = self.link.current, self.settings
        if standing is None:
            return False
        size = max(1, settings.group_size)
        share = settings.max_batches_offpolicy * standing.batch_size * standing.weight / size
        lacking = math.ceil(standing.batch_size / size)
        room = self._out + standing.own_queue < share or self._out + standing.queue < lacking
        return room or (standing.starving and not self._out)

    def offer(self, delivery_id: str, line: dict[str, JSON] | None) -> None:
        """Send a finished group in the background; None is a group of which nothing is sent.

        A group that an earlier part of the run ended was never admitted, and is under way from here on.
        """
        if self._admitted:
            self._admitted -= 1
        else:
            self._out += 1
        if line is None or delivery_id in self._deliveries:
            self._tasks.create_task(self._done(sent=False))
            return
        self._unsent += 1
        self._tasks.create_task(self._deliver(delivery_id, line), name=f"deliver-{delivery_id}")

    async def drained(self) -> None:
        """Wait until everything offered has been sent. Raises `TrainerRefused` when groups were refused."""
        async with self.link.changed:
            self._flushing = True
            self.link.changed.notify_all()
            await self.link.changed.wait_for(lambda: not self._unsent)
        if self.refusals:
            raise TrainerRefused(f"the trainer's server refused {len(self.refusals)} groups: {self.refusals[-1]}")

    async def _done(self, *, sent: bool) -> None:
        async with self.link.changed:
            self._out -= 1
            standing = self.link.current
            if sent and standing is not None:
                standing.queue += 1
                standing.own_queue += 1
                standing.starving = False  # until the server says so of this one too
            self.link.changed.notify_all()

    async def _deliver(self, delivery_id: str, line: dict[str, JSON]) -> None:
        keeps = (await self.link.standing()).keeps
        async with self._sending if keeps else self._one_by_one:
            sent = await self._send(delivery_id, line)
            if not keeps and self.link.current is not None:
                with suppress(TrainerUnavailable):
                    await self.link.ask(self.link.current)
        self._unsent -= 1
        if sent and delivery_id not in self._deliveries:
            self._deliveries.add(delivery_id)
        await self._done(sent=sent)

    async def _send(self, delivery_id: str, line: dict[str, JSON]) -> bool:
        """Try until the server has it (True) or refuses it for good (False)."""
        failures = 0
        while True:
            standing = await self.link.standing()
            answer: Answer | None = None
            taken = False
            try:
                if standing.keeps or await self._may_give(standing):
                    answer, taken = await self._give(standing, delivery_id, line)
            except TrainerUnavailable as error:
                self.link.lose_patience(error)
            if taken:
                return True
            if self.link.current is not standing:
                continue
            if answer is not None and answer.status == 404:
                await self.link.forget(standing)
            elif answer is not None and answer.status < 500 and answer.status != 429:
                self.refusals.append(f"{delivery_id}: {answer.detail}")
                self._note(f"the trainer's server refused the group {self.refusals[-1]}")
                return False
            failures += 1
            asked_s = answer.retry_s if answer is not None else None
            await self._clock.sleep(BACK_OFF.wait_s(failures, asked_s, self._rng))

    async def _give(self, standing: Standing, delivery_id: str, line: dict[str, JSON]) -> tuple[Answer | None, bool]:
        """One attempt: the answer, if one came, and whether the server has the group."""
        answer, taken = None, False
        if not standing.keeps:
            self._memory.begin()
        try:
            payload = {**line, "env_id": standing.env_id, "delivery_id": delivery_id}
            answer = await self._client.ask("POST", "/scored_data", payload)
            taken = answer.status == 200
        except TrainerUnavailable as error:
            taken = await self._arrived(line)
            if not taken:
                self.link.lose_patience(error)
        finally:
            if not standing.keeps:
                self._memory.end(delivery_id, line, taken=taken)
        return answer, taken

    async def _may_give(self, standing: Standing) -> bool:
        """Wait for room in a server that keeps nothing; False when it has forgotten us meanwhile."""
        async with self.link.changed:
            await self.link.changed.wait_for(
                lambda: self._flushing or self.link.current is not standing or self._memory.room(standing.batch_size)
            )
        return self.link.current is standing and await self.link.ask(standing)

    async def _arrived(self, line: dict[str, JSON]) -> bool:
        """Whether the server's last group is this one: what a lost answer would have said."""
        try:
            answer = await self._client.ask("GET", "/latest_example")
        except TrainerUnavailable:
            return False
        return isinstance(answer.body, dict) and answer.body.get("tokens") == line["tokens"]

    def _send_again(self, before: Standing, now: Standing) -> None:
        """Send what the server lost when it was restarted, but for what its trainer may have."""
        again, perhaps = self._memory.lost(before.batch_size, alone=before.alone)
        if now.step > before.step:  # the trainer says that it took a batch which the server did not live to tell of
            again, perhaps = [], [*again, *perhaps]
        if again:
            self._note(f"sending {len(again)} groups again, which the trainer's server had and lost")
        if perhaps:
            ids = ", ".join(each.delivery_id for each in perhaps)
            self._note(f"not sending again what the trainer may have from the server's last life: {ids}")
        for each in again:
            self._out += 1
            self._unsent += 1
            self._tasks.create_task(self._deliver(each.delivery_id, each.line), name=f"again-{each.delivery_id}")


@asynccontextmanager
async def feeding(
    settings: FeedSettings,
    url: str,
    deliveries: Deliveries,
    *,
    note: Callable[[str], None] = logger.info,
    clock: Clock | None = None,
) -> AsyncIterator[Feed]:
    """A feed that is registered; at the end everything offered has been sent, and the environment has left.

    Raises `TrainerUnavailable`, and `TrainerRefused`, alone or in a group with what ended the work meanwhile.
    """
    client = TrajectoryClient(url, clock=clock)
    feed: Feed | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            feed = Feed(settings, client, deliveries, tasks, note=note, clock=clock)
            await feed.link.standing()
            asking = [tasks.create_task(feed.link.beat(), name="heartbeat"), tasks.create_task(feed.link.watch())]
            yield feed
            await feed.drained()
            for each in asking:
                each.cancel()
    finally:
        if feed is not None:
            await feed.link.leave()
        await client.aclose()
