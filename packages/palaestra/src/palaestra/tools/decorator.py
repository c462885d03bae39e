"""`@tool`: a typed function with a docstring becomes a tool.

    @tool
    async def forecast(city: str, days: Annotated[int, Field(ge=1, le=14)] = 3) -> dict[str, object]:
        '''The weather of the next days.

        Args:
            city: The city's name in English.
            days: How many days ahead.
        '''

The annotations become the JSON schema and the validation. The text before the docstring's sections becomes the
tool's description, and its `Args:` (in Google's style) describe the parameters. Text, a `ToolResult`, and a value that
is a JSON object become the reply; any other value becomes `{"result": …}`. The function can raise `ToolError("…")`,
whose message the model reads.

A parameter of type `Slot` gets the rollout's sandbox, and one of type `ToolRun` the context of the running tool; the
model sees neither. A parameter named `sandbox` or `run` gets the same if it has no annotation. In an environment's own
tools, `task` and `state` are the rollout's task and state. Plain functions run in a thread.

Invariant: a function that cannot be described to a model is rejected when it is declared, with an error that names it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypedDict, Unpack, get_origin, overload

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from palaestra.tools.call_text import plain, reply_of, result_of
from palaestra.tools.human.approval import Permit
from palaestra.tools.tool import RolloutState, Tool, ToolMistake, ToolReply, ToolResult, ToolRun, ToolSchema
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.threads import in_own_thread
from palaestra_slots.core.types import JSON, Task
from palaestra_slots.core.user_code import settled
from palaestra_slots.sandbox.slot import Slot

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?):\s*$")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def _documented(called: str, docstring: str | None, parameters: Collection[str]) -> tuple[str, dict[str, str]]:
    """Return the descriptions of a tool and of its parameters.

    Raises `ConfigError` if the docstring does not describe the tool, or describes an unknown parameter.
    """
    lines = inspect.cleandoc(docstring or "").splitlines()
    starts = [number for number, line in enumerate(lines) if _SECTION.match(line)]
    summary = _joined_paragraphs(lines[: starts[0]] if starts else lines)
    if not summary:
        raise ConfigError(f"tool {called} needs a docstring: the model sees its first lines as the tool's description")
    told: dict[str, str] = {}
    for start, end in pairwise([*starts, len(lines)]):
        if lines[start].startswith(("Args", "Arguments", "Parameters")):
            told |= _section_entries(lines[start + 1 : end])
    for name in told:
        if name not in parameters:
            raise ConfigError(
                f"tool {called}: the docstring describes {name!r}, which is not a parameter.{nearest(name, parameters)}"
            )
    return summary, told


def _section_entries(lines: list[str]) -> dict[str, str]:
    body = inspect.cleandoc("\n" + "\n".join(lines)).splitlines()
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in body:
        entry = _ENTRY.match(line)
        if entry is not None:
            current = found.setdefault(entry[1], [])
            current.append(entry[2])
        elif line.strip():
            current.append(line.strip())
    return {name: " ".join(each).strip() for name, each in found.items()}


def _joined_paragraphs(lines: list[str]) -> str:
    """Return the text with the lines of each paragraph joined."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines).strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


UserFunction: TypeAlias = Callable[..., object]

CONTEXT: Mapping[str, type] = {"sandbox": Slot, "run": ToolRun, "task": Task, "state": RolloutState}
"""The parameters that a function may have in addition to the model's arguments, by name or by type."""


