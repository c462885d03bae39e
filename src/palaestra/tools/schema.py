"""The vocabulary of tools: `ToolSchema`, `Tool`, and what a running tool is given. No I/O.

`ToolCall` and `ToolResult`, calls and results as values, live in `wire.py` and are importable from here too.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

from palaestra.core.types import JSON
from palaestra.sandbox.base import Slot
from palaestra.tools.wire import ToolCall as ToolCall
from palaestra.tools.wire import ToolResult as ToolResult

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """Name, description and JSON-schema parameters of one tool. `parameters` maps argument names to their schemas."""

    name: str
    description: str
    parameters: Mapping[str, JSON] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    external: bool = False

    def to_dict(self) -> dict[str, JSON]:
        """The OpenAI function schema, a fresh copy each time: nobody can change the registry's by accident."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
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

    async def slot(self) -> Slot: ...

    def state(self, kind: type[StateT]) -> StateT:
        """The rollout's one object of this type, made without arguments when first asked for."""
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


@dataclass(frozen=True, slots=True)
class Tool:
    """One thing the agent can call. `parallel_safe` calls of one turn may run at the same time."""

    schema: ToolSchema
    run: ToolFunction
    toolset: str
    parallel_safe: bool = False
    missing: Callable[[], str | None] = lambda: None
    """Why the tool cannot be used here, or None when it can."""

    @property
    def name(self) -> str:
        return self.schema.name
