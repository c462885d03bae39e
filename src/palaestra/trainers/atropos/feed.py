"""An environment's side of the trajectory API: register, keep in step with the trainer, send each group once.

Invariants: a group is sent until the server has it, under one delivery id, whatever restarts in between; no more groups
are begun than the trainer's off-policy limit allows. A server that has forgotten the environment is registered with
again.

A server of this project takes a delivery once, so that trying again is safe. The original knows no delivery ids: when
an answer is lost, its last group is compared with ours before sending again. What its memory held when it was restarted
is lost with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.errors import TrainerRefused, TrainerUnavailable
from palaestra.core.types import JSON
from palaestra.inference.retry import RetryPolicy
from palaestra.trainers.atropos.client import Answer, TrajectoryClient
from palaestra.trainers.atropos.outgoing import Deliveries
from palaestra.trainers.atropos.standing import FeedSettings, Standing

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Groups under way to the server: enough to fill a link, few enough to hold in memory packed."""

LEAVE_S = 5.0
"""How long the end of a run, an interrupted one too, may wait to say goodbye."""

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
        self.finished = False
        self.refusals: list[str] = []
        self._client = client
        self._deliveries = deliveries
        self._tasks = tasks
        self._note = note
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._standing: Standing | None = None
        self._joining = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._sending = asyncio.Semaphore(AT_ONCE)
        self._out = 0
        self._unsent = 0

    async def standing(self) -> Standing:
        """Where the environment stands with the trainer, registered if it was not. Waits for a trainer to start."""
        async with self._joining:
            if self._standing is None:
                self._standing = await self._join()
            return self._standing

    async def admit(self) -> bool:
        """Wait until one more group may begin; False when the trainer needs no more."""
        await self.standing()
        async with self._changed:
            await self._changed.wait_for(lambda: self.finished or self._has_room())
            if not self.finished:
                self._out += 1
            return not self.finished

    def _has_room(self) -> bool:
        """Whether the share of the off-policy limit has room, or the next batch lacks groups whoever makes them."""
        standing, settings = self._standing, self.settings
        if standing is None:
            return False
        size = max(1, settings.group_size)
        share = settings.max_batches_offpolicy * standing.batch_size * standing.weight / size
        lacking = math.ceil(standing.batch_size / size)
        return self._out + standing.own_queue < share or self._out + standing.queue < lacking

    def offer(self, delivery_id: str, line: dict[str, JSON] | None) -> None:
        """Send a finished group in the background; None is a group of which nothing is sent."""
        if line is None or delivery_id in self._deliveries:
            self._tasks.create_task(self._done(sent=False))
            return
        self._unsent += 1
        self._tasks.create_task(self._deliver(delivery_id, line), name=f"deliver-{delivery_id}")

    async def drained(self) -> None:
        """Wait until everything offered has been sent. Raises `TrainerRefused` when groups were refused."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._unsent)
        if self.refusals:
            raise TrainerRefused(f"the trainer's server refused {len(self.refusals)} groups: {self.refusals[-1]}")

    async def _done(self, *, sent: bool) -> None:
        async with self._changed:
            self._out = max(0, self._out - 1)
            if sent and self._standing is not None:
                self._standing.queue += 1
                self._standing.own_queue += 1
            self._changed.notify_all()

    async def _deliver(self, delivery_id: str, line: dict[str, JSON]) -> None:
        async with self._sending:
            sent = await self._send(delivery_id, line)
        self._unsent -= 1
        if sent:
            self._deliveries.add(delivery_id)
        await self._done(sent=sent)

    async def _send(self, delivery_id: str, line: dict[str, JSON]) -> bool:
        """Try until the server has it (True) or refuses it for good (False)."""
        failures = 0
        while True:
            standing = await self.standing()
            answer: Answer | None = None
            try:
                payload = {**line, "env_id": standing.env_id, "delivery_id": delivery_id}
                answer = await self._client.ask("POST", "/scored_data", payload)
            except TrainerUnavailable as error:
                if await self._arrived(line):
                    return True
                self._lose_patience(error)
            if answer is not None and answer.status == 200:
                return True
            if answer is not None and answer.status == 404:
                self._forget(standing)
            elif answer is not None and answer.status < 500 and answer.status != 429:
                self.refusals.append(f"{delivery_id}: {answer.detail}")
                self._note(f"the trainer's server refused the group {self.refusals[-1]}")
                return False
            failures += 1
            asked_s = answer.retry_s if answer is not None else None
            await self._clock.sleep(BACK_OFF.wait_s(failures, asked_s, self._rng))

    async def _arrived(self, line: dict[str, JSON]) -> bool:
        """Whether the server's last group is this one: what a lost answer would have said."""
        try:
            answer = await self._client.ask("GET", "/latest_example")
        except TrainerUnavailable:
            return False
        return isinstance(answer.body, dict) and answer.body.get("tokens") == line["tokens"]

    def _forget(self, standing: Standing) -> None:
        if self._standing is standing:
            self._standing = None
            self._note("the trainer's server does not know this environment any more: registering again")

    def _lose_patience(self, error: TrainerUnavailable) -> None:
        """Raises the error once the server has been silent for too long."""
        if self._clock.monotonic() - self._client.answered_s > self.settings.patience_s:
            raise error

    async def _join(self) -> Standing:
        """Register, and ask for the size of batches."""
        settings, failures, said = self.settings, 0, ""
        registration = {
            "max_token_length": settings.max_token_length,
            "desired_name": settings.name,
            "weight": settings.weight,
            "group_size": settings.group_size,
            "min_batch_allocation": settings.min_batch_allocation,
        }
        while True:
            try:
                answer = await self._client.ask("POST", "/register-env", registration)
                if answer.status == 200 and answer.body.get("status") == "success":
                    info = await self._client.ask("GET", "/info")
                    if info.status == 200:
                        return self._joined(answer.body, info.body)
                if answer.status == 422:
                    raise TrainerRefused(f"{self._client.url} does not take this environment: {answer.detail}")
                reason = "waiting for the trainer to start"
            except TrainerUnavailable as error:
                self._lose_patience(error)
                reason = f"waiting: {error}"
            if reason != said:
                self._note(reason)
                said = reason
            failures += 1
            await self._clock.sleep(max(settings.poll_s, 0.0))

    def _joined(self, answer: JSON, info: JSON) -> Standing:
        standing = Standing(
            env_id=answer["env_id"],
            batch_size=max(1, info["batch_size"]),
            most_tokens=info["max_token_len"] if info["max_token_len"] > 0 else None,
            num_steps=answer.get("num_steps") or -1,
            step=answer.get("starting_step") or 0,
        )
        name, size = answer.get("wandb_name"), self.settings.group_size
        self._note(f"registered with {self._client.url} as {name}, batches of {standing.batch_size} sequences")
        if standing.batch_size % size:
            self._note(f"groups of {size} do not fill a batch of {standing.batch_size} sequences exactly")
        return standing

    async def beat(self) -> None:
        """Ask for the status again and again: the server hears that we live, we hear of queues and steps."""
        while not self.finished:
            standing = await self.standing()
            try:
                answer = await self._client.ask("GET", "/status-env", {"env_id": standing.env_id})
                if answer.status == 200:
                    await self._hear(standing, answer.body)
                elif answer.status in (404, 500):  # the original fails with 500 for an id that it does not know
                    self._forget(standing)
            except TrainerUnavailable as error:
                self._lose_patience(error)
            await self._clock.sleep(self.settings.heartbeat_s)

    async def _hear(self, standing: Standing, said: JSON) -> None:
        async with self._changed:
            standing.step = said["current_step"]
            standing.weight = said["env_weight"]
            standing.queue = said["queue_size"]
            standing.own_queue = said.get("self_queue_size", said["queue_size"])
            if 0 < standing.num_steps <= standing.step:
                self.finished = True
                self._note(f"the trainer has taken its {standing.num_steps} steps")
            self._changed.notify_all()

    async def leave(self) -> None:
        """Tell the server, if it is there, that no more will come: its weights count this environment no longer."""
        if self._standing is not None:
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._client.ask("POST", "/disconnect-env", {"env_id": self._standing.env_id})
            except (TrainerUnavailable, TimeoutError) as error:
                logger.info("leaving the trainer: %s", error)


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
            await feed.standing()
            beating = tasks.create_task(feed.beat(), name="heartbeat")
            yield feed
            await feed.drained()
            beating.cancel()
    finally:
        if feed is not None:
            await feed.leave()
        await client.aclose()
