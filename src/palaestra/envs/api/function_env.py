"""The function form of an environment: one generator of tasks, and hooks as decorators on it.

    @environment(toolsets=["terminal"])
    def count_lines(n: int = 100):
        for i in range(n):
            yield Task(id=f"lines-{i}", prompt=..., files=..., solution=..., answer=str(i))

    @count_lines.score
    async def correct(task, sandbox):
        return (await sandbox.read_text("answer.txt", missing="")).strip() == task.answer

The generator's parameters become settings (`--env.n 20`). Each task is rolled out once by default, without a network.
Hooks may take `task, rollout, sandbox, rng`. A `tool` hook gives the agent a tool of the environment's own.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, cast, overload

from pydantic import Field, create_model

from palaestra.core.config import nearest, setting
from palaestra.core.errors import ConfigError, TaskError
from palaestra.core.io.threads import OneThread
from palaestra.core.types import JSON, NetworkPolicy, Score, Task, number
from palaestra.core.user_code import run_hook, score_of, settled
from palaestra.envs import cache_key
from palaestra.envs.config.build import agent_settings, kit, mcp_servers, network_policy
from palaestra.envs.config.fields import BaseEnvConfig, HeldOutConfig
from palaestra.envs.run import pass_at_k
from palaestra.envs.run.evaluate import EvaluatedEnvironment, Evaluation, Logged
from palaestra.inference.chat_server import ChatServer
from palaestra.inference.config import APIServerConfig, ServerBaseline
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.limits import RunStopped
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import AgentSettings, Kit
from palaestra.sandbox.slot import Slot
from palaestra.tools.decorator import TypedTool, UserFunction
from palaestra.tools.decorator import declare as declare_tool

HookFunction: TypeAlias = Callable[..., object]
Source: TypeAlias = Callable[[], Awaitable[object]]
"""Makes one thing a hook asked for, and only if it asked."""

F = TypeVar("F", bound=HookFunction)

TaskSource = Callable[..., Iterable[Task] | AsyncIterator[Task]]

_FREE = frozenset({"construct", "copy", "dict", "from_orm", "json", "schema", "schema_json", "validate"})
"""Names of pydantic's that nothing uses any more, and that a parameter may have."""


class FunctionEnvConfig(HeldOutConfig):
    """Settings of a function environment: those of every agent environment, with each task once and no network."""

    group_size: int = setting(1, "Rollouts per task.", ge=1)
    total_steps: int = setting(-1, "Groups to process, at most; -1 means every task once.", ge=-1)
    include_messages: bool = setting(True, "Keep each rollout's messages in the JSONL file.")
    allow_network: bool = setting(False, "Whether the agent's commands reach the network.")


@dataclass(frozen=True, slots=True)
class Hook:
    """A user's function and the names it asks for."""

    function: HookFunction
    wants: tuple[str, ...]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "hook")

    async def __call__(self, sources: Mapping[str, Source]) -> JSON:
        """Call the function with the arguments that it names. Raises `NotAwaited`."""
        arguments = {name: await sources[name]() for name in self.wants}
        slot = arguments.get("sandbox")
        if slot is None:
            return await settled(self.function(**arguments))
        with AwaitedSlot(cast("Slot", slot)) as arguments["sandbox"]:
            return await settled(self.function(**arguments))


def declare_hook(function: HookFunction, kind: str, known: tuple[str, ...]) -> Hook:
    """Take a function as a hook. Raises `ConfigError` for an unknown parameter."""
    if not callable(function):
        raise ConfigError(f"a {kind} hook must be a function, not {function!r:.100}")
    wants = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in known:
            wants.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            where = getattr(function, "__qualname__", repr(function))
            raise ConfigError(
                f"the {kind} hook {where} asks for {parameter.name!r}, which it cannot have: "
                f"it may ask for {', '.join(known)}.{nearest(parameter.name, known)}"
            )
    return Hook(function, tuple(wants))


class NotAwaited(RuntimeError):
    """A hook did not await a call of its slot."""


