"""The vocabulary of tools: `ToolSchema`, `Tool`, and what a running tool is given. No I/O.

`Tool` is what a registry holds. The built-in tools are `FunctionTool`s; a user writes a typed function (`functions.py`)
or, as the contract has it, a subclass of `Tool` with `schema` and `execute`. `ToolCall` and `ToolResult`, calls and
results as values, live in `wire.py` and are importable from here too.

Invariant: a tool holds no state of a rollout. What must outlive a call is in the rollout's slot or in `ToolRun.state`.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

from palaestra.core.types import JSON
from palaestra.core.user_code import settled
from palaestra.sandbox.slot import Slot
from palaestra.tools.call_text import ToolCall as ToolCall
from palaestra.tools.call_text import ToolResult as ToolResult
from palaestra.tools.call_text import reply_of, result_of
from palaestra.tools.runtime.scoped_objects import States

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """Name, description and JSON-schema parameters of one tool. `parameters` maps argument names to their schemas.

    `keywords` are what else the schema of the arguments says of them together, such as `$defs` or
    `additionalProperties`. An `external` tool is run by a tool server (`server.py`), not in a slot.
    """

    name: str
    description: str
    parameters: Mapping[str, JSON] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    external: bool = False
    keywords: Mapping[str, JSON] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, definition: Mapping[str, JSON], *, external: bool = False) -> ToolSchema:
        """The schema out of an OpenAI function schema. Raises `KeyError`, `TypeError` or `ValueError` for others."""
        function = definition["function"]
        keywords = dict(function.get("parameters") or {})
        properties, required = keywords.pop("properties", {}), tuple(keywords.pop("required", ()))
        keywords.pop("type", None)
        return cls(str(function["name"]), function.get("description") or "", properties, required, external, keywords)

    def to_dict(self) -> dict[str, JSON]:
        """The OpenAI function schema, a fresh copy each time: nobody can change the registry's by accident."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    **copy.deepcopy(dict(self.keywords)),
                    "type": "object",
                    "properties": copy.deepcopy(dict(self.parameters)),
                    "required": list(self.required),
                },
            },
        }

    def to_prompt_description(self) -> str:
        """One JSON line, for prompts that list tools as text."""
        return json.dumps(self.to_dict()["function"], ensure_ascii=False)


class ToolRun(Protocol):
    """What a running tool may use: its rollout's slot (acquired when first asked for) and identity."""

    @property
    def task_id(self) -> str: ...

    @property
    def user_task(self) -> str: ...

    @property
    def timeout_s(self) -> float:
        """The default time limit of a command."""
        ...

    @property
    def shared(self) -> States:
        """What the rollouts of a run have together, such as one browser."""
        ...

    async def slot(self) -> Slot: ...

    def state(self, kind: type[StateT]) -> StateT:
        """The rollout's one object of this type, made without arguments when first asked for.

        Its `aclose`, where it has one, is awaited when the rollout has ended, however it ended.
        """
        ...

    def schemas(self) -> Sequence[ToolSchema]:
        """The tools that the agent has, this one among them."""
        ...

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> ToolReply:
        """Run another of them, checked as a model's call is. Raises `PalaestraError`; all else is in the reply."""
        ...


class ToolMistake(ValueError):
    """What a tool raises when the call cannot be done as asked: the model reads the message as the reply's `error`.

    `details` are further keys of that reply, such as the names of similar files.
    """

    def __init__(self, message: str, **details: JSON) -> None:
        super().__init__(message)
        self.details = details


ToolReply: TypeAlias = Mapping[str, JSON] | str
"""What a tool's function returns: a dict becomes the JSON reply, a string is taken as it is."""

ToolFunction: TypeAlias = Callable[[Mapping[str, JSON], ToolRun], Awaitable[ToolReply]]


