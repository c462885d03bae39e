"""One group: prepare the task's workspace once, then let `group_size` rollouts start from forks of it.

Where the environment says what its preparation depends on, a workspace that another run has prepared is used as it
is, and one that is prepared here is kept for others (`sandbox/snapshots/cache.py`). Not so with a network, whatever
is said.

A preparation that fails ends the group with an error and no trajectory: nothing was rolled out, so nothing is scored.
A prepared workspace that is lost with its backend is prepared again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from palaestra.core.errors import InfraError, PrepareError, SandboxError, TaskError
from palaestra.core.seeded_random import Seeded
from palaestra.core.types import JSON, Blame, Limits, Network, NetworkPolicy, Task
from palaestra.core.user_code import told
from palaestra.inference.engine import Engine, SessionContext
from palaestra.rollouts.admission import AdmittedSlots
from palaestra.rollouts.attempt import Attempt, blaming
from palaestra.rollouts.environment import Environment, Kit, Phase
from palaestra.rollouts.export.atropos import check_own
from palaestra.rollouts.journal.journal import AttemptDiscarded, GroupEnded, GroupStarted, Journal, RolloutEnded
from palaestra.rollouts.limits import Stops
from palaestra.rollouts.observe.console import Observer
from palaestra.rollouts.observe.tracing.spans import NO_TRACING, Tracing
from palaestra.rollouts.recorded_tools.recording_policy import RunWorld
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.resume.recorded_chat import Recall, checksum
from palaestra.rollouts.resume.state import CutOff
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.shared_setup import Foundations
from palaestra.rollouts.turn_journal import Turns
from palaestra.rollouts.watchdog import IDLE_LIMITS, Stages
from palaestra.sandbox.slot import Slot, Snapshot
from palaestra.sandbox.snapshots.cache import Prepared, Put, Recipe, Run
from palaestra.tools.registry.registry import schema_hash

logger = logging.getLogger(__name__)

RETRIED = frozenset({Blame.SANDBOX, Blame.GRADER})
"""Whose failures are worth a fresh attempt. The engine's client has already retried its own."""

REPLACED = RETRIED | {Blame.ENGINE, Blame.TOOL}
"""Whose failures are made good where groups are to stay whole. What a task does to itself it does again."""

SETUP_TIMEOUT_S = 600.0
"""How long a task's own `setup` script may take."""


@dataclass(frozen=True, slots=True)
class Services:
    """What all groups of a run share."""

    engine: Engine
    slots: AdmittedSlots
    journal: Journal
    observer: Observer
    seed: int = 0
    group_size: int = 1
    infra_retries: int = 0
    foundations: Foundations = field(kw_only=True)
    prepared: Prepared | None = None
    finished: Mapping[str, Mapping[int, Trajectory]] = field(default_factory=dict)
    cut_off: dict[str, CutOff] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[int, str] = field(default_factory=dict)
    idle_limits: Mapping[str, float] = field(default_factory=lambda: IDLE_LIMITS)
    whole_groups: bool = False
    world: RunWorld = field(default_factory=RunWorld)
    reported: set[str] = field(default_factory=set)
    tracing: Tracing = NO_TRACING
    timings: Mapping[str, float] = field(default_factory=dict)
    stops: Stops = field(default_factory=Stops)

    def report_missing(self, missing: Mapping[str, str]) -> None:
        """Say once per run which tools were asked for and are not here."""
        fresh = [f"{name} ({reason})" for name, reason in missing.items() if name not in self.reported]
        self.reported.update(missing)
        if fresh:
            self.observer.note(f"tools left out: {'; '.join(fresh)}")


