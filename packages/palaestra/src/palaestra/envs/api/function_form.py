"""The function form of an environment: one generator of tasks, and hooks as decorators on it.

    @environment(toolsets=["terminal"])
    def count_lines(n: int = 100):
        for i in range(n):
            yield Task(id=f"lines-{i}", prompt=..., files=..., solution=..., answer=str(i))

    @count_lines.score
    async def correct(task, sandbox):
        return (await sandbox.read_text("answer.txt", missing="")).strip() == task.answer

The generator's parameters become settings (`--env.n 20`). Each task is rolled out once by default, without a network. A
score hook may take `task`, `state`, `rollout`, `sandbox` and `rng`; a `prepare` hook may take `task`, `sandbox` and
`rng`. The `tool` decorator gives the agent a tool of the environment's own, the `state` decorator makes the object that
the tools, user and scores of one rollout share, and the `user` decorator declares who answers the model's plain text.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast, overload

from pydantic import Field, create_model

from palaestra.envs.api.declaration import Declaration, FunctionEnvConfig, Hook, HookFunction, ScoreHook, TaskSource
from palaestra.envs.config.fields import DECLARED, LIMITS, BaseEnvConfig, limit_value
from palaestra.tools.decorator import TypedTool, UserFunction
from palaestra.tools.decorator import declare as declare_tool
from palaestra.tools.tool import Tool
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, number
from palaestra_tokens.config import APIServerConfig, ServerBaseline

if TYPE_CHECKING:
    from palaestra.envs.run.evaluate import EvaluatedEnvironment
    from palaestra_tokens.chat_server import ChatServer

F = TypeVar("F", bound=HookFunction)


class EnvironmentLimits(TypedDict, total=False):
    """The limits of one rollout: model calls, seconds, tokens read and written; and its system prompt and sampling
    temperature."""

    max_turns: int
    time_limit: float
    tokens: int
    system_prompt: str
    temperature: float


_FREE = frozenset({"construct", "copy", "dict", "from_orm", "json", "schema", "schema_json", "validate"})
"""Names of pydantic's deprecated methods. A parameter of an environment may have one of these names."""


def declare_hook(function: HookFunction, kind: str, known: tuple[str, ...]) -> Hook:
    """Make a hook from a function. Raises `ConfigError` for anything but a function, and for a function that has an
    unknown parameter without a default."""
    if not callable(function):
        raise ConfigError(f"a {kind} hook must be a function, not {function!r:.100}")
    wants = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in known:
            wants.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            where = getattr(function, "__qualname__", repr(function))
            raise ConfigError(
                f"the {kind} hook {where} has the unknown parameter {parameter.name!r}; "
                f"its parameters may be {', '.join(known)}.{nearest(parameter.name, known)}"
            )
    return Hook(function, tuple(wants), str(getattr(function, "__name__", "hook")))


