"""One run of a function environment: its tasks, tools, preparation and score. `function_form.py` declares the
environment."""

from __future__ import annotations

import functools
import inspect
import json
import random
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from palaestra.envs.api.declaration import Declaration, FunctionEnvConfig, Hook, Source, TaskSource
from palaestra.envs.api.hook_commands import HookCommands
from palaestra.envs.run.evaluate import HeldOutEnvironment
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.rollout import CURRENT, Rollout
from palaestra.rollouts.spec import Phase
from palaestra.tools.registry.registry import Kit
from palaestra.tools.tool import RolloutState
from palaestra_slots.core.errors import ConfigError, TaskError, WorkError
from palaestra_slots.core.io.threads import OneThread
from palaestra_slots.core.types import JSON, Message, NetworkPolicy, Score, Task
from palaestra_slots.core.user_code import called_off_loop, run_hook, score_of
from palaestra_slots.sandbox.slot import Slot, SlotSpec

if TYPE_CHECKING:
    from palaestra.envs.api.declared_packages import DeclaredPackages


class FunctionEnvironment(HeldOutEnvironment):
    """One run's view of a function environment."""

    config: FunctionEnvConfig

    def __init__(self, form: Declaration, config: FunctionEnvConfig) -> None:
        super().__init__(config)
        self.form = form

    async def open(self) -> None:
        await super().open()
        if self.form.packages:
            self._packages.check()
        self._task_kit(self.form.toolsets, Task(id="", prompt=""), random.Random(0))  # report errors early

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def label_names(self) -> Collection[str]:
        return self.form.label_names

    @property
    def scores_read_sandbox(self) -> bool:
        return any("sandbox" in each.hook.wants or _uses_sandbox(each.hook) for each in self.form.scores)

    @property
    def counts_tasks(self) -> bool:
        return not inspect.isasyncgenfunction(self.form.source)  # an async generator may wait for the run

    async def tasks(self) -> AsyncIterator[Task]:
        own = type(self.config).model_fields.keys() - FunctionEnvConfig.model_fields.keys()
        produced = _each(self.form.source, {name: getattr(self.config, name) for name in own})
        seen: set[str] = set()
        end = object()
        while True:
            doing = f"environment {self.name} has no task {len(seen)}: its function"
            task = await run_hook(ConfigError, anext(produced, end), doing)
            if task is end:
                return
            checked = self._checked(task, seen)
            if self._serves(checked.id):
                yield checked

    def _checked(self, task: object, seen: set[str]) -> Task:
        if not isinstance(task, Task):
            raise TaskError(f"environment {self.name} yielded {type(task).__name__} instead of a Task: {task!r:.200}")
        if task.id in seen:
            raise TaskError(f"environment {self.name} yielded two tasks with the id {task.id!r}; ids must differ")
        seen.add(task.id)
        config = self.config
        if config.graded_paths or config.graded_programs:
            paths, programs = (*task.paths, *config.graded_paths), (*task.programs, *config.graded_programs)
            task = replace(task, paths=paths, programs=programs)
        if config.allow_network and task.network == NetworkPolicy():
            return replace(task, network=self._policy)
        return task

    def kit(self, task: Task, rng: random.Random) -> Kit:
        try:
            return self._task_kit(self.form.toolsets if task.toolsets is None else task.toolsets, task, rng)
        except ConfigError as error:
            if task.toolsets is None:
                raise
            raise TaskError(f"task {task.id}: {error}") from None

    def _task_kit(self, toolsets: Sequence[str], task: Task, rng: random.Random) -> Kit:
        return self._kit(toolsets, [own for tool in self.form.tools if (own := tool.for_task(task)) is not None], rng)

    installs_packages = True

    @functools.cached_property
    def _packages(self) -> DeclaredPackages:
        from palaestra.envs.api.declared_packages import DeclaredPackages  # imported here, because few declare any

        return DeclaredPackages(self.form.name, self.form.packages, self.config)

    def _declares_packages(self, task: Task) -> bool:
        # Not by its truth: None or an empty text is no list of names, which `install` reports.
        return bool(self.form.packages) or task.packages != ()

    async def resolve(self, task: Task) -> Task:
        if self._declares_packages(task):
            await self._packages.install(task)
        return task

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        spec = super().slot_spec(task, phase)
        return self._packages.added_to(spec, task) if self._declares_packages(task) else spec

    def prepares(self, task: Task) -> bool:
        return self.form.preparation is not None or super().prepares(task)

    def has_own_preparation(self, task: Task) -> bool:
        return self.form.preparation is not None

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        if self.form.preparation is not None:
            rng = random.Random(f"{self.config.seed}:{task.id}:prepare")
            await _call_hook(
                self.form.preparation, {"task": _constant(task), "sandbox": _constant(sandbox), "rng": _constant(rng)}
            )

    def recipe(self, task: Task) -> JSON:
        """Return the task's declared cache key and, if there is a prepare hook, everything on which the hook may
        depend: code, settings, seed and task."""
        hook = self.form.preparation
        if task.recipe is None or hook is None:
            return task.recipe
        from palaestra.envs import cache_key  # imported here, because few tasks with a hook have a recipe

        return [
            task.recipe,
            cache_key.of_code([hook.function, self.form.source], task.id),
            cache_key.of_settings(self.config, FunctionEnvConfig),
            self.config.seed,
            cache_key.of_data(task, task.id),
        ]

    async def begin(self, rollout: Rollout) -> None:
        if self.form.made_state is not None:
            CURRENT.set(rollout)  # in the task of this hook only
            rng = random.Random(f"{self.config.seed}:{rollout.task.id}:state")
            sources = {"task": _constant(rollout.task), "rng": _constant(rng)}
            rollout.keep_state(RolloutState(await _call_hook(self.form.made_state, sources)))

    @property
    def has_user(self) -> bool:
        return self.form.next_message is not None

    @property
    def user_works(self) -> bool:
        return self.form.next_message is not None and "sandbox" in self.form.next_message.wants

    async def next_message(self, rollout: Rollout, messages: Sequence[Message]) -> Message | None:
        hook = self.form.next_message
        assert hook is not None
        CURRENT.set(rollout)  # in the task of this hook only
        turn = sum(message.get("role") == "assistant" for message in messages)
        # A user that is asked again, after a resume, draws the same numbers.
        rng = random.Random(f"{self.config.seed}:{rollout.rollout_id}:user:{turn}")
        sources: dict[str, Source] = {
            "task": _constant(rollout.task),
            "state": _constant(None if rollout.state is None else rollout.state.value),
            "messages": _constant([dict(message) for message in messages]),
            "rollout": _constant(rollout),
            "sandbox": rollout.sandbox,
            "rng": _constant(rng),
        }
        return _user_message(await _call_hook(hook, sources), hook.name)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        commands = HookCommands(grading, in_class=False)
        CURRENT.set(rollout)  # in the task of this check only

        async def rng() -> object:  # made only for a score that asks for it: a generator takes 2.5 KB
            return rollout.rng

        async def state() -> object:  # a copy, because a check that fails is repeated
            return None if rollout.state is None else rollout.state.copy()

        sources: dict[str, Source] = {
            "task": _constant(rollout.task),
            "state": state,
            "rollout": _constant(rollout),
            "sandbox": commands.slot,
            "rng": rng,
        }
        with commands.explained():
            parts = []
            for each in self.form.scores:
                parts.append((each.hook.name, each.weight, await _score(each.hook, sources)))
        return commands.noted(parts[0][2] if len(parts) == 1 else _weighted_mean(parts))