class GroupRun:
    """Runs one group to its end."""

    def __init__(self, env: Environment, services: Services, number: int, task: Task) -> None:
        self.env = env
        self.services = services
        self.task = task
        self.group = Group(group_id=f"{number:06d}-{task.id}", number=number, task_id=task.id)
        self.begun = False
        """Whether the journal has its start, which replaces what it had of the group before."""
        self._kit: Kit | None = None
        self._snapshot: Snapshot | None = None
        self._preparing = asyncio.Lock()
        self._replacements = services.group_size if services.whole_groups else 0
        self._turns = Turns(services.journal, services.observer, services.cut_off, self.group, env.agent.prices)

    async def run(self) -> Group:
        """The finished group, already in the journal. Raises only on cancellation and on our own bugs."""
        with self.services.tracing.group(self.group):
            return await self._run()

    async def _run(self) -> Group:
        services, group = self.services, self.group
        services.observer.group_started(group.number, group.task_id)
        self._take_over()
        asking = self.task
        try:
            self.task = await blaming(PrepareError, self.env.resolve(self.task), f"resolving task {self.task.id}")
            _check(self.task)
            asks_otherwise = self._ask(asking)
            self._kit = await blaming(TaskError, self._resolve_tools(), f"choosing tools for task {self.task.id}")
            lacks = not asks_otherwise and self._lacks_rollouts
            self._snapshot = await self._prepare() if lacks else None
            self._write_start()
            if lacks:
                await self._roll_out()
        except (InfraError, TaskError) as error:
            group.error = told(error)
            group.blame = error.blame if isinstance(error, InfraError) else Blame.TASK
            self._write_start()
        finally:
            if self._snapshot is not None:
                await asyncio.shield(services.slots.forget(self._snapshot))
        services.journal.append(
            GroupEnded(at=time.time(), group_id=group.group_id, number=group.number, error=group.error)
        )
        await services.journal.commit()
        await self.env.ended(self.task, group)
        return group

    def _seeded(self, *parts: object) -> Seeded:
        """A generator of its own for each purpose, derived from the run's seed and the item alone."""
        return Seeded(":".join(map(str, (self.services.seed, self.group.group_id, *parts))))

    async def _resolve_tools(self) -> Kit:
        kit = self.env.kit(self.task, self._seeded("tools")())
        self.group.toolsets = kit.toolsets
        self.group.tools = kit.definitions
        self.group.tools_hash = schema_hash(self.group.tools)
        self.group.tools_missing = dict(kit.registry.missing)
        self.services.report_missing(kit.registry.missing)
        return kit

    async def _prepare(self) -> Snapshot | None:
        """The group's own snapshot; None when the bare image will do. Where the backend dies under it, it is tried
        again, as often as a rollout is."""
        for _ in range(self.services.infra_retries):
            try:
                return await self._prepare_once()
            except SandboxError as error:
                logger.warning("preparing task %s is tried again: %s", self.task.id, error)
                if (key := self.env.foundation(self.task)) is not None:
                    await self.services.foundations.drop_lost(key)
        return await self._prepare_once()

    async def _prepare_once(self) -> Snapshot | None:
        services = self.services
        at = Stages(self.group.group_id, services.observer.stage, services.idle_limits, services.tracing)
        async with at.watched():
            recipe = await blaming(PrepareError, self._recipe(), f"asking for the recipe of task {self.task.id}")
            if recipe is None or services.prepared is None:
                return await self._make(at) if self._prepares else None
            with at.stage("store"):
                taken = await services.prepared.take(recipe, partial(self._make, at))
            self.group.from_store = taken.found
            if taken.found:
                self.group.prepare_s += round(at.seconds["store"], 6)
            return taken.snapshot

    @property
    def _prepares(self) -> bool:
        return self.env.foundation(self.task) is not None or self.env.prepares(self.task)

    async def _recipe(self) -> Recipe | None:
        """What the preparation is a function of; None where it has to be done in every run."""
        task, spec = self.task, self.env.slot_spec(self.task, Phase.PREPARE)
        declared = self.env.recipe(task)
        if declared is None or spec.network is not Network.OFF or not self._prepares:
            return None
        files = [Put(path, _bytes(content)) for path, content in task.files.items()]
        setup = [Run(task.setup)] if task.setup else []
        version = json.dumps(declared, sort_keys=True)
        return Recipe(spec, (*files, *setup), version, f"{self.env.name} {task.id}")

    async def _make(self, at: Stages) -> Snapshot:
        key, foundation = self.env.foundation(self.task), None
        if key is not None:
            lay = partial(self._in_slot, at, self.env.lay, None, f"laying the foundation {key}")
            foundation = await self.services.foundations.get(key, lay)
        return await self._in_slot(at, self._fill, foundation, f"preparing task {self.task.id}")

    async def _restore(self) -> None:
        """Before another attempt: prepare the workspace again, where the snapshot of it is lost. Once for all rollouts.

        What cannot be prepared any more is left to the attempt to find out and record.
        """
        async with self._preparing:
            if self._snapshot is None or await self.services.slots.holds(self._snapshot):
                return
            try:
                self._snapshot = await self._prepare()
            except (InfraError, TaskError) as error:
                logger.warning("the lost workspace of task %s cannot be prepared again: %s", self.task.id, error)

    async def _in_slot(
        self, at: Stages, work: Callable[[Task, Slot], Awaitable[None]], base: Snapshot | None, doing: str
    ) -> Snapshot:
        """Do preparation work in a slot and seal it. What goes wrong in it is the task's fault."""
        slots = self.services.slots
        with at.stage("admit"):
            await slots.admit()
        started = time.perf_counter()
        spec = self.env.slot_spec(self.task, Phase.PREPARE)
        with at.stage("acquire"):
            slot = await slots.lease(f"{self.group.group_id}:prepare", spec=spec, snapshot=base)
        try:
            with at.stage("prepare"):
                await blaming(PrepareError, work(self.task, slot), doing)
        except BaseException:
            await asyncio.shield(slots.release(slot))
            raise
        with at.stage("seal"):
            snapshot = await slots.seal(slot)
        self.group.prepare_s += round(time.perf_counter() - started, 6)
        return snapshot

    async def _fill(self, task: Task, slot: Slot) -> None:
        for path, content in task.files.items():
            await slot.write_bytes(path, _bytes(content))
        if task.setup:
            done = await slot.execute(task.setup, timeout_s=SETUP_TIMEOUT_S)
            if not done.success:
                raise PrepareError(f"the setup script of {task.id} failed ({done.error}):\n{done.output[-2000:]}")
        await self.env.prepare(task, slot)

    def _ask(self, task: Task) -> bool:
        """Note what is asked; whether that is something else than the rollouts that the group has were asked: a group
        is of one question, so it stays with those."""
        group, services = self.group, self.services
        group.asked, before = asked(task), services.asked.get(group.group_id, "")
        otherwise = before not in ("", group.asked) and bool(services.finished.get(group.group_id))
        if otherwise:
            group.asked = before
            services.observer.note(
                f"{group.task_id} asks something else now than the rollouts that its group has: it gets no more of "
                "them. What a task asks should be drawn from the run's seed (config.seed)"
            )
        return otherwise

    def _take_over(self) -> None:
        """Keep what an earlier part of this run finished of the group. The journal has it."""
        for _, trajectory in sorted(self.services.finished.get(self.group.group_id, {}).items()):
            self.group.trajectories.append(trajectory)
            self.services.observer.rollout_finished(trajectory)

    @property
    def _lacks_rollouts(self) -> bool:
        """Whether anything is left to roll out. How many a group has that is collected in one go, only that can say."""
        done = {trajectory.index for trajectory in self.group.trajectories}
        return self.env.collects_groups or not done.issuperset(range(self.services.group_size))

    def _write_start(self) -> None:
        """Write down what the group begins with. The journal has its rollouts by themselves."""
        alone = msgspec.structs.replace(self.group, trajectories=[])
        self.services.journal.append(GroupStarted(at=time.time(), group=alone))
        self.begun = True

    async def _roll_out(self) -> None:
        count = await self.env.collect(self.task, self.group.group_id, self.services.group_size)
        async with asyncio.TaskGroup() as rollouts:
            for index in sorted(set(range(count)) - {done.index for done in self.group.trajectories}):
                rollouts.create_task(self._one(index), name=f"{self.group.group_id}/{index}")
        self.group.trajectories.sort(key=lambda trajectory: trajectory.index)

    async def _one(self, index: int) -> None:
        recall, tried = self._turns.recall(index), 0
        while True:
            attempt = Attempt(self.env, self._rollout(index, self._snapshot, recall))
            with self.services.tracing.rollout(attempt.rollout.rollout_id) as ended:
                try:
                    await attempt.run()
                finally:
                    trajectory = attempt.trajectory()
                    ended(trajectory)
                    anew = recall is not None and recall.failed is not None
                    kept = not anew and not self._again(trajectory, tried)
                    if not anew:
                        trajectory = self._write(RolloutEnded if kept else AttemptDiscarded, attempt, trajectory)
            if kept:
                break
            if recall is not None and recall.failed is not None:
                self._turns.begin_anew(index, recall)
                recall = None
                continue
            tried += 1
            recall = recall.again() if recall is not None and not recall.caught_up else None
            self.services.observer.attempt_discarded(trajectory)
            await self._restore()
        del attempt  # the rollout, its tools and its ledger need not wait for the disk
        self.group.trajectories.append(trajectory)
        await self.services.world.commit()
        await self.services.journal.commit()
        self.services.observer.rollout_finished(trajectory)

    def _write(
        self, event: type[RolloutEnded | AttemptDiscarded], attempt: Attempt, trajectory: Trajectory
    ) -> Trajectory:
        """Write how an attempt ended, without what its environment made that no record can hold."""
        while True:
            try:
                ended = event(at=time.time(), trajectory=trajectory)
                return self.services.journal.append(ended, lambda read: check_own(read.trajectory)).trajectory
            except ValueError as error:
                if not attempt.strip(error):
                    raise
                trajectory = attempt.trajectory()

    def _again(self, trajectory: Trajectory, tried: int) -> bool:
        """Whether a rollout that ended so is tried again: as its own retry, or as one of the group's replacements, of
        which there are as many as rollouts."""
        if trajectory.scored:
            return False
        if tried < self.services.infra_retries and trajectory.blame in RETRIED:
            return True
        if self._replacements and trajectory.blame in REPLACED:
            self._replacements -= 1
            return True
        return False

    def _rollout(self, index: int, snapshot: Snapshot | None, recall: Recall | None = None) -> Rollout:
        assert self._kit is not None
        rollout_id = f"{self.group.group_id}/{index}"
        seeded = self._seeded("rollout", index)
        context = SessionContext(
            rollout_id=rollout_id, task=self.task, index=index, seeded=seeded, tools=self._kit.registry.list_tools()
        )
        return Rollout(
            rollout_id=rollout_id,
            group_id=self.group.group_id,
            index=index,
            task=self.task,
            seeded=seeded,
            server=self.services.engine.session(context),
            kit=self._kit,
            slots=self.services.slots,
            spec=self.env.slot_spec(self.task, Phase.AGENT),
            snapshot=snapshot,
            settings=self.env.agent,
            on_turn=self._turns.keep,
            on_reply=self._turns.keep_reply,
            on_stage=self.services.observer.stage,
            idle_limits=self.services.idle_limits,
            tracing=self.services.tracing,
            world=self.services.world.rollout(rollout_id, lambda: recall is not None and recall.repeats),
            recall=recall,
            stops=self.services.stops,
        )