class AwaitedSlot:
    """A slot for a hook: a `with` block at whose end every call of the slot must have been awaited.

    A call that is not awaited is never made and leaves a coroutine, which is true and equal to nothing: a score that
    compares it gives every rollout the same reward. Shells, processes and forks of the slot are not checked. Raises
    `NotAwaited`.
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
            work.close()
        if error is None and forgotten:
            named = ", ".join(dict.fromkeys(f"sandbox.{name}" for name, _ in forgotten))
            raise NotAwaited(f"{named} was called and not awaited: write await sandbox.{forgotten[0][0]}(…)")


@dataclass(frozen=True, slots=True)
class ScoreHook:
    """One score and its weight in the reward."""

    hook: Hook
    weight: float


class FunctionForm:
    """The result of `@environment`: collects the hooks, and builds the environment of a run. `command` is the default
    of the command line; `reference` is where the environment was loaded from."""

    command = "process"
    reference = ""

    def __init__(self, source: TaskSource, *, name: str | None, toolsets: Sequence[str]) -> None:
        self.source = source
        self.name = name if name is not None else str(getattr(source, "__name__", "environment"))
        if isinstance(toolsets, str):
            raise ConfigError(f"environment {self.name}: toolsets must be a list, such as [{toolsets!r}]")
        self.toolsets = tuple(toolsets)
        self.scores: list[ScoreHook] = []
        self.preparation: Hook | None = None
        self.tools: list[TypedTool] = []
        self.bound: FunctionEnvConfig | None = None
        """The settings of an environment that was called with arguments."""
        self.__doc__ = source.__doc__

    def __call__(self, *args: JSON, **named: JSON) -> FunctionForm:
        """The environment with arguments for its function, as `count_lines(n=3)`; hooks belong to both. Raises
        `ConfigError` if they do not fit."""
        try:
            bound = inspect.signature(self.source).bind(*args, **named)
        except TypeError as error:
            raise ConfigError(f"environment {self.name}: {error}") from None
        called = copy(self)
        called.bound = self.config_type()(**bound.arguments)
        return called

    @overload
    def score(self, function: F) -> F: ...
    @overload
    def score(self, *, weight: float) -> Callable[[F], F]: ...
    def score(self, function: F | None = None, *, weight: float = 1.0) -> F | Callable[[F], F]:
        """Declare a score: a number, bool, `Score` or (number, metrics). The reward is the weighted mean of all. Raises
        `ConfigError` for a negative weight."""
        if number(weight) is None or not 0 <= weight < math.inf:
            raise ConfigError(
                f"environment {self.name}: a score's weight must be a number from 0 up, not {weight!r:.100}"
            )

        def keep(given: F) -> F:
            hook = declare_hook(given, "score", ("task", "rollout", "sandbox", "rng"))
            if any(hook.name == each.hook.name for each in self.scores):
                raise ConfigError(
                    f"environment {self.name} has two scores called {hook.name}, and each is recorded under its name: "
                    f"call one otherwise"
                )
            self.scores.append(ScoreHook(hook, weight))
            return given

        return keep if function is None else keep(function)

    def prepare(self, function: F) -> F:
        """Declare how a task's workspace is prepared, once per group, after its `files` and `setup`."""
        if self.preparation is not None:
            raise ConfigError(f"environment {self.name} has two prepare hooks: {self.preparation.name} is the first")
        self.preparation = declare_hook(function, "prepare", ("task", "sandbox", "rng"))
        return function

    @overload
    def tool(self, function: UserFunction, /) -> TypedTool: ...
    @overload
    def tool(
        self, /, *, name: str | None = None, parallel_safe: bool = False, touches_world: bool = False
    ) -> Callable[[UserFunction], TypedTool]: ...
    def tool(
        self,
        function: UserFunction | None = None,
        /,
        *,
        name: str | None = None,
        parallel_safe: bool = False,
        touches_world: bool = False,
    ) -> TypedTool | Callable[[UserFunction], TypedTool]:
        """Declare a tool of this environment: a typed function with a docstring, which may also take the `task`. Calls
        of a tool that `touches_world` are recorded and can be replayed without a network."""

        def keep(given: UserFunction) -> TypedTool:
            made = declare_tool(given, name=name, toolset=self.name, parallel_safe=parallel_safe)
            made = replace(made, touches_world=touches_world)
            self.tools.append(made)
            return made

        return keep if function is None else keep(function)

    def config_type(self) -> type[FunctionEnvConfig]:
        fields: dict[str, Any] = {}
        try:
            parameters = inspect.signature(self.source, eval_str=True).parameters.values()
        except (NameError, TypeError) as error:
            raise ConfigError(f"environment {self.name}: its parameters cannot be read: {error}") from None
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY or parameter.name.startswith("_"):
                raise ConfigError(
                    f"environment {self.name}: its parameter {parameter.name!r} can be no setting: "
                    f"it must be one that is given by name, and begin with a letter"
                )
            if parameter.name in FunctionEnvConfig.model_fields:
                raise ConfigError(
                    f"environment {self.name}: its parameter {parameter.name!r} is a setting of every environment; "
                    f"give it another name"
                )
            if hasattr(FunctionEnvConfig, parameter.name) and parameter.name not in _FREE:
                raise ConfigError(
                    f"environment {self.name}: its parameter {parameter.name!r} has the name of something that all "
                    f"settings have; give it another name"
                )
            required = parameter.default is inspect.Parameter.empty
            default = ... if required else parameter.default
            fields[parameter.name] = (
                _annotation(parameter),
                Field(default=default, description=f"Parameter of {self.name}."),
            )
        return create_model(f"{self.name}_config", __base__=FunctionEnvConfig, **fields)

    @property
    def about(self) -> str:
        return inspect.getdoc(self.source) or ""

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        return self.bound, ()

    def check_values(self) -> Mapping[str, JSON]:
        return {}

    def build(
        self, config: BaseEnvConfig, servers: Sequence[APIServerConfig] = (), server: ChatServer | None = None
    ) -> FunctionEnvironment:
        """The environment of one run. Raises `ConfigError` if it has no score."""
        assert isinstance(config, FunctionEnvConfig)
        if not self.scores:
            raise ConfigError(f"environment {self.name} has no score: add one with @{self.name}.score")
        if not any(each.weight for each in self.scores):
            raise ConfigError(
                f"environment {self.name} has no score that counts: every weight is 0, which only records"
            )
        return FunctionEnvironment(self, config)


