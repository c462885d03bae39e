"""The runner: takes tasks from an environment, runs groups of rollouts a bounded number at a time, and hands each
finished group on, after it is on disk.

It stops early in three cases: when it is cancelled (what was finished is kept), when the environment fails to say what
its next task is (the groups under way come to their end), and when the model server has failed every rollout of several
groups in a row, since going on would only burn tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from palaestra.core.errors import ConfigError, EngineUnavailable, PalaestraError
from palaestra.core.types import Task
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.group import GroupRun, Services, asked, failed_for_the_engine
from palaestra.rollouts.records import Group
from palaestra.rollouts.schedule import Numbered, numbered, slowest_first

GIVE_UP_AFTER = 3
"""How many groups in a row may fail for the engine alone before the run stops."""


@dataclass(slots=True)
class Totals:
    """What a run came to, kept in constant memory."""

    groups: int = 0
    failed_groups: int = 0
    rollouts: int = 0
    scored: int = 0
    reward_sum: float = 0.0
    errors: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Rollouts that ended without a reward."""
        return self.rollouts - self.scored

    @property
    def mean_reward(self) -> float | None:
        """Over the scored rollouts; None when there is none."""
        return self.reward_sum / self.scored if self.scored else None

    def add(self, group: Group) -> None:
        """Count one finished group."""
        scored = group.scored
        self.groups += 1
        self.failed_groups += bool(group.error)
        self.rollouts += len(group.trajectories)
        self.scored += len(scored)
        self.reward_sum += sum(trajectory.reward or 0.0 for trajectory in scored)
        for error in [group.error, *(t.error for t in group.trajectories if not t.scored)]:
            if error and error not in self.errors and len(self.errors) < 5:
                self.errors.append(error)


class Runner:
    """Runs an environment's tasks, at most `limit`, numbered from `first`. `on_group` gets every group as it finishes.

    `ended` are groups that an earlier part of the same run finished: they are handed on first, and not run again. Where
    groups are to be larger now, the rollouts that they lack are. `gate` is asked once before each task that is rolled
    out and may wait; False ends the run.
    """

    def __init__(
        self,
        env: Environment,
        services: Services,
        *,
        concurrency: int = 1,
        limit: int | None = None,
        first: int = 0,
        on_group: Callable[[Group], None] = lambda group: None,
        ended: Mapping[int, Group] | None = None,
        gate: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self.env = env
        self.services = services
        self.concurrency = concurrency
        self.limit = limit
        self.first = first
        self.on_group = on_group
        self._ended_before = dict(ended or {})
        self.gate = gate
        self.totals = Totals()
        self._all_taken = False
        self._no_task: PalaestraError | None = None
        self._taking = asyncio.Lock()
        self._engine_failures = 0
        self._otherwise = False

    async def run(self) -> Totals:
        """Run to the last task. Raises `EngineUnavailable` when the model server is gone for good."""
        handed_on: set[int] = set()
        try:
            for number, group in sorted(self._ended_before.items()):
                if self._is_whole(group):
                    handed_on.add(number)
                    self._hand_on(group)
                    await asyncio.sleep(0)  # each is a line on the disk, and there may be thousands
            tasks = slowest_first(numbered(self.env.tasks(), self.first, self.limit), self.services.timings)
            async with asyncio.TaskGroup() as workers:
                for number in range(self.concurrency):
                    workers.create_task(self._work(tasks), name=f"groups-{number}")
        except* PalaestraError as failures:
            raise _first(failures) from None
        finally:
            for number, group in sorted(self._ended_before.items()):
                if number not in handed_on:  # its task is one that this part has not, or has not come to
                    self._hand_on(group)
        if self._no_task is not None:
            raise self._no_task
        return self.totals

    async def _work(self, tasks: AsyncIterator[Numbered]) -> None:
        while (taken := await self._take(tasks)) is not None:
            number, task = taken
            run = GroupRun(self.env, self.services, number, task)
            try:
                group = await run.run()
            finally:
                if run.begun:  # else what an earlier part made of it still holds
                    self._ended_before.pop(number, None)
            self._hand_on(group)
            self._watch_engine(group)

    def _hand_on(self, group: Group) -> None:
        self.totals.add(group)
        self.on_group(group)
        self.services.observer.group_finished(group)

    def _ended(self, number: int, task: Task) -> bool:
        """Whether an earlier part of the run did all of the task. Raises `ConfigError` where it had another one."""
        was = self.services.tasks.get(number, task.id)
        if was != task.id:
            raise ConfigError(
                f"task {number} is {task.id} now and was {was}: the run was made from other tasks; "
                f"start a new one, or restore them"
            )
        group = self._ended_before.get(number)
        if group is None or not self._is_whole(group):
            return False
        del self._ended_before[number]
        if not self._otherwise and not group.error and group.asked not in ("", asked(task)):
            self._otherwise = True
            self.services.observer.note(
                f"task {number} ({task.id}) asks something else now than when it was rolled out, and others may too: "
                "what has ended is kept, so of a data set in another order items come twice or not at all. Draw and "
                "shuffle with the run's seed (config.seed), and give items an id"
            )
        return True

    def _is_whole(self, group: Group) -> bool:
        """Whether a group that ended lacks nothing: groups may be to be larger now."""
        enough = len(group.trajectories) >= self.services.group_size
        return enough or bool(group.error) or self.env.collects_groups

    async def _take(self, tasks: AsyncIterator[Numbered]) -> Numbered | None:
        """The next task to roll out, of which the gate was asked; what an earlier part did is passed over."""
        async with self._taking:
            if self._all_taken or (self.gate is not None and not await self.gate()):
                return None
            while (taken := await self._next(tasks)) is not None and self._ended(*taken):
                pass
            return taken

    async def _next(self, tasks: AsyncIterator[Numbered]) -> Numbered | None:
        try:
            taken = await anext(tasks, None)
        except PalaestraError as error:  # there are no more; the groups under way come to their end
            taken, self._no_task = None, error
        self._all_taken = taken is None
        return taken

    def _watch_engine(self, group: Group) -> None:
        if not failed_for_the_engine(group):
            self._engine_failures = 0
            return
        self._engine_failures += 1
        if self._engine_failures >= GIVE_UP_AFTER:
            raise EngineUnavailable(
                f"every rollout of {self._engine_failures} groups in a row failed at the model server, the last with: "
                f"{group.trajectories[-1].error}. What was finished is kept; check the server and start again"
            )


def _first(failures: BaseExceptionGroup[PalaestraError]) -> PalaestraError:
    for failure in failures.exceptions:
        return _first(failure) if isinstance(failure, BaseExceptionGroup) else failure
    raise AssertionError("an exception group is never empty")