class FunctionForm(Declaration):
    """The result of `@environment`. It collects the hooks and builds the environment of a run. `command` is the command
    line's default command; `reference` names the place from which the environment was loaded."""

    command = "process"
    kind = "function"
    reference = ""

    def __init__(
        self,
        source: TaskSource,
        *,
        name: str | None,
        toolsets: Sequence[str],
        label_names: Sequence[str] = (),
        packages: Sequence[str] = (),
        limits: Mapping[str, JSON] = MappingProxyType({}),
    ) -> None:
        name = name if name is not None else str(getattr(source, "__name__", "environment"))
        for kind, given in (("toolsets", toolsets), ("label_names", label_names)):
            if isinstance(given, str):
                raise ConfigError(f"environment {name}: {kind} must be a list, such as [{given!r}]")
        declared: tuple[str, ...] = ()
        if packages != ():
            from palaestra_slots.images.requirements import checked_packages  # imported here, because few declare any

            declared = checked_packages(f"environment {name}", packages)
        super().__init__(source, name, tuple(toolsets), tuple(label_names), declared)
        self.limits = _checked_limits(name, {key: value for key, value in limits.items() if value is not None})
        self.state_type: type | None = None
        """The class of the state, if the state hook has the annotation of one."""
        self.bound: FunctionEnvConfig | None = None
        """The settings, if the environment was called with arguments; None otherwise."""
        self.__doc__ = source.__doc__

    def __call__(self, *args: JSON, **named: JSON) -> FunctionForm:
        """Return the environment with arguments for its function, as in `count_lines(n=3)`. The two environments share
        their hooks. Raises `ConfigError` for arguments that do not fit."""
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
        """Declare a function that returns a score: a number, bool, `Score` or (number, metrics). The reward is the
        weighted mean of all scores. Raises `ConfigError` if the weight is negative or not a finite number, or if two
        scores have the same name."""
        if number(weight) is None or not 0 <= weight < math.inf:
            raise ConfigError(
                f"environment {self.name}: a score's weight must be a non-negative number, not {weight!r:.100}"
            )

        def keep(given: F) -> F:
            hook = declare_hook(given, "score", ("task", "state", "rollout", "sandbox", "rng"))
            if any(hook.name == each.hook.name for each in self.scores):
                raise ConfigError(
                    f"environment {self.name} has two scores called {hook.name}; scores are recorded by "
                    "name, so rename one"
                )
            self.scores.append(ScoreHook(hook, weight))
            return given

        return keep if function is None else keep(function)

    def prepare(self, function: F) -> F:
        """Declare a hook that prepares a task's workspace. It runs once per group, after `files` and `setup`. Raises
        `ConfigError` if the environment already has such a hook."""
        if self.preparation is not None:
            raise ConfigError(
                f"environment {self.name} has two prepare hooks; do the work of both in {self.preparation.name}"
            )
        self.preparation = declare_hook(function, "prepare", ("task", "sandbox", "rng"))
        return function

    def state(self, function: F) -> F:
        """Declare a hook that makes the state of one rollout, which its tools, user and scores share as the argument
        `state`: a dict, dataclass, msgspec Struct or pydantic model. If the hook has the annotation of such a class, a
        tool may give the state another name with this annotation. The journal has the state as JSON, so a resumed or
        forked rollout has it too. Raises `ConfigError` if the environment already has such a hook."""
        if self.made_state is not None:
            raise ConfigError(f"environment {self.name} has two state hooks: {self.made_state.name} is one already")
        self.made_state = declare_hook(function, "state", ("task", "rng"))
        if (kind := _own_type(function)) is not None:
            self.state_type = kind
            self.tools[:] = [_declared_again(each, kind) for each in self.tools]
        return function

    def user(self, function: F) -> F:
        """Declare the user of the conversation. It is asked whenever the model replies without a tool call, and returns
        the next message, as text or as a message with a role, or None if the conversation is over. Raises `ConfigError`
        if the environment already has a user."""
        if self.next_message is not None:
            raise ConfigError(f"environment {self.name} has two users: {self.next_message.name} is one already")
        self.next_message = declare_hook(function, "user", ("task", "state", "messages", "rollout", "sandbox", "rng"))
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
        """Declare a tool of this environment: a typed function with a docstring, which may also take the `task` and the
        `state`. Calls of a tool that `touches_world` are recorded and can be replayed without a network."""

        def keep(given: UserFunction) -> TypedTool:
            made = declare_tool(
                given,
                name=name,
                toolset=self.name,
                parallel_safe=parallel_safe,
                touches_world=touches_world,
                of_environment=True,
                state_type=self.state_type,
            )
            self.tools.append(made)
            return made

        return keep if function is None else keep(function)

    def config_type(self) -> type[FunctionEnvConfig]:
        fields: dict[str, Any] = {}
        try:
            # In a file with `from __future__ import annotations`, the annotations are text.
            parameters = inspect.signature(self.source, eval_str=True).parameters.values()
        except (NameError, TypeError) as error:
            raise ConfigError(f"environment {self.name}: its parameters cannot be read: {error}") from None
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY or parameter.name.startswith("_"):
                raise ConfigError(
                    f"environment {self.name}: its parameter {parameter.name!r} cannot be a setting: it "
                    "must accept a keyword argument and begin with a letter"
                )
            if parameter.name in FunctionEnvConfig.model_fields:
                raise ConfigError(
                    f"environment {self.name}: its parameter {parameter.name!r} is a setting of every environment; "
                    f"give it another name"
                )
            if hasattr(FunctionEnvConfig, parameter.name) and parameter.name not in _FREE:
                raise ConfigError(
                    f"environment {self.name}: its parameter {parameter.name!r} has a name that settings "
                    "reserve; rename it"
                )
            required = parameter.default is inspect.Parameter.empty
            default = ... if required else parameter.default
            fields[parameter.name] = (
                _annotation(parameter),
                Field(default=default, description=f"Parameter of {self.name}."),
            )
        made = create_model(f"{self.name}_config", __base__=FunctionEnvConfig, **fields, **_declared(self.limits))
        made.default_sources = dict.fromkeys(map(LIMITS.__getitem__, self.limits), DECLARED)
        return made

    @property
    def about(self) -> str:
        of_file = getattr(self.source, "__globals__", {}).get("__doc__")
        return inspect.getdoc(self.source) or inspect.cleandoc(of_file or "")

    @property
    def parts(self) -> dict[str, JSON]:
        """What the environment declares beside settings, by name: its tools, toolsets, limits, packages, user and
        scores. What it does not declare is left out."""
        user, first = self.next_message, (self.preparation, self.made_state)
        found: dict[str, JSON] = {
            "toolsets": list(self.toolsets),
            "tools": [each.name for each in self.tools],
            "limits": dict(self.limits),
            "packages": list(self.packages),
            "user": user.name if user else "",
            "hooks": [each.name for each in first if each],
            "scores": [each.hook.name for each in self.scores],
        }
        return {name: value for name, value in found.items() if value}

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        return self.bound, ()

    def check_values(self) -> Mapping[str, JSON]:
        return {}

    def build(
        self, config: BaseEnvConfig, servers: Sequence[APIServerConfig] = (), server: ChatServer | None = None
    ) -> EvaluatedEnvironment:
        """Return the environment of one run. Raises `ConfigError` if it has no score with a positive weight."""
        assert isinstance(config, FunctionEnvConfig)
        if not self.scores:
            raise ConfigError(f"environment {self.name} has no score: add one with @{self.name}.score")
        if not any(each.weight for each in self.scores):
            raise ConfigError(
                f"environment {self.name} has no score that counts: every weight is 0; give one a positive weight"
            )
        hooks = [each.hook for each in self.scores] + ([self.next_message] if self.next_message is not None else [])
        wanting = [each.name for each in hooks if "state" in each.wants]
        wanting += [tool.name for tool in self.tools if "state" in getattr(tool, "context", {}).values()]
        if wanting and self.made_state is None:
            raise ConfigError(f"{wanting[0]} takes the state, and environment {self.name} has no @{self.name}.state")
        # Imported here, so that a command that only checks flags loads neither the agent nor the sandbox.
        made = import_module("palaestra.envs.api.function_env").FunctionEnvironment(self, config)
        return cast("EvaluatedEnvironment", made)