def _weighted_mean(parts: Sequence[tuple[str, float, Score]]) -> Score:
    """Return one score for the named, weighted scores of a rollout. It has an official verdict if one of them has."""
    total = sum(weight for _, weight, _ in parts)
    reward = sum(weight * part.reward for _, weight, part in parts) / total
    metrics = {name: value for _, _, part in parts for name, value in part.metrics.items()}
    metrics |= {name: part.reward for name, _, part in parts}  # last, because each score is recorded under its name
    official = None
    if any(part.official is not None for _, _, part in parts):
        verdicts = [(weight, part.reward if part.official is None else part.official) for _, weight, part in parts]
        official = sum(weight * verdict for weight, verdict in verdicts) / total
    detail = {key: value for _, _, part in parts for key, value in part.detail.items()}
    labels = [label for _, _, part in parts for label in part.labels]
    return Score(reward, metrics, detail, official, labels)


async def _each(source: TaskSource, settings: Mapping[str, JSON]) -> AsyncIterator[object]:
    """Yield the tasks that a function yields. A synchronous function runs in its own thread, so that rollouts do not
    wait while it reads or computes."""
    if inspect.isasyncgenfunction(source):
        async for task in source(**settings):
            yield task
        return
    end, thread = object(), OneThread("tasks")
    try:
        produced = await thread.call(partial(source, **settings))
        if isinstance(produced, AsyncIterator):
            async for task in produced:
                yield task
            return
        if not isinstance(produced, Iterable):
            raise TypeError(f"it returned {type(produced).__name__} instead of tasks; yield each Task")
        # `next` gets a default, because a StopIteration cannot be set as the error of a future.
        tasks = await thread.call(partial(iter, produced))
        while (task := await thread.call(partial(next, tasks, end))) is not end:
            yield task
    finally:
        thread.close()


