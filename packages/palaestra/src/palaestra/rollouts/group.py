"""Runs one group: prepares the task's workspace once, and rolls out `group_size` rollouts from forks of it.

If the environment has a recipe (a cache key) for its preparation and the run uses the machine's store, prepared
workspaces are shared between runs: this run reuses those of other runs, and keeps its own for them
(`sandbox/snapshots/cache.py`).

If the preparation still fails after its retries, the group ends with an error and starts no rollout. A prepared
workspace that is lost with its backend is prepared again before a rollout is retried.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

import msgspec

from palaestra.rollouts.environment import Environment, GroupCollection
from palaestra.rollouts.events import (
    AttemptDiscarded,
    CostSpent,
    GroupBegun,
    GroupEnded,
    GroupStarted,
    RolloutBegun,
    RolloutEnded,
    RolloutKept,
    RolloutResumed,
    TokensSpent,
)
from palaestra.rollouts.export.atropos import check_own
from palaestra.rollouts.journal.journal import checksum
from palaestra.rollouts.records import MODEL_COST, Group, Trajectory
from palaestra.rollouts.resume.recorded_turns import FROM_OPENING, Mismatch, RecordedTurns, Start
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.schedule import Places
from palaestra.rollouts.spec import Phase, RolloutSpec, RunContext, Seeded
from palaestra.rollouts.watchdog import Stages
from palaestra.rollouts.workspaces import image_of
from palaestra.tools.registry.registry import Kit
from palaestra_slots.core.config import slot_path
from palaestra_slots.core.errors import ConfigError, ImageError, InfraError, PrepareError, SandboxError, TaskError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON, Blame, Limits, NetworkPolicy, Task
from palaestra_slots.core.user_code import call_hook, run_hook, told
from palaestra_slots.sandbox.slot import Slot, Snapshot

if TYPE_CHECKING:
    from palaestra_slots.sandbox.snapshots.cache import Recipe

logger = logging.getLogger(__name__)

RETRIED = frozenset({Blame.SANDBOX, Blame.GRADER})
"""Failures that a fresh attempt may avoid. Failed requests to the model server are not among them, because the model
client has already retried these requests."""

REPLACED = RETRIED | {Blame.ENGINE, Blame.FILTER, Blame.TOOL}
"""Failures whose rollouts are replaced when groups must stay whole. A task's own failure would happen again."""

SETUP_TIMEOUT_S = 600.0
"""The time limit of a task's own `setup` script."""