@dataclass(frozen=True, slots=True)
class TypedTool(Tool):
    """A tool made from a typed function. Calling it calls the function."""

    function: UserFunction
    schema: ToolSchema = field()
    arguments: type[BaseModel] = field()
    context: Mapping[str, str] = field()
    """The function's parameters that the model does not see, each with its name in `CONTEXT`."""
    toolset: str = "custom"
    parallel_safe: bool = False
    missing: Callable[[], str | None] = lambda: None
    task: Task | None = None
    touches_world: bool = False
    world_session: str = ""
    asks: Permit | None = None

    def __call__(self, *args: JSON, **kwargs: JSON) -> JSON:
        return self.function(*args, **kwargs)

    def is_available(self) -> tuple[bool, str | None]:
        reason = self.missing()
        return reason is None, reason

    def for_task(self, task: Task) -> TypedTool:
        """Return the same tool for the rollouts of one task."""
        return replace(self, task=task)

    async def execute(self, **arguments: JSON) -> ToolResult:
        async with ToolRun() as run:
            return result_of(await self.run(arguments, run))

    async def run(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        """Call the function with the context that it asks for and the model's arguments, which are converted to their
        types."""
        given = self._converted(arguments)
        for parameter, what in self.context.items():
            match what:
                case "sandbox":
                    given[parameter] = await run.slot()
                case "state":
                    if (state := run.found_state(RolloutState)) is None:
                        raise ToolMistake(f"the tool {self.name} needs the state of a rollout, and there is none here")
                    given[parameter] = state.value
                case _:
                    given[parameter] = self.task if what == "task" else run
        if inspect.iscoroutinefunction(self.function):
            return reply_from(await self.function(**given))
        answer = await in_own_thread(partial(self.function, **given))
        # A plain function may return an awaitable, which belongs to this event loop and not to the thread.
        return reply_from(await settled(answer))

    def _converted(self, arguments: Mapping[str, JSON]) -> dict[str, Any]:
        try:
            checked = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            from palaestra.tools.arguments import (
                InvalidArguments,  # loads the checks of schemas, which a call has loaded
            )

            problems = (f"argument '{'.'.join(map(str, each['loc']))}': {each['msg']}" for each in error.errors())
            raise InvalidArguments(f"Invalid arguments: {'; '.join(problems)}.") from None
        return {info.alias or name: getattr(checked, name) for name, info in self.arguments.model_fields.items()}


class ToolOptions(TypedDict, total=False):
    """The optional attributes of a tool (see `Tool`). `missing` returns the reason why the tool cannot be used here, or
    None."""

    missing: Callable[[], str | None]
    toolset: str
    parallel_safe: bool
    touches_world: bool
    world_session: str


@overload
def tool(function: UserFunction, /) -> TypedTool: ...
@overload
def tool(
    *, name: str | None = None, external: bool = False, asks: bool = False, **options: Unpack[ToolOptions]
) -> Callable[[UserFunction], TypedTool]: ...
def tool(
    function: UserFunction | None = None,
    /,
    *,
    name: str | None = None,
    external: bool = False,
    asks: bool = False,
    **options: Unpack[ToolOptions],
) -> TypedTool | Callable[[UserFunction], TypedTool]:
    """Make a tool from a typed function; `name` replaces the function's name.

    An `external` tool needs no slot, and runs on a tool server if there is one. A tool that `asks` acts outside the
    sandbox: a conversation with a person asks before each call.

    Raises `ConfigError` if the function cannot be described to a model, for example without a docstring or an
    annotation. Also raises it for an `external` function with a sandbox parameter, and for any function with a task
    parameter.
    """

    def make(given: UserFunction) -> TypedTool:
        made = declare(given, name=name, external=external, asks=asks, **options)
        for what in {"task", "state"}.intersection(made.context.values()):
            raise ConfigError(
                f"tool {made.name} has a {what} parameter, which only an environment's own tools can have"
            )
        return made

    return make if function is None else make(function)


def declare(
    function: UserFunction,
    *,
    name: str | None = None,
    external: bool = False,
    asks: bool = False,
    of_environment: bool = False,
    state_type: type | None = None,
    **options: Unpack[ToolOptions],
) -> TypedTool:
    """Make a tool as `tool` does, from a function that may also have the task and the state as parameters. In a tool
    `of_environment`, a parameter `state` may have the type of the state as its annotation, and a parameter with the
    annotation `state_type` is the state under another name."""
    called = name or str(getattr(function, "__name__", "tool"))
    try:
        # eval_str, because `from __future__ import annotations` makes every annotation a text.
        parameters = inspect.signature(function, eval_str=True).parameters
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"the annotations of tool {called} cannot be read: {error}") from error
    summary, told = _documented(called, inspect.getdoc(function), set(parameters))
    found = {each.name: _context_of(each, of_environment, state_type) for each in parameters.values()}
    context = {parameter: what for parameter, what in found.items() if what is not None}
    if external and "sandbox" in context.values():
        raise ConfigError(f"tool {called} is external, so it cannot have a sandbox parameter")
    arguments = _arguments_model(called, [each for each in parameters.values() if each.name not in context], told)
    return TypedTool(
        function=function,
        schema=replace(_schema(called, summary, arguments), external=external),
        arguments=arguments,
        context=context,
        asks=Permit(f"the tool {called}", f"tool:{called}") if asks else None,
        **options,
    )