class FunctionEnvironment(EvaluatedEnvironment):
    """One run's view of a function environment."""

    def __init__(self, form: FunctionForm, config: FunctionEnvConfig) -> None:
        self.form = form
        self.config = config
        self._settings = agent_settings(config)
        self._policy = network_policy(config.allow_network)
        self._mcp = mcp_servers(config)
        self._evaluating = False

    async def evaluate(self, evaluation: Evaluation) -> Logged:
        """Roll out the held-out tasks, or all if none are held out."""
        attempts = evaluation.run_context.settings.group_size
        done = await evaluation.roll_out(self.evaluating(), attempts, limit=evaluation.limit)
        if evaluation.gate is not None and not await evaluation.gate():
            raise RunStopped("the evaluation was stopped: its metrics would be those of a part")
        if not done:
            raise ConfigError(f"{self.name} has no task to evaluate; held_out is {self.config.held_out:g}")
        trajectories = [trajectory for group in done for trajectory in group.trajectories]
        metrics = pass_at_k.figures(trajectories, attempts, tasks=len(done))
        return {"task": self.name, "metrics": metrics, "samples": list(map(pass_at_k.sample, trajectories))}

    def evaluating(self) -> Self:
        other = copy(self)
        other._evaluating = True
        return other

    async def open(self) -> None:
        if self._mcp is not None:
            await self._mcp.open()
        self._kit(self.form.toolsets, Task(id="", prompt=""), random.Random(0))  # said before the run has a folder

    async def aclose(self) -> None:
        if self._mcp is not None:
            await self._mcp.aclose()

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def agent(self) -> AgentSettings:
        return self._settings

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
            if self.config.serves(checked.id, evaluating=self._evaluating):
                yield checked

    def _checked(self, task: object, seen: set[str]) -> Task:
        if not isinstance(task, Task):
            raise TaskError(
                f"environment {self.name} yielded {type(task).__name__} where a Task belongs: {task!r:.200}"
            )
        if task.id in seen:
            raise TaskError(f"environment {self.name} yielded two tasks with the id {task.id!r}; ids must differ")
        seen.add(task.id)
        if self.config.allow_network and task.network == NetworkPolicy():
            return replace(task, network=self._policy)
        return task

    def kit(self, task: Task, rng: random.Random) -> Kit:
        try:
            return self._kit(self.form.toolsets if task.toolsets is None else task.toolsets, task, rng)
        except ConfigError as error:
            if task.toolsets is None:
                raise
            raise TaskError(f"task {task.id}: {error}") from None

    def _kit(self, toolsets: Sequence[str], task: Task, rng: random.Random) -> Kit:
        own = [tool.for_task(task) for tool in self.form.tools]
        return kit(self.config, toolsets, rng, own, self._mcp, self.shared)

    def prepares(self, task: Task) -> bool:
        return self.form.preparation is not None or super().prepares(task)

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        if self.form.preparation is not None:
            rng = random.Random(f"{self.config.seed}:{task.id}:prepare")
            await self.form.preparation({"task": _known(task), "sandbox": _known(sandbox), "rng": _known(rng)})

    def recipe(self, task: Task) -> JSON:
        """The task's declaration and, with a prepare hook, the arguments and the code of the hook."""
        hook = self.form.preparation
        if task.recipe is None or hook is None:
            return task.recipe
        return [
            task.recipe,
            cache_key.of_code([hook.function, self.form.source], task.id),
            cache_key.of_settings(self.config, FunctionEnvConfig),
            self.config.seed,
            cache_key.of_data(task, task.id),
        ]

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        sources: dict[str, Source] = {
            "task": _known(rollout.task),
            "rollout": _known(rollout),
            "sandbox": grading.slot,
            "rng": _known(rollout.rng),
        }
        parts = [
            (each.hook.name, each.weight, score_of(await each.hook(sources), f"the score {each.hook.name}"))
            for each in self.form.scores
        ]
        if len(parts) == 1:
            return parts[0][2]
        total = sum(weight for _, weight, _ in parts)
        reward = sum(weight * part.reward for _, weight, part in parts) / total
        metrics = {name: value for _, _, part in parts for name, value in part.metrics.items()}
        metrics |= {name: part.reward for name, _, part in parts}  # last: each score is recorded under its name
        return Score(reward, metrics, {key: value for _, _, part in parts for key, value in part.detail.items()})