class Tool(ABC):
    """One thing the agent can call. Subclass it with `schema` and `execute`; `is_available` where it may be missing.

    `parallel_safe` calls of one turn may run at the same time. `touches_world` is true of a tool whose reply comes from
    beyond the machine (a search engine, a web page, another model): a run records its calls and can be played without a
    network. Where a reply depends on the calls before it, as a browser's does, the tools that share what is out there
    name the same `world_session`.
    """

    toolset: str = "custom"
    parallel_safe: bool = False
    touches_world: bool = False
    world_session: str = ""

    @property
    @abstractmethod
    def schema(self) -> ToolSchema:
        """What the model is told."""

    @property
    def name(self) -> str:
        return self.schema.name

    @abstractmethod
    async def execute(self, **arguments: JSON) -> ToolResult:
        """Run with arguments that the schema accepts, in no slot. What it raises is told to the model as a failure."""

    def is_available(self) -> tuple[bool, str | None]:
        """Whether the tool can be used here, and why not."""
        return True, None

    def missing(self) -> str | None:
        """Why the tool cannot be used here, or None when it can."""
        try:
            told: object = self.is_available()
        except Exception as error:  # who wrote the tool did not foresee it, and reads it here
            return f"is_available of {type(self).__name__} failed: {type(error).__name__}: {error}"
        available, reason = told if isinstance(told, tuple) else (told, None)
        return None if available else reason or "it says that it is not available"

    def world_key(self, arguments: Mapping[str, JSON], run: ToolRun, /) -> Awaitable[JSON]:
        """What decides the reply of a tool that touches the world: its arguments, unless it says more.

        A tool that is given the path of a file in the slot adds the file's hash, for example.
        """
        return given_arguments(arguments, run)

    def run(self, arguments: Mapping[str, JSON], run: ToolRun, /) -> Awaitable[ToolReply]:
        """Run for a rollout. Raises `ToolMistake` for what the model can mend."""

        async def reply() -> ToolReply:
            result: object = await settled(self.execute(**arguments))
            if not isinstance(result, ToolResult):
                raise TypeError(f"execute of {type(self).__name__} gave {type(result).__name__}, not a ToolResult")
            return reply_of(result)

        return reply()


async def given_arguments(arguments: Mapping[str, JSON], run: ToolRun, /) -> JSON:
    """The arguments alone: what decides the reply of most tools that touch the world."""
    return arguments


@dataclass(frozen=True, slots=True)
class FunctionTool(Tool):
    """A tool made of a schema and a function: what the built-in tools are."""

    schema: ToolSchema = field()  # field(): the names of the base class are no defaults
    run: ToolFunction = field()
    toolset: str = "custom"
    parallel_safe: bool = False
    missing: Callable[[], str | None] = lambda: None
    touches_world: bool = False
    world_session: str = ""
    world_key: Callable[[Mapping[str, JSON], ToolRun], Awaitable[JSON]] = given_arguments

    def is_available(self) -> tuple[bool, str | None]:
        reason = self.missing()
        return reason is None, reason

    async def execute(self, **arguments: JSON) -> ToolResult:
        async with NoRollout() as run:
            return result_of(await self.run(arguments, run))


class NoRollout:
    """A `ToolRun` for one call outside any rollout, in an `async with`: there is no slot, and state ends with it."""

    task_id = ""
    user_task = ""
    timeout_s = 120.0

    def __init__(self, shared: States | None = None) -> None:
        self.shared = shared if shared is not None else States()
        self._own_shared = shared is None
        self._states = States()

    async def __aenter__(self) -> NoRollout:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._states.aclose()
        if self._own_shared:
            await self.shared.aclose()

    async def slot(self) -> Slot:
        raise ToolMistake(
            "This tool works in a sandbox slot and there is none: call it through a rollout, a ToolExecutor or "
            "handle_function_call"
        )

    def state(self, kind: type[StateT]) -> StateT:
        return self._states.get(kind)

    def schemas(self) -> Sequence[ToolSchema]:
        return ()

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> ToolReply:
        raise ToolMistake(f"There is no tool '{name}' to call: this is no rollout")