class GroupRun:
    """Runs one group to its end. If `places` are given, each rollout waits for a place. The rollouts of a group that
    its environment collects do not: such a group keeps its reservation until it ends, because the environment decides
    how many rollouts the group has and which of them wait for others.

    `snapshots` has prepared workspaces by task id, for groups that share them: the group uses or adds the one of its
    task, and the caller forgets them.
    """

    def __init__(
        self,
        env: Environment,
        run: RunContext,
        number: int,
        task: Task,
        places: Places | None = None,
        snapshots: dict[str, Snapshot] | None = None,
    ) -> None:
        self.env = env
        self.run_context = run
        self.task = task
        self.group = Group(group_id=f"{number:06d}-{task.id}", number=number, task_id=task.id)
        self.begun = False
        """Whether this part of the run has written the group's event `GroupStarted`, which replaces the one of an
        earlier part."""
        self._kit: Kit | None = None
        self._preparation = Preparation(env, run, self.group, snapshots)
        self._places = places
        self.reserved = run.settings.group_size
        """The number of places that are still reserved for the group; at least one until the runner has passed the
        group on."""
        self._played: dict[int, Rollout] = {}
        self._play_numbers = itertools.count()
        self._releasing: list[asyncio.Future[None]] = []
        """The ends of the slots of recorded rollouts."""
        self._replacements = run.settings.group_size if run.settings.whole_groups else 0

    async def run(self) -> Group:
        """Return the finished group, already in the journal, after telling the environment. Raises only on
        cancellation, for bugs, and for errors that end the run, such as `ConfigError` and `DiskError`."""
        group = await self.play()
        try:
            await run_hook(TaskError, self.env.ended(self.task, group), f"reacting to the end of {group.group_id}")
        except TaskError as error:  # the group is in the journal
            self.run_context.events.note(str(error))
        return group

    async def play(self) -> Group:
        """Do what `run` does, without telling the environment that the group has ended."""
        run, group = self.run_context, self.group
        run.events.announce(GroupBegun(group))
        self._take_finished()
        asked = self.task
        try:
            self.task = await run_hook(PrepareError, self.env.resolve(self.task), f"resolving task {self.task.id}")
            self.task = _checked_task(self.task)
            if self.task.packages and not self.env.installs_packages:
                raise TaskError(f"task {self.task.id}: only function environments install packages")
            changed = self._prompt_changed(asked)
            self._kit = call_hook(TaskError, self._choose_tools, f"choosing tools for task {self.task.id}")
            for phase in Phase:  # reports an error of the environment once, and not in every rollout
                call_hook(TaskError, partial(self.env.slot_spec, self.task, phase), f"the sandbox of {self.task.id}")
            incomplete = not changed and self._is_incomplete
            if incomplete:
                await self._preparation.make(self.task)
            self._write_start()
            if incomplete:
                await self._continue_another()
                await self._roll_out()
        except (InfraError, TaskError) as error:
            group.error = told(error)
            group.blame = error.blame if isinstance(error, InfraError) else Blame.TASK
            self._write_start()
        except BaseException:
            await self._give_back()
            raise
        ended = GroupEnded(at=time.time(), group_id=group.group_id, number=group.number)
        ended.error, ended.blame = group.error, group.blame
        # Nothing waits for the ends of the slots and of the workspace: the next group begins meanwhile.
        self._preparation.leave_workspace()
        run.workspaces.finish_later(self._give_back())
        run.events.emit(ended)
        await run.events.journal.commit()
        return group

    async def _give_back(self) -> None:
        """Give the rollouts' slots and the prepared workspace back, and with it what a counterfactual run continues. A
        group that is cancelled must do it too."""
        run = self.run_context
        await asyncio.shield(asyncio.gather(*self._releasing, self._preparation.aclose()))
        if run.counterfactual is not None:
            await asyncio.shield(run.counterfactual.aclose(run.workspaces.pool))
            run.events.note(run.counterfactual.summary(self.group.trajectories))

    def _seeded(self, *parts: object) -> Seeded:
        """Return the random generator for the purpose `parts`. It depends only on `parts`, the run's seed and the
        group's id."""
        return Seeded(":".join(map(str, (self.run_context.settings.seed, self.group.group_id, *parts))))

    def _take_finished(self) -> None:
        """Keep the rollouts that an earlier part of this run finished; they are already in the journal."""
        for _, trajectory in sorted(self.run_context.earlier.rollouts.get(self.group.group_id, {}).items()):
            self.group.trajectories.append(trajectory)
            self.run_context.events.announce(RolloutKept(trajectory))

    def _prompt_changed(self, task: Task) -> bool:
        """Record the checksum of the task's prompt, and return whether the prompt differs from the one of the group's
        earlier rollouts. If it does, the group gets no more rollouts, because all rollouts of a group share one
        prompt."""
        group, run = self.group, self.run_context
        group.asked, before = prompt_checksum(task), run.earlier.asked.get(group.group_id, "")
        changed = before not in ("", group.asked) and bool(run.earlier.rollouts.get(group.group_id))
        if changed:
            group.asked = before
            run.events.note(
                f"The prompt of task {group.task_id} has changed since its earlier rollouts were recorded. These are "
                "kept, and no more are added. Use the run's seed (config.seed) for random choices in tasks"
            )
        return changed

    def _choose_tools(self) -> Kit:
        kit = self.env.kit(self.task, self._seeded("tools")())
        self.group.toolsets = kit.toolsets
        self.group.tools = kit.definitions
        self.group.tools_hash = kit.tools_hash
        self.env.agent_of(self.task)  # a limit without a usable value is reported once, and not in every rollout
        self.group.limits = dict(self.env.limits_of(self.task))
        self.group.tools_missing = dict(kit.registry.missing)
        missing = self.run_context.events.unreported(kit.registry.missing)
        if missing:
            reasons = "; ".join(f"{name} ({kit.registry.missing[name]})" for name in missing)
            self.run_context.events.note(f"tools left out: {reasons}")
        return kit

    @property
    def _is_incomplete(self) -> bool:
        """Whether the group lacks rollouts. Always True if the environment collects the group, because only `collect`
        knows the group's size."""
        done = {trajectory.index for trajectory in self.group.trajectories}
        return self.env.collects_groups or not done.issuperset(range(self.run_context.settings.group_size))

    def _write_start(self) -> None:
        """Write the group to the journal without its rollouts, which have their own lines."""
        alone = msgspec.structs.replace(self.group, trajectories=[])
        self.run_context.events.emit(GroupStarted(at=time.time(), group=alone))
        self.begun = True

    async def _continue_another(self) -> None:
        """In a counterfactual run, load the kept workspace from which rollouts continue, if there is one. If it cannot
        be used, the recorded calls are run again. Raises `TaskError` if the group cannot continue the earlier one."""
        begins, pool = self.run_context.counterfactual, self.run_context.workspaces.pool
        if begins is None:
            return
        if self.env.collects_groups or self.run_context.program is not None:
            raise TaskError(
                "only Palaestra's agent loop continues recorded rollouts, and something else plays this one"
            )
        turn, most = begins.point.origin.turn, self.env.agent_of(self.task).max_turns
        if turn >= most:
            raise TaskError(f"nothing can follow turn {turn}: raise the limit of {most} turns (--env.max_agent_turns)")
        if begins.point.tools_hash != self.group.tools_hash:
            raise TaskError(f"the tools of task {self.task.id} have changed, so its rollouts cannot be continued")
        if (problem := await begins.load(pool, self.env.slot_spec(self.task, Phase.AGENT))) is not None:
            self.run_context.events.note(f"the kept workspace cannot be used, so its calls are run again: {problem}")

    async def _roll_out(self) -> None:
        assert self._kit is not None
        wanted, failure = self.run_context.settings.group_size, None
        try:
            collection = GroupCollection(self.group.group_id, wanted, self._kit, self._play_next)
            collecting = self.env.collect(self.task, collection)
            count = await run_hook(TaskError, collecting, f"collecting {self.group.group_id}")
        except (InfraError, TaskError) as error:  # rollouts that have been played are still recorded
            failure, count = error, 0
            for rollout in self._played.values():
                # `collect` could still have changed these scores, so they are not final.
                if rollout.score is not None:
                    rollout.fail(error, error.blame if isinstance(error, InfraError) else Blame.TASK)
        indices = sorted({*range(count), *self._played} - {done.index for done in self.group.trajectories})
        await self._roll_out_each(indices)
        self.group.trajectories.sort(key=lambda trajectory: trajectory.index)
        if failure is not None:
            raise failure

    async def _roll_out_each(self, indices: Iterable[int]) -> None:
        places = None if self.env.collects_groups else self._places
        async with asyncio.TaskGroup() as rollouts:
            for index in indices:
                played = self._played.pop(index, None)
                if places is not None:
                    await places.acquire()
                ending = self._roll_out_one(index) if played is None else self._record_played(played)
                task = rollouts.create_task(ending, name=f"{self.group.group_id}/{index}")
                if places is not None:
                    # A task that is cancelled before its first step never runs, so a `finally` in it would not free the
                    # place.
                    task.add_done_callback(partial(self._free_place, places))

    def _free_place(self, places: Places, rollout: asyncio.Future[Any]) -> None:
        places.release()
        # The runner frees the last place, after it has passed the group on.
        if self.reserved > 1:
            self.reserved -= 1
            places.free(1)

    async def _play_next(self) -> Rollout:
        """Play the group's next rollout for an environment that collects the group, without recording its end."""
        index = next(self._play_numbers)
        rollout = await self._roll_out_one(index, recorded_later=True)
        assert rollout is not None
        self._played[index] = rollout
        return rollout

    async def _record_played(self, rollout: Rollout) -> None:
        await self._record_end(self._write_record(RolloutEnded, rollout))

    async def _record_end(self, event: RolloutEnded | AttemptDiscarded) -> None:
        """Add a rollout to the group, wait until its record is on the disk, and announce it."""
        self.group.trajectories.append(event.trajectory)
        await self.run_context.recorded_tools.commit()
        await self.run_context.events.journal.commit()
        self.run_context.events.announce(event)

    async def _roll_out_one(self, index: int, *, recorded_later: bool = False) -> Rollout | None:
        """Play one rollout with its retries and add its record. If `recorded_later`, return the rollout unrecorded
        instead."""
        assert self._kit is not None
        events, recorded, tried = self.run_context.events, self._recorded(index), 0
        start = self._start
        while True:
            recorded = recorded or start.recorded()
            # Made anew for each attempt, because a generator that has been used would give a retry other numbers.
            seeded, seed = self._seeded("rollout", start.seed_index(index)), start.sampling_seed(index)
            sampling = Seeded(seed) if seed else None
            spec = RolloutSpec(
                self.group.group_id, index, self.task, seeded, self._kit, self._preparation.snapshot, sampling
            )
            rollout = Rollout(self.env, self.run_context, spec, recorded)
            events.announce(RolloutBegun(rollout.rollout_id))
            event: RolloutEnded | AttemptDiscarded | None = None
            try:
                await rollout.play()
            finally:
                # In `finally`, because a cancelled attempt leaves a record too.
                not_repeated = _not_repeated(rollout, recorded)
                if not_repeated is None:
                    event = await self._write_attempt(rollout, tried, recorded_later=recorded_later)
            if not isinstance(event, RolloutEnded):
                await rollout.release()
            if not_repeated is not None:
                self._start_over(index, not_repeated)
                recorded = None
                continue
            if not isinstance(event, AttemptDiscarded):
                break
            tried += 1
            recorded = start.retried(recorded)
            events.announce(event)
            await self._preparation.restore()
        if event is None:
            return rollout
        # The slots end while the record goes to the disk, and the group waits for both.
        self._releasing.append(asyncio.ensure_future(rollout.release()))
        del rollout  # its tools and ledger need not wait for the disk
        await self._record_end(event)
        return None

    def _recorded(self, index: int) -> RecordedTurns | None:
        """Return the turns of a rollout that an earlier part of the run began; None if it starts from the beginning."""
        rollout_id = f"{self.group.group_id}/{index}"
        cut_off = self.run_context.earlier.cut_off.pop(rollout_id, None)
        if cut_off is None:
            return None
        recorded = self._start.resumed(cut_off)
        if recorded is None:  # it has only turns of the other run, which are repeated from the beginning
            anew = RolloutResumed(at=time.time(), rollout_id=rollout_id, turns=0, anew="it had no turn of its own")
            self.run_context.events.emit(anew)
            return None
        for tokens in cut_off.paid() if cut_off.ended is None else ():  # an existing record was already counted
            self.run_context.events.announce(TokensSpent(rollout_id, *tokens))
        if cut_off.ended is None and (asked := cut_off.model_calls.get(MODEL_COST)):
            self.run_context.events.announce(CostSpent(rollout_id, asked))
        if cut_off.tools_hash == self.group.tools_hash:
            return recorded
        recorded.fail(Mismatch.TOOLS)
        self._start_again(index, recorded)
        return None

    @property
    def _start(self) -> Start:
        return self.run_context.counterfactual or FROM_OPENING

    def _start_over(self, index: int, recorded: RecordedTurns) -> None:
        """Prepare the next attempt at a rollout whose recorded turns could not be repeated."""
        if recorded.failed is Mismatch.SETUP:
            self._start.rebuild()
            if not recorded.continues:
                return  # nothing was written yet
        self._start_again(index, recorded)

    def _start_again(self, index: int, recorded: RecordedTurns) -> None:
        """Record why a rollout cannot continue where it was cut off. Also record the cost of the lost attempt, unless
        the attempt already has a record."""
        events, rollout_id, reason = self.run_context.events, f"{self.group.group_id}/{index}", str(recorded.failed)
        if recorded.cut_off.ended is None:
            lost = recorded.cut_off.record(rollout_id, self.group, index, self.env.agent.prices)
            events.emit(AttemptDiscarded(at=time.time(), trajectory=lost))
        turns, replies = recorded.turns, recorded.replies
        events.emit(RolloutResumed(at=time.time(), rollout_id=rollout_id, turns=turns, replies=replies, anew=reason))
        if turns or replies:
            events.note(f"{rollout_id} starts over and discards {plural(turns, 'turn')}: {recorded.why}")

    async def _write_attempt(
        self, rollout: Rollout, tried: int, *, recorded_later: bool
    ) -> RolloutEnded | AttemptDiscarded | None:
        """Write the record of an attempt, which is discarded if another one follows. The last attempt of a rollout that
        is `recorded_later` is not written."""
        retried = not rollout.check_is_wrong and self._retries(_record_of(rollout), tried)
        if recorded_later and not retried:
            return None
        try:
            return self._write_record(AttemptDiscarded if retried else RolloutEnded, rollout)
        except BaseException:
            await rollout.release()
            raise

    def _write_record(
        self, kind: type[RolloutEnded | AttemptDiscarded], rollout: Rollout
    ) -> RolloutEnded | AttemptDiscarded:
        """Write the record of an attempt, without any data from the environment that the journal refuses, and return
        the written event."""
        while True:
            try:
                check = _check_own if rollout.has_own_record else None
                event = kind(at=time.time(), trajectory=_record_of(rollout))
                return self.run_context.events.journal.append(event, check)
            except ValueError as error:
                if not rollout.drop_unrecordable(error):
                    raise

    def _retries(self, trajectory: Trajectory, tried: int) -> bool:
        """Return whether the attempt is followed by another one: a retry of the rollout, or one of the group's
        replacements, which is then used up. A group that must be whole may have as many replacements as rollouts."""
        if trajectory.scored:
            return False
        if tried < self.run_context.settings.infra_retries and trajectory.blame in RETRIED:
            return True
        if self._replacements and trajectory.blame in REPLACED:
            self._replacements -= 1
            return True
        return False