def asked(task: Task) -> str:
    """What a task asks, as a checksum: in every part of a run it should be the same."""
    return checksum(task.messages())


_KINDS = {"network": NetworkPolicy, "limits": Limits, "files": Mapping, "image": str, "setup": str, "recipe": str}
_MAY_BE_NONE = frozenset({"image", "setup", "recipe"})


def _check(task: Task) -> None:
    """Raises `TaskError` for what no rollout can begin from, as a row of a data set may give it."""
    for name, kind in _KINDS.items():
        value = getattr(task, name)
        if not isinstance(value, kind) and not (value is None and name in _MAY_BE_NONE):
            raise TaskError(f"task {task.id}: {name} is {value!r:.100}, not a {kind.__name__}")
    for path, content in task.files.items():
        if not isinstance(content, str | bytes):
            raise TaskError(f"task {task.id}: its file {path!r} is {content!r:.100}, neither text nor bytes")
    if isinstance(task.toolsets, str):
        raise TaskError(f"task {task.id}: toolsets must be a list, such as [{task.toolsets!r}]")
    if isinstance(task.prompt, str):
        return
    messages: JSON = task.prompt
    fine = isinstance(messages, Sequence) and all(isinstance(each, Mapping) and each.get("role") for each in messages)
    if not fine or not messages:
        raise TaskError(f"task {task.id}: its prompt is {messages!r:.100}, neither a text nor messages with roles")


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def failed_for_the_engine(group: Group) -> bool:
    """Whether every rollout of the group ended because the model server failed."""
    return bool(group.trajectories) and all(rollout.blame is Blame.ENGINE for rollout in group.trajectories)