@overload
def environment(source: TaskSource) -> FunctionForm: ...
@overload
def environment(
    *,
    name: str | None = None,
    toolsets: Sequence[str] = ("default",),
    label_names: Sequence[str] = (),
    packages: Sequence[str] = (),
    **limits: Unpack[EnvironmentLimits],
) -> Callable[[TaskSource], FunctionForm]: ...
def environment(
    source: TaskSource | None = None,
    *,
    name: str | None = None,
    toolsets: Sequence[str] = ("default",),
    label_names: Sequence[str] = (),
    packages: Sequence[str] = (),
    **limits: Unpack[EnvironmentLimits],
) -> FunctionForm | Callable[[TaskSource], FunctionForm]:
    """Make an environment from a function that yields tasks. `label_names` are the names of labels that only its scores
    have, for the setting `strict_labels`. `packages` are Python packages that its sandboxes have, such as
    `pandas==2.3.3`; they are installed once per image on this machine. The `limits` hold for all tasks, unless a task
    or the user of a run sets others. Raises `ConfigError` for an unknown argument."""

    def make(given: TaskSource) -> FunctionForm:
        return FunctionForm(
            given, name=name, toolsets=toolsets, label_names=label_names, packages=packages, limits=limits
        )

    return make if source is None else make(source)


def _own_type(function: HookFunction) -> type | None:
    """Return the class that a state hook returns by its annotation; None if it has none, or that of a plain dict, which
    an argument of a tool may have too."""
    try:
        kind = inspect.signature(function, eval_str=True).return_annotation
    except (NameError, TypeError):
        return None
    return kind if isinstance(kind, type) and kind not in (inspect.Signature.empty, dict) else None


def _declared_again(tool: Tool, state_type: type) -> Tool:
    """Return a tool that was declared before the type of the state was known."""
    if not isinstance(tool, TypedTool):
        return tool
    made = declare_tool(tool.function, name=tool.name, of_environment=True, state_type=state_type)
    return replace(tool, schema=made.schema, arguments=made.arguments, context=made.context)


def _checked_limits(environment: str, limits: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the limits with their values as the settings hold them: "5" becomes 5. Raises `ConfigError` for limits
    that do not exist or have no usable value."""
    known, checked = ("name", "toolsets", "label_names", "packages", *LIMITS), dict[str, JSON]()
    for name, value in limits.items():
        if name not in LIMITS:
            meant = next((limit for limit, setting in LIMITS.items() if setting == name), None)
            hint = f" Did you mean {meant}?" if meant else nearest(name, known)
            raise ConfigError(
                f"environment {environment}: @environment has no argument {name!r}; its arguments are "
                f"{', '.join(known)}.{hint}"
            )
        try:
            checked[name] = limit_value(FunctionEnvConfig(), name, value)
        except ConfigError as error:
            raise ConfigError(f"environment {environment}: {error}") from None
    return checked


def _declared(limits: Mapping[str, JSON]) -> dict[str, Any]:
    """Return the fields of the settings for these limits, with the limits as defaults."""
    fields = {}
    for name, value in limits.items():
        found = copy(FunctionEnvConfig.model_fields[LIMITS[name]])
        found.default = value
        fields[LIMITS[name]] = (found.annotation, found)
    return fields


def _annotation(parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter's setting. A parameter without an annotation is a string if its default is one, so
    that `3.10` is not read as a number."""
    if parameter.annotation is not inspect.Parameter.empty:
        return parameter.annotation
    return str if isinstance(parameter.default, str) else Any