class Preparation:
    """The prepared workspace of one group, made at most once unless it is lost.

    `snapshots` has prepared workspaces by task id, for groups that share them: the one of the task is used or added,
    and the caller forgets them.
    """

    def __init__(
        self, env: Environment, run: RunContext, group: Group, snapshots: dict[str, Snapshot] | None = None
    ) -> None:
        self.snapshot: Snapshot | None = None
        """The prepared workspace; None before `make`, and if the bare image is enough."""
        self._env = env
        self._run = run
        self._group = group
        self._shared = snapshots
        self._task: Task
        self._preparing = asyncio.Lock()

    async def make(self, task: Task) -> None:
        """Prepare the workspace for a task. Raises the errors of the preparation."""
        self._task = task
        self.snapshot = (self._shared or {}).get(task.id) or await self._prepared()

    async def restore(self) -> None:
        """Prepare the workspace again before a retry if its snapshot is lost, only once for all rollouts of the group.

        If the workspace can no longer be prepared, the next attempt fails and records why.
        """
        async with self._preparing:
            if self.snapshot is None or await self._run.workspaces.pool.snapshots.holds(self.snapshot):
                return
            try:
                self.snapshot = await self._prepared()
            except (InfraError, TaskError) as error:
                logger.warning("the lost workspace of task %s cannot be prepared again: %s", self._task.id, error)

    def leave_workspace(self) -> None:
        """Leave the workspace to the groups that share it, if any do."""
        if self.snapshot is not None and self._shared is not None:
            self._shared[self._task.id], self.snapshot = self.snapshot, None

    async def aclose(self) -> None:
        """Leave the workspace to the groups that share it, or drop it."""
        self.leave_workspace()
        if self.snapshot is not None:
            await self._run.workspaces.pool.snapshots.forget(self.snapshot)

    async def _prepared(self) -> Snapshot | None:
        """Return the group's snapshot; None if the bare image is enough. A preparation that fails with a `SandboxError`
        is retried as often as a rollout."""
        for _ in range(self._run.settings.infra_retries):
            try:
                return await self._attempt()
            except SandboxError as error:
                logger.warning("retrying the preparation of task %s: %s", self._task.id, error)
                if (key := self._env.shared_setup(self._task)) is not None:
                    await self._run.workspaces.drop_lost(key)
        return await self._attempt()

    async def _attempt(self) -> Snapshot | None:
        run, prepared = self._run, self._run.workspaces.prepared
        needed, recipe = call_hook(PrepareError, self._recipe, f"asking for the recipe of task {self._task.id}")
        if not needed:
            return None
        if recipe is not None and (why := run.workspaces.unshared()):
            run.events.note(
                f"the recipe of task {self._task.id} has no effect, and tasks are prepared in this run: {why}"
            )
        stages = Stages(self._group.group_id, run.events.alive, run.settings.idle_limits)
        async with stages.watched():
            if recipe is None or prepared is None:
                return await self._make_snapshot(stages)
            with stages.stage("store"):
                taken = await prepared().take(recipe, partial(self._make_snapshot, stages))
            self._group.from_store = taken.found
            # If it was not found, `_make_snapshot` has counted the time already.
            if taken.found:
                self._group.prepare_s += round(stages.seconds["store"], 6)
            return taken.snapshot

    def _recipe(self) -> tuple[bool, Recipe | None]:
        """Return whether the group needs a preparation, and the recipe of the preparation; the recipe is None if every
        run must prepare the group itself."""
        if self._env.shared_setup(self._task) is None and not self._env.prepares(self._task):
            return False, None
        task, spec = self._task, self._env.slot_spec(self._task, Phase.PREPARE)
        declared = self._env.recipe(task)
        if declared is None:
            return True, None
        # Imported here, because most tasks have no recipe.
        from palaestra_slots.sandbox.snapshots.cache import Put, Recipe, RunStep

        files = [Put(path, _bytes(content)) for path, content in task.files.items()]
        setup = [RunStep(task.setup)] if task.setup else []
        version = json.dumps(declared, sort_keys=True)
        return True, Recipe(spec, (*files, *setup), version, f"{self._env.name} {task.id}")

    async def _make_snapshot(self, stages: Stages) -> Snapshot:
        key, base = self._env.shared_setup(self._task), None
        more = key is not None or self._task.setup or self._env.has_own_preparation(self._task)
        if self._task.files and not more and (composed := await self._composed(stages)) is not None:
            return composed
        if key is not None:
            prepare = partial(self._in_slot, stages, self._env.prepare_shared, None, f"preparing {key}")
            base = await self._run.workspaces.shared(key, prepare)
        return await self._in_slot(stages, self._fill, base, f"preparing task {self._task.id}")

    async def _composed(self, stages: Stages) -> Snapshot | None:
        """Return a workspace that has nothing but the task's files; None if it takes a slot to write them."""
        task, pool, started = self._task, self._run.workspaces.pool, time.perf_counter()
        spec = self._env.slot_spec(task, Phase.PREPARE)
        files = {path: _bytes(content) for path, content in task.files.items()}
        with stages.stage("prepare"):
            snapshot = await run_hook(PrepareError, pool.snapshots.compose(spec, files), f"preparing task {task.id}")
        if snapshot is not None:
            self._group.prepare_s += round(time.perf_counter() - started, 6)
        return snapshot

    async def _in_slot(
        self, stages: Stages, work: Callable[[Task, Slot], Awaitable[None]], base: Snapshot | None, doing: str
    ) -> Snapshot:
        """Run a preparation in a slot, seal the slot and return the snapshot. An unexpected error in `work` is blamed
        on the task."""
        workspaces, spec = self._run.workspaces, self._env.slot_spec(self._task, Phase.PREPARE)
        before = stages.seconds.get("acquire", 0.0)
        with image_of(self._task):
            slot = await workspaces.lease(f"{self._group.group_id}:prepare", spec, base, stages)
        # The time to make the slot belongs to the preparation, the wait for room (`admit`) does not.
        started = time.perf_counter() - (stages.seconds["acquire"] - before)
        try:
            with stages.stage("prepare"):
                await run_hook(PrepareError, work(self._task, slot), doing)
        # Also on cancellation. After the block, sealing ends the lease, even if it fails.
        except BaseException:
            await asyncio.shield(workspaces.pool.release(slot))
            raise
        with stages.stage("seal"):
            snapshot = await workspaces.pool.seal(slot)
        self._group.prepare_s += round(time.perf_counter() - started, 6)
        return snapshot

    async def _fill(self, task: Task, slot: Slot) -> None:
        for path, content in task.files.items():
            await slot.write_bytes(path, _bytes(content))
        if task.setup:
            done = await slot.execute(task.setup, timeout_s=SETUP_TIMEOUT_S)
            if not done.success:
                raise PrepareError(
                    f"the setup script of {task.id} failed ({done.error}):\n{without_middle(done.output, 2000)}"
                )
        await self._env.prepare(task, slot)


