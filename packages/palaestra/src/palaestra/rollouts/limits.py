"""Ends a run early without losing anything: after too many infrastructure failures, at a cost limit or on a signal.

Once the run stops, no new group and no new rollout starts. Rollouts in flight finish, unless that takes too long. If
the cost limit has been reached, they end after their current turn. The run can be resumed. Single rollouts that hang
are ended by `watchdog.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection

from palaestra.rollouts.events import CostSpent, GroupFinished, Handlers, RolloutEnded, RolloutKept, TokensSpent
from palaestra.rollouts.records import Trajectory
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import EngineUnavailable, PalaestraError
from palaestra_slots.core.exits import INTERRUPTED, TOO_MANY_FAILURES
from palaestra_slots.core.types import Blame, Outcome, Prices

WINDOW = 100
"""The number of latest rollouts that the failure rate covers."""

PAUSED, INTERRUPTED_BY = "paused", "interrupted"

RolloutKey = tuple[str, float]
"""A rollout's id and start time, which together identify an attempt."""


class RunStopped(PalaestraError):
    """Raised if an evaluation was stopped before it had all its rollouts, because its metrics would cover only a part
    of it."""

    exit_code = TOO_MANY_FAILURES


class CutShort(PalaestraError):
    """Raised if a rollout may not start or continue because the run is ending. Resuming the run continues the
    rollout."""