def reply_from(answer: object) -> ToolReply:
    """Return the reply of a tool whose function returned `answer`."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, ToolResult):
        return reply_of(answer)
    told = plain(answer)
    return told if isinstance(told, dict) else {"result": told}


def _context_of(parameter: inspect.Parameter, of_environment: bool, state_type: type | None) -> str | None:
    """Return the name in `CONTEXT` for which a parameter stands, or None if the parameter is an argument of the
    model."""
    # Without an annotation, the name decides; with one, a model may have an argument named `task` or `sandbox`.
    if parameter.annotation is inspect.Parameter.empty:
        return parameter.name if parameter.name in CONTEXT else None
    if state_type is not None and parameter.annotation is state_type:
        return "state"
    if of_environment and parameter.name == "state":
        kind = get_origin(parameter.annotation) or parameter.annotation
        if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, dict | Struct | BaseModel)):
            return "state"
    return next((name for name, kind in CONTEXT.items() if parameter.annotation is kind), None)


def _arguments_model(called: str, parameters: list[inspect.Parameter], told: Mapping[str, str]) -> type[BaseModel]:
    """Return the pydantic model of the arguments. Its fields are numbered, because a parameter may be called
    `schema` or `_x`."""
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {called}: the parameter {parameter} cannot be passed by name, as models pass it")
        if parameter.annotation is inspect.Parameter.empty:
            raise ConfigError(f"tool {called}: the parameter {parameter.name!r} has no type; annotate it")
        more: dict[str, Any] = {"alias": parameter.name}
        if parameter.name in told:
            more["description"] = told[parameter.name]
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[f"a{number}"] = (parameter.annotation, Field(default, **more))
    try:
        return create_model(called, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
    except PydanticUserError as error:
        raise ConfigError(f"tool {called}: {error.message}") from error


def _schema(called: str, summary: str, arguments: type[BaseModel]) -> ToolSchema:
    try:
        made = arguments.model_json_schema(by_alias=True)
    except PydanticUserError as error:
        raise ConfigError(f"tool {called}: {error.message}") from error
    definitions = made.pop("$defs", {})
    properties = {name: _inlined(called, value, definitions, ()) for name, value in made.get("properties", {}).items()}
    return ToolSchema(called, summary, properties, tuple(made.get("required", ())))


def _inlined(called: str, value: JSON, definitions: Mapping[str, JSON], above: tuple[str, ...]) -> JSON:
    """Return the schema with references replaced by their targets, and without titles."""
    if isinstance(value, list):
        return [_inlined(called, each, definitions, above) for each in value]
    if not isinstance(value, dict):
        return value
    reference = value.get("$ref")
    if isinstance(reference, str):
        target = reference.rpartition("/")[2]
        if target in above:
            raise ConfigError(f"tool {called}: the type {target} contains itself, which a tool's schema cannot express")
        inner = _inlined(called, definitions[target], definitions, (*above, target))
        return {**inner, **{name: each for name, each in value.items() if name != "$ref"}}
    return {
        # Below `properties`, keys are the names of parameters: only elsewhere is `title` a keyword.
        name: {key: _inlined(called, each, definitions, above) for key, each in entry.items()}
        if name == "properties" and isinstance(entry, dict)
        else _inlined(called, entry, definitions, above)
        for name, entry in value.items()
        if not (name == "title" and isinstance(entry, str))
    }