def _uses_sandbox(hook: Hook) -> bool:
    """Return whether a hook may call `rollout.sandbox()`."""
    code = getattr(inspect.unwrap(hook.function), "__code__", None)
    return code is None or "sandbox" in code.co_names


def _constant(value: object) -> Source:
    async def constant() -> object:
        return value

    return constant


def _user_message(said: object, hook: str) -> Message | None:
    """Return what a user said as a message that the journal can have. Raises `TaskError`."""
    if isinstance(said, str):
        return {"role": "user", "content": said}
    if said is None:
        return None
    if not isinstance(said, Mapping) or said.get("role", "user") != "user" or "content" not in said:
        raise TaskError(
            f"the user {hook} returned {said!r:.100}; it must return text, a message with role `user`, or None"
        )
    try:
        message: Message = json.loads(json.dumps({**said, "role": "user"}))
    except (TypeError, ValueError) as error:
        raise TaskError(f"the user {hook} returned a message that is not JSON: {error}") from None
    return message


async def _score(hook: Hook, sources: Mapping[str, Source]) -> Score:
    """Return one part of the score: 0 if the hook let the failure of the work pass."""
    try:
        return score_of(await _call_hook(hook, sources), f"the score {hook.name}")
    except WorkError as error:
        return Score(0.0, detail={"work_failed": str(error)})


async def _call_hook(hook: Hook, sources: Mapping[str, Source]) -> JSON:
    """Call a hook's function with the arguments that its parameters name, and return its answer. Raises
    `NotAwaited`."""
    arguments = {}
    for name in hook.wants:
        arguments[name] = await sources[name]()
    slot = arguments.get("sandbox")
    if slot is None:
        return await called_off_loop(hook.function, **arguments)
    with AwaitedSlot(cast("Slot", slot)) as arguments["sandbox"]:
        return await called_off_loop(hook.function, **arguments)


class NotAwaited(RuntimeError):
    """Raised if a hook did not await a call of a slot method."""


class AwaitedSlot:
    """A slot for a hook, used as a `with` block. At the end of the block, every call of a slot method must have been
    awaited.

    A call without `await` never runs. It returns a coroutine, which is true and equal to nothing else, so a score that
    compares it would give every rollout the same reward. An attribute of the coroutine, such as `.output`, does not
    exist; the error then names the call. Shells, processes and forks of the slot are not checked. Raises `NotAwaited`.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._calls: list[tuple[str, Coroutine[object, object, object]]] = []

    def __getattr__(self, name: str) -> object:
        found = getattr(self._slot, name)
        if not inspect.iscoroutinefunction(found):
            return found

        @functools.wraps(found)
        def call(*args: Any, **named: Any) -> Coroutine[object, object, object]:
            work: Coroutine[object, object, object] = found(*args, **named)
            self._calls.append((name, work))
            return work

        return call

    def __repr__(self) -> str:
        return repr(self._slot)

    def __enter__(self) -> Slot:
        return cast("Slot", self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        forgotten = [(name, work) for name, work in self._calls if inspect.getcoroutinestate(work) == "CORO_CREATED"]
        for _, work in forgotten:
            # Otherwise Python would also warn of a coroutine that was never awaited, without naming the call.
            work.close()
        of_coroutine = isinstance(error, AttributeError | TypeError) and "coroutine" in str(error)
        if forgotten and (error is None or of_coroutine):
            named = ", ".join(dict.fromkeys(f"sandbox.{name}" for name, _ in forgotten))
            raise NotAwaited(f"{named} was called but not awaited; write await sandbox.{forgotten[0][0]}(…)") from error