def _not_repeated(rollout: Rollout, recorded: RecordedTurns | None) -> RecordedTurns | None:
    """Return the recorded turns if the attempt could not repeat them, so that the rollout starts over. Turns of another
    run cannot be taken again, so then the rollout fails instead."""
    if recorded is None or recorded.failed is None:
        return None
    if recorded.restarts:
        return recorded
    rollout.fail(TaskError(f"the recorded turns cannot be repeated here: {recorded.why}"), Blame.TASK)
    return None


def _record_of(rollout: Rollout) -> Trajectory:
    """Return the rollout's record. An environment's own result that makes no record is dropped."""
    try:
        return rollout.trajectory()
    except Exception as error:
        if not rollout.drop_unrecordable(error):
            raise
        return _record_of(rollout)


def _check_own(event: RolloutEnded | AttemptDiscarded) -> None:
    check_own(event.trajectory)


def prompt_checksum(task: Task) -> str:
    """Return a checksum of the task's prompt, the same in every part of a run."""
    return checksum(task.messages())


_KINDS: Mapping[str, tuple[type, ...]] = {
    "network": (NetworkPolicy,),
    "limits": (Limits,),
    "files": (Mapping,),
    **dict.fromkeys(("image", "setup", "recipe"), (str, NoneType)),
}


