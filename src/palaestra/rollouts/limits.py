"""What ends a run before its last task without losing anything: too many rollouts that the world broke, a cost that is
reached, or somebody who asks for it.

Not for single rollouts (`stages` ends those). Invariant: a stop closes the gate for new groups, and for rollouts that
have not begun; what is in flight finishes, unless whoever drains the run has no more patience, or every further turn
would cost more than was allowed. The run can be gone on with.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection

from palaestra.core.errors import EngineUnavailable, PalaestraError
from palaestra.core.exits import INTERRUPTED, TOO_MANY_FAILURES
from palaestra.core.types import Blame, Outcome, Prices
from palaestra.rollouts.observe.console import NullObserver
from palaestra.rollouts.records import Group, Trajectory

WINDOW = 100
"""The rate of failures is over so many of the latest rollouts."""

PAUSED, INTERRUPTED_BY = "paused", "interrupted"

RolloutKey = tuple[str, float]
"""A rollout's id and when it started, which tells its attempts apart."""


class RunStopped(PalaestraError):
    """An evaluation was stopped before it had all its rollouts, so that its figures would be of a part."""

    exit_code = TOO_MANY_FAILURES


class CutShort(PalaestraError):
    """A rollout may not begin, or not go on, because its run ends. Going on with the run goes on with the rollout."""


class Stops(NullObserver):
    """Watches a run and closes its gate. `reason` is how the run then ends, `message` why; both empty while it goes on.

    `paid` are the rollouts of an earlier part of the run, which cost `spent`: they are not counted again.
    """

    def __init__(
        self,
        *,
        max_infra_rate: float = 1.0,
        max_cost: float | None = None,
        prices: Prices | None = None,
        group_size: int = 1,
        spent: float = 0.0,
        paid: Collection[RolloutKey] = (),
    ) -> None:
        self.reason = ""
        self.message = ""
        self.exit_code = TOO_MANY_FAILURES
        self.spent = spent
        self._rate = max_infra_rate
        self._max_cost = max_cost
        self._prices = prices
        self._group_size = group_size
        self._paid = paid
        self._note: Callable[[str], None] = lambda text: None
        self._latest: deque[Blame | None] = deque(maxlen=WINDOW)
        self._stopped = asyncio.Event()

    def tell(self, note: Callable[[str], None]) -> None:
        """Whom to tell when the gate closes."""
        self._note = note

    async def gate(self) -> bool:
        """Whether another group may begin."""
        self._look_at_cost()
        return not self.reason

    async def unless_stopped(self, other: Awaitable[bool]) -> bool:
        """What another gate says, however long it waits; False, and it is cancelled, once this one closes."""
        asked, stopped = asyncio.ensure_future(other), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait([asked, stopped], return_when=asyncio.FIRST_COMPLETED)
            return asked.done() and asked.result() and not self.reason
        finally:
            asked.cancel()
            stopped.cancel()
            await asyncio.gather(asked, stopped, return_exceptions=True)

    def check(self, *, begun: bool) -> None:
        """Raises `CutShort` for a rollout that may not begin or, where it has `begun`, not go on."""
        if self.reason and not begun:
            raise CutShort(f"the run was {self.reason} before it began: {self.message}")
        if begun and self._max_cost is not None and self.spent >= self._max_cost:
            raise CutShort(f"cut off between two turns: {self.message}")

    def turn(self, rollout_id: str, prompt_tokens: int, completion_tokens: int) -> None:
        if self._prices is not None:
            self.spent += self._prices.cost(prompt_tokens, completion_tokens)
            self._look_at_cost()

    def rollout_finished(self, trajectory: Trajectory) -> None:
        if (trajectory.rollout_id, trajectory.beside.started_at) not in self._paid:
            self._judge([_broke(trajectory)])

    def group_finished(self, group: Group) -> None:
        if not group.trajectories:
            self._judge([None if group.blame is Blame.TASK else group.blame] * self._group_size)

    def drain(self) -> None:
        """Somebody wants the run to end."""
        self._stop(INTERRUPTED_BY, "asked to end", INTERRUPTED)

    def _look_at_cost(self) -> None:
        if self._max_cost is not None and self.spent >= self._max_cost:
            self._stop(PAUSED, f"the cost has reached {self.spent:.4f} of {self._max_cost:g} (max_cost)")

    def _judge(self, ended: list[Blame | None]) -> None:
        self._latest.extend(ended)
        broken = Counter(blame for blame in self._latest if blame is not None)
        if broken.total() > self._rate * WINDOW:
            whose = ", ".join(f"{blame.value} {count}" for blame, count in broken.most_common())
            only_engine = set(broken) == {Blame.ENGINE}
            self._stop(
                PAUSED,
                f"the world broke {broken.total()} of the last {len(self._latest)} rollouts ({whose}), more than "
                f"{self._rate:.0%} of {WINDOW} (max_infra_rate)",
                EngineUnavailable.exit_code if only_engine else TOO_MANY_FAILURES,
            )

    @property
    def _in_flight(self) -> str:
        if self._max_cost is not None and self.spent >= self._max_cost:
            return "what is in flight ends after its turn"
        return "what is in flight finishes"

    def _stop(self, reason: str, message: str, exit_code: int = TOO_MANY_FAILURES) -> None:
        """The first reason counts; that somebody wants to go home overrides it."""
        if self.reason and exit_code != INTERRUPTED:
            return
        self.reason, self.message, self.exit_code = reason, message, exit_code
        self._stopped.set()
        self._note(f"{reason}: {message}. Nothing new begins; {self._in_flight}")


def _broke(trajectory: Trajectory) -> Blame | None:
    """Who broke a rollout, where that was the world. A task that cannot work is no sign of the night's troubles."""
    lost = trajectory.reward is None and trajectory.outcome is not Outcome.CANCELLED
    return trajectory.blame if lost and trajectory.blame not in (Blame.TASK, Blame.MODEL) else None
