"""Where an environment stands with one trajectory server: registered, heard of, and knowing what the server says.

Not for groups (`feed`). Invariants: one question for the status is under way at a time, so what is known never goes
back; a server that has forgotten the environment is registered with again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from palaestra.core.clock import Clock
from palaestra.core.errors import TrainerUnavailable
from palaestra.trainers.atropos.feed_settings import FeedSettings, Standing
from palaestra.trainers.atropos.http_client import TrajectoryClient
from palaestra.trainers.atropos.registration import joined
from palaestra.trainers.atropos.server_answers import EnvStatus
from palaestra.trainers.atropos.unsaved_groups import Memory

logger = logging.getLogger(__name__)

LEAVE_S = 5.0
"""How long the end of a run, an interrupted one too, may wait to say goodbye."""

WATCH_FIRST_S, WATCH_S = 0.005, 0.1
"""How often a server that keeps nothing is asked what waits: at first, and later, as its own environments do."""


class Link:
    """One environment's registration. `current` is None while there is none; `changed` is notified of all news.

    `memory` hears what waits. `returned` is called with the standing before and after the server forgot us.
    """

    def __init__(
        self,
        settings: FeedSettings,
        client: TrajectoryClient,
        memory: Memory,
        *,
        note: Callable[[str], None],
        clock: Clock,
        returned: Callable[[Standing, Standing], None],
    ) -> None:
        self.changed = asyncio.Condition()
        self.current: Standing | None = None
        self.finished = False
        self._settings = settings
        self._client = client
        self._memory = memory
        self._note = note
        self._clock = clock
        self._returned = returned
        self._before: Standing | None = None
        self._told_starving = False
        self._joining = asyncio.Lock()
        self._asking = asyncio.Lock()

    async def standing(self) -> Standing:
        """Where the environment stands, registered if it was not. Waits for a trainer to start."""
        async with self._joining:
            if self.current is None:
                self.current = await joined(
                    self._client,
                    self._settings,
                    self._note,
                    patience=self.lose_patience,
                    clock=self._clock,
                    again=self._before is not None,
                )
                if self._before is not None:
                    self._returned(self._before, self.current)
            return self.current

    async def forget(self, standing: Standing) -> None:
        """The server does not know us: `standing` no longer holds."""
        if self.current is standing:
            self.current, self._before = None, standing
            self._note("the trainer's server does not know this environment any more: registering again")
            await self.tell()

    async def tell(self) -> None:
        """Notify those who wait for news."""
        async with self.changed:
            self.changed.notify_all()

    def lose_patience(self, error: TrainerUnavailable) -> None:
        """Raises the error once the server has been silent for too long."""
        if self._clock.monotonic() - self._client.answered_s > self._settings.patience_s:
            raise error

    async def beat(self) -> None:
        """Ask for the status again and again: the server hears that we live, we hear of queues and steps."""
        while not self.finished:
            standing = await self.standing()
            try:
                await self.ask(standing)
            except TrainerUnavailable as error:
                self.lose_patience(error)
            await self._clock.sleep(self._settings.heartbeat_s)

    async def watch(self) -> None:
        """Ask a server that keeps nothing what waits, while something does.

        The newer it is, the oftener: a trainer that stood idle takes it at once.
        """
        seen, wait_s = 0, WATCH_S
        while True:
            async with self.changed:
                await self.changed.wait_for(lambda: self.current is not None and bool(self._memory.given))
            standing, count = await self.standing(), self._memory.asking().given
            wait_s = WATCH_FIRST_S if count != seen else min(WATCH_S, 1.05 * wait_s)
            seen = count
            try:
                await self.ask(standing)
            except TrainerUnavailable as error:
                self.lose_patience(error)
            await self._clock.sleep(wait_s)

    async def ask(self, standing: Standing) -> bool:
        """Ask for the status once; whether the server still knows us."""
        async with self._asking:
            return await self._asked(standing)

    async def _asked(self, standing: Standing) -> bool:
        asked = self._memory.asking()
        answer = await self._client.ask("GET", "/status-env", {"env_id": standing.env_id})
        said = answer.read(EnvStatus) if answer.status == 200 else None
        anew = said is not None and said.current_step < standing.step  # our id is somebody else's now
        if anew or answer.status in (404, 500):  # the original fails with 500 for an id that it does not know
            await self.forget(standing)
        elif said is not None and self.current is standing:
            if not standing.keeps:
                self._memory.heard(said.self_queue_size, asked)
            await self._hear(standing, said)
        return self.current is standing

    async def _hear(self, standing: Standing, said: EnvStatus) -> None:
        async with self.changed:
            standing.step = said.current_step
            standing.weight = said.env_weight
            standing.queue = said.queue_size
            standing.own_queue = said.self_queue_size
            if said.starving and not self._told_starving:
                self._told_starving = True
                self._note(
                    f"what waits for the trainer makes up no batch of {standing.batch_size} sequences exactly, since "
                    "groups came out short or with several rows to a rollout: rolling out more, one group at a time"
                )
            standing.starving = said.starving
            standing.alone = standing.weight >= 1 and standing.queue == standing.own_queue
            if not self.finished and 0 < standing.num_steps <= standing.step:
                self.finished = True
                self._note(f"the trainer has taken its {standing.num_steps} steps")
            self.changed.notify_all()

    async def leave(self) -> None:
        """Tell the server, if it is there, that no more will come: its weights count this environment no longer."""
        if self.current is not None:
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._client.ask("POST", "/disconnect-env", {"env_id": self.current.env_id})
            except (TrainerUnavailable, TimeoutError) as error:
                logger.info("leaving the trainer: %s", error)