class RunLimits:
    """Follows a run and stops it at a limit. `reason` and `message` are empty until the run stops.

    The argument `spent` is the cost of the earlier parts of the run. `counted` has the rollouts of these parts, which
    are not counted again.
    """

    def __init__(
        self,
        *,
        max_infra_rate: float = 1.0,
        max_cost: float | None = None,
        prices: Prices | None = None,
        group_size: int = 1,
        spent: float = 0.0,
        counted: Collection[RolloutKey] = (),
    ) -> None:
        self.reason = ""
        self.message = ""
        self.exit_code = TOO_MANY_FAILURES
        self._slot_cost: Callable[[], float] = lambda: 0.0
        self._tokens_cost = spent
        self._note: Callable[[str], None] = lambda text: None
        self._rate = max_infra_rate
        self._max_cost = max_cost
        self._prices = prices
        self._group_size = group_size
        self._counted = counted
        self._latest: deque[Blame | None] = deque(maxlen=WINDOW)
        self._stopped = asyncio.Event()
        self._without_usage = False

    def count_slots(self, cost: Callable[[], float]) -> None:
        """Count what `cost` returns, the cost so far of the slots of this part of the run."""
        self._slot_cost = cost

    def report_to(self, note: Callable[[str], None]) -> None:
        """Call `note` with one line when the run stops."""
        self._note = note

    @property
    def spent(self) -> float:
        """The cost of the run so far: tokens, models that the environment asks, and slots that have a price."""
        return self._tokens_cost + self._slot_cost()

    def handlers(self) -> Handlers:
        spending: Handlers = {} if self._prices is None else {TokensSpent: self._on_tokens}
        return {
            **spending,
            CostSpent: self._on_cost,
            RolloutEnded: self._on_rollout,
            RolloutKept: self._on_rollout,
            GroupFinished: self._on_group_finished,
        }

    async def gate(self) -> bool:
        """Return whether another group may start."""
        self._check_cost()
        return not self.reason

    async def unless_stopped(self, other: Awaitable[bool]) -> bool:
        """Wait for the gate `other` and return its answer; once the run stops, cancel the wait and return False."""
        asked, stopped = asyncio.ensure_future(other), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait([asked, stopped], return_when=asyncio.FIRST_COMPLETED)
            return asked.done() and asked.result() and not self.reason
        finally:
            await end_tasks(asked, stopped)

    def check(self, *, begun: bool) -> None:
        """Raise `CutShort` for a rollout that may not start or, if it has `begun`, may not continue."""
        if self.reason and not begun:
            raise CutShort(f"the run was {self.reason} before this rollout started: {self.message}")
        # The reason of the stop is not asked here: rollouts in flight may finish after a signal or too many failures,
        # but each further turn costs money.
        if begun and self._over_cost:
            raise CutShort(f"stopped between two turns: {self.message}")

    async def stopped(self) -> None:
        """Wait until the run stops."""
        await self._stopped.wait()

    def stop_as(self, reason: str, message: str, spent: float) -> None:
        """Stop this part of the run as another process of the run has stopped, at a cost of `spent` so far."""
        self._tokens_cost = max(self._tokens_cost, spent)
        self._stop(reason, message, INTERRUPTED if reason == INTERRUPTED_BY else TOO_MANY_FAILURES)

    def drain(self) -> None:
        """Stop the run because its user requested it."""
        self._stop(INTERRUPTED_BY, "its end was requested", INTERRUPTED)

    @property
    def _over_cost(self) -> bool:
        """Whether the cost has reached its limit, or may have, because it is not known."""
        return self._max_cost is not None and (self._without_usage or self.spent >= self._max_cost)

    def _on_tokens(self, event: TokensSpent) -> None:
        if not event.prompt_tokens and not event.completion_tokens:
            self._on_no_usage()
        elif self._prices is not None:
            self._tokens_cost += self._prices.cost(event.prompt_tokens, event.completion_tokens)
            self._check_cost()

    def _on_no_usage(self) -> None:
        """Report once that the cost is unknown, and stop the run if it has a limit: an estimate could be far off."""
        if self._without_usage:
            return
        self._without_usage = True
        unknown = "the model server reports no usage, so tokens and cost are unknown"
        if self._max_cost is None:
            self._note(f"{unknown}, and limits on the cost of a rollout have no effect")
        else:
            self._stop(
                PAUSED,
                f"{unknown}, and the limit of {self._max_cost:g} (max_cost) cannot be kept. Turn usage on in the "
                "server, or resume with --env.max_cost null",
            )

    def _on_cost(self, event: CostSpent) -> None:
        self._tokens_cost += event.cost
        self._check_cost()

    def _on_rollout(self, event: RolloutEnded | RolloutKept) -> None:
        trajectory = event.trajectory
        if (trajectory.rollout_id, trajectory.beside.started_at) not in self._counted:
            self._count([_failed_by(trajectory)])

    def _on_group_finished(self, event: GroupFinished) -> None:
        group = event.group
        if not group.trajectories:
            # A group that failed before it had a rollout counts as all the rollouts that it lacks.
            self._count([None if group.blame is Blame.TASK else group.blame] * self._group_size)

    def _check_cost(self) -> None:
        if self._max_cost is not None and self.spent >= self._max_cost:
            self._stop(PAUSED, f"the cost has reached {self.spent:.4f}, and the limit is {self._max_cost:g} (max_cost)")

    def _count(self, ended: list[Blame | None]) -> None:
        self._latest.extend(ended)
        failed = Counter(blame for blame in self._latest if blame is not None)
        # Of the whole window, also when fewer rollouts have ended: the first failures of a run must not stop it.
        if failed.total() > self._rate * WINDOW:
            whose = ", ".join(f"{blame.value} {count}" for blame, count in failed.most_common())
            only_engine = set(failed) == {Blame.ENGINE}
            self._stop(
                PAUSED,
                f"infrastructure failures ended {failed.total()} of the last {len(self._latest)} rollouts ({whose}), "
                f"more than {self._rate:.0%} of {WINDOW} (max_infra_rate)",
                EngineUnavailable.exit_code if only_engine else TOO_MANY_FAILURES,
            )

    def _stop(self, reason: str, message: str, exit_code: int = TOO_MANY_FAILURES) -> None:
        """Record why the run stops. The first reason is kept, but a later interruption by the user replaces it."""
        if self.reason and exit_code != INTERRUPTED:
            return
        self.reason, self.message, self.exit_code = reason, message, exit_code
        self._stopped.set()
        in_flight = "rollouts in flight end after their turn" if self._over_cost else "rollouts in flight finish"
        self._note(f"{reason}: {message}. Nothing new starts; {in_flight}")


def _failed_by(trajectory: Trajectory) -> Blame | None:
    """Return the part of the infrastructure that ended a rollout. Returns None for scored and cancelled rollouts, and
    for failures of the task, the model or its provider's filter."""
    lost = trajectory.reward is None and trajectory.outcome is not Outcome.CANCELLED
    return trajectory.blame if lost and trajectory.blame not in (Blame.TASK, Blame.MODEL, Blame.FILTER) else None