def _checked_task(task: Task) -> Task:
    """Return the task with complete paths. Raises `TaskError` for invalid fields, such as those from a bad row."""
    for name, kinds in _KINDS.items():
        value = getattr(task, name)
        if not isinstance(value, kinds):
            raise TaskError(f"task {task.id}: {name} is {value!r:.100}, not a {kinds[0].__name__}")
    if task.image:
        from palaestra_slots.sandbox.images.reference import check_image  # imported here, as most tasks have none

        try:
            check_image(task.image)
        except ImageError as error:
            raise TaskError(f"task {task.id}: {error}") from None
    for path, content in task.files.items():
        if not isinstance(content, str | bytes):
            raise TaskError(f"task {task.id}: its file {path!r} is {content!r:.100}, neither text nor bytes")
    # A text would pass as a sequence of names of one letter each.
    for name in ("toolsets", "solutions", "wrong_solutions"):
        if isinstance(names := getattr(task, name), str):
            raise TaskError(f"task {task.id}: {name} must be a list, such as [{names[:80]!r}]")
    if task.grading not in ("sealed", "live"):
        raise TaskError(f"task {task.id}: grading must be sealed or live, not {task.grading!r}")
    try:
        paths = [slot_path(path) for path in task.paths]
    except ConfigError as error:
        raise TaskError(f"task {task.id}: its paths: {error}") from None
    if not _is_prompt(task.prompt):
        raise TaskError(f"task {task.id}: its prompt is {task.prompt!r:.100}, neither text nor messages with roles")
    return task if paths == [*task.paths] else replace(task, paths=paths)


def _is_prompt(prompt: JSON) -> bool:
    """Return whether this is text, or messages with roles."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return isinstance(prompt, str)
    return bool(prompt) and all(isinstance(each, Mapping) and each.get("role") for each in prompt)


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def failed_for_the_engine(group: Group) -> bool:
    """Return whether every rollout of the group ended because the model server failed."""
    return bool(group.trajectories) and all(rollout.blame is Blame.ENGINE for rollout in group.trajectories)