@overload
def environment(source: TaskSource) -> FunctionForm: ...
@overload
def environment(
    *, name: str | None = None, toolsets: Sequence[str] = ("default",)
) -> Callable[[TaskSource], FunctionForm]: ...
def environment(
    source: TaskSource | None = None, *, name: str | None = None, toolsets: Sequence[str] = ("default",)
) -> FunctionForm | Callable[[TaskSource], FunctionForm]:
    """Make an environment of a function that yields tasks."""

    def make(given: TaskSource) -> FunctionForm:
        return FunctionForm(given, name=name, toolsets=toolsets)

    return make if source is None else make(source)


def _annotation(parameter: inspect.Parameter) -> Any:
    """The type of a setting. A parameter with a text as its default and no annotation is a text: `3.10` is not a number
    then."""
    if parameter.annotation is not inspect.Parameter.empty:
        return parameter.annotation
    return str if isinstance(parameter.default, str) else Any


async def _each(source: TaskSource, settings: Mapping[str, JSON]) -> AsyncIterator[object]:
    """The products of a function. A plain one runs in a thread of its own, so that rollouts do not wait while it reads
    or computes."""
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
            raise TypeError(f"it gave {type(produced).__name__} where tasks belong; yield each Task")
        tasks = await thread.call(partial(iter, produced))
        while (task := await thread.call(partial(next, tasks, end))) is not end:
            yield task
    finally:
        thread.close()


def _known(value: object) -> Source:
    async def source() -> object:
        return value

    return source
