"""The runner takes tasks from an environment, rolls a bounded number of them out concurrently, and passes on each
finished group once it is on disk.

Unless groups run one by one, a group does not wait for the slowest rollout of another group: it begins when enough
rollouts have ended, whichever groups they belong to, and a few groups are prepared ahead.

The runner stops early if it is cancelled (finished groups are kept), if its gate closes, or if the environment fails to
provide its next task (in both cases, groups in flight finish). It also stops if the model server fails in every rollout
of several groups in a row.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from palaestra.rollouts.environment import MISSING, Environment
from palaestra.rollouts.events import GroupFinished, GroupsPlanned
from palaestra.rollouts.group import GroupRun, failed_for_the_engine, prompt_checksum
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.schedule import Numbered, Places, counted, groups_ahead, numbered, slowest_first
from palaestra.rollouts.spec import RunContext, RunSettings
from palaestra_slots.core.errors import ConfigError, EngineUnavailable, PalaestraError
from palaestra_slots.core.types import Task
from palaestra_slots.core.user_code import place, told

GIVE_UP_AFTER = 3
"""The run stops when the model server has failed in every rollout of this many groups in a row."""

_MOST_CAUSES = 20


@dataclass(slots=True)
class Totals:
    """The totals of a run.

    `cut_off` lists the rollouts with reward 0 that still had processes running at their end. `uncontrolled` lists the
    tasks with tests that no control covers. `missing` counts the rollouts with reward 0 by a cause in their check: a
    missing network, program or file.
    """

    groups: int = 0
    failed_groups: int = 0
    rollouts: int = 0
    scored: int = 0
    reward_sum: float = 0.0
    errors: list[str] = field(default_factory=list)
    cut_off: list[str] = field(default_factory=list)
    uncontrolled: list[str] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        """The number of rollouts that ended without a reward."""
        return self.rollouts - self.scored

    @property
    def mean_reward(self) -> float | None:
        """The mean reward of the scored rollouts; None if there are none."""
        return self.reward_sum / self.scored if self.scored else None

    def add(self, group: Group) -> None:
        """Count one finished group."""
        scored = group.scored
        self.groups += 1
        self.failed_groups += bool(group.error)
        self.rollouts += len(group.trajectories)
        self.scored += len(scored)
        self.reward_sum += sum(trajectory.reward or 0.0 for trajectory in scored)
        # Work of a process that was still running when the slot was sealed may be missing from the graded files.
        self.cut_off += [each.rollout_id for each in scored if not each.reward and each.detail.get("processes_at_end")]
        for each in scored:
            self._add_missing(each)
        if any(each.detail.get("uncontrolled") for each in scored):
            self.uncontrolled.append(group.task_id)
        for error in [group.error, *(t.error for t in group.trajectories if not t.scored)]:
            if error and error not in self.errors and len(self.errors) < 5:
                self.errors.append(error)

    def _add_missing(self, trajectory: Trajectory) -> None:
        causes = trajectory.detail.get(MISSING)
        for cause in map(str, causes if isinstance(causes, list) and not trajectory.reward else ()):
            self.missing[cause if cause in self.missing or len(self.missing) < _MOST_CAUSES else "other causes"] += 1


class Runner:
    """Runs at most `limit` tasks of an environment, slow ones first if `timings` (seconds by
    task id) are given. `on_group` gets every finished group. At most as many rollouts run at a time as `concurrency`
    groups have, unless the environment collects its groups. If `concurrency` is 1, groups run one after the other.
    `source`, if given, replaces the environment's tasks and their numbers.

    Groups that an earlier part of the run finished are passed on first and not run again; if the group size is larger
    now, they get only the missing rollouts. `gate`, which may wait, is awaited once before each task that is rolled
    out; if it returns False, the run ends.
    """

    def __init__(
        self,
        env: Environment,
        run: RunContext,
        *,
        concurrency: int = 1,
        limit: int | None = None,
        on_group: Callable[[Group], None] = lambda group: None,
        gate: Callable[[], Awaitable[bool]] | None = None,
        timings: Mapping[str, float] | None = None,
        source: AsyncIterator[Numbered] | None = None,
    ) -> None:
        self.env = env
        self.run_context = run
        self.concurrency = concurrency
        self.on_group = on_group
        self.gate = gate
        self.totals = Totals()
        tasks = numbered(env.chosen_tasks(), 0, limit) if source is None else source
        self._tasks = slowest_first(counted(tasks, self._planned) if env.counts_tasks else tasks, timings or {})
        self._finished_before = dict(run.earlier.ended)
        self._no_task: PalaestraError | None = None
        self._engine_failures = 0
        self._warned = False

    async def run(self) -> Totals:
        """Run all tasks and return the totals. Raises the error that ended the run, such as `EngineUnavailable` if the
        model server keeps failing."""
        handed_on: set[int] = set()
        try:
            for number, group in sorted(self._finished_before.items()):
                if self._is_whole(group):
                    handed_on.add(number)
                    self._hand_on_earlier(number)
                    await asyncio.sleep(0)  # let other tasks run between thousands of writes to the disk
            await self._run_tasks()
        except* PalaestraError as failures:
            # A task group raises a group of errors. Callers and the exit status are about a single one.
            raise first_failure(failures) from None
        finally:
            await self.run_context.workspaces.finish()
            for number in sorted(self._finished_before):
                if number not in handed_on:  # this part of the run lacks the task or did not reach it
                    self._hand_on_earlier(number)
        if self._no_task is not None:
            raise self._no_task
        return self.totals

    def _planned(self, total: int) -> None:
        """Announce the number of tasks, which is known only once the source has been read to its end."""
        self.run_context.events.announce(GroupsPlanned(total, self.run_context.settings.group_size))

    async def _run_tasks(self) -> None:
        size = self.run_context.settings.group_size
        ahead = groups_ahead(self.concurrency)
        if self.run_context.elsewhere is not None:
            ahead *= 2  # half of them are prepared ahead on nodes, and the others wait for a node that has their image
        places = Places(self.concurrency * size, ahead * size)
        async with asyncio.TaskGroup() as groups:
            while True:
                await places.reserve(size)
                if (taken := await self._take_task()) is None:
                    return
                groups.create_task(self.roll_out(*taken, places=places), name=f"group-{taken[0]}")

    async def roll_out(
        self, number: int, task: Task, settings: RunSettings | None = None, *, places: Places | None = None
    ) -> Group:
        """Roll out one task, pass its group on, and return the group. `settings` replace those of the run; the group's
        rollouts take the `places` that were reserved for them. Raises `EngineUnavailable` if the model server keeps
        failing."""
        context = self.run_context
        if settings is not None:
            context = replace(context, settings=settings)
        play = GroupRun if context.elsewhere is None else context.elsewhere.group
        run = play(self.env, context, number, task, places)
        try:
            group = await run.run()
            self._finished_before.pop(number, None)
            self._hand_on(group)
        finally:
            earlier = self._finished_before.get(number)
            if earlier is not None and run.begun and not self._is_whole(earlier):
                del self._finished_before[number]  # otherwise the earlier part's group still counts
            if places is not None:
                places.free(run.reserved)
        self._watch_engine(group)
        return group

    def hand_on_finished(self, before: float = math.inf, except_for: Collection[int] = ()) -> None:
        """Pass on the groups with numbers below `before` that an earlier part of the run finished and that were not
        passed on yet, except for those that will be rolled out again."""
        for number in sorted(each for each in self._finished_before if each < before and each not in except_for):
            del self._finished_before[number]
            self._hand_on_earlier(number)

    def _hand_on_earlier(self, number: int) -> None:
        self._hand_on(self.run_context.earlier.whole(number), kept=True)

    def _hand_on(self, group: Group, *, kept: bool = False) -> None:
        self.totals.add(group)
        self.on_group(group)
        self.run_context.events.announce(GroupFinished(group, kept))

    async def _take_task(self) -> Numbered | None:
        """Return the next task to roll out, once the gate is open; tasks that an earlier part finished are skipped."""
        if self.gate is not None and not await self.gate():
            return None
        while (taken := await self._next_task()) is not None and self._is_finished(*taken):
            pass
        return taken

    async def _next_task(self) -> Numbered | None:
        try:
            return await anext(self._tasks, None)
        except PalaestraError as error:  # no more tasks follow; the groups in flight finish
            self._no_task = error
        except Exception as error:
            self._no_task = ConfigError(f"{self.env.name} failed to give a task: {told(error)}{place(error)}")
        return None

    def _is_finished(self, number: int, task: Task) -> bool:
        """Return whether an earlier part of the run finished the task. Raises `ConfigError` if a different task had its
        number."""
        was = self.run_context.earlier.tasks.get(number, task.id)
        if was != task.id:
            raise ConfigError(
                f"{self.env.changed(number, was, task.id)}. Restore the data and the code of the run, or "
                "start a new run"
            )
        group = self._finished_before.get(number)
        if group is None or not self._is_whole(group):
            return False
        del self._finished_before[number]
        if not self._warned and not group.error and group.asked not in ("", prompt_checksum(task)):
            self._warned = True
            self.run_context.events.note(
                f"The prompt of task {number} ({task.id}) has changed since the task was rolled out, and other "
                "prompts may have changed too. Finished groups are kept, so if the data set's order changed, some "
                "items occur twice and others are missing. Draw and shuffle with the run's seed (config.seed), and "
                "give each item an id"
            )
        return True

    def _is_whole(self, group: Group) -> bool:
        """Return whether a finished group needs no further rollouts. It may need some if the group size is larger
        now."""
        context = self.run_context
        enough = len(context.earlier.rollouts[group.group_id]) >= context.settings.group_size
        return enough or bool(group.error) or self.env.collects_groups

    def _watch_engine(self, group: Group) -> None:
        if not failed_for_the_engine(group):
            self._engine_failures = 0
            return
        self._engine_failures += 1
        if self._engine_failures >= GIVE_UP_AFTER:
            raise EngineUnavailable(
                f"every rollout of {self._engine_failures} groups in a row failed at the model server, the last with: "
                f"{group.trajectories[-1].error.rstrip('.')}. Check the server and resume the run; nothing is lost"
            )


def first_failure(failures: BaseExceptionGroup[PalaestraError]) -> PalaestraError:
    for failure in failures.exceptions:
        return first_failure(failure) if isinstance(failure, BaseExceptionGroup) else failure
    raise AssertionError("an exception group is never empty")
