"""`ToolRegistry`: the tools of a rollout by name. `build.py` creates one from toolsets.

Invariant: `definitions` returns fresh copies, so no caller can change another caller's schemas.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from palaestra.tools.arguments import ArgumentSchema, InvalidArguments, compiled
from palaestra.tools.call_text import ToolCall, ToolResult, result_of
from palaestra.tools.registry.toolsets import TOOL_ALIASES
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import States, Tool, ToolRun, ToolSchema, run_tool
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError, PalaestraError
from palaestra_slots.core.types import JSON


class ToolRegistry:
    """Tools by name, in the order of registration. `missing` maps requested tools that are left out to the reasons.

    `shared` holds the objects that rollouts with these tools share, and its creator closes it. If `shared` is None,
    each rollout has its own objects. With `replayed`, a recording answers for tools with `touches_world`, so they are
    never missing.
    """

    def __init__(
        self,
        tools: Iterable[Tool] = (),
        missing: Mapping[str, str] | None = None,
        settings: ToolSettings | None = None,
        shared: States | None = None,
        replayed: bool = False,
    ) -> None:
        self._tools: dict[str, Tool] = {}
        self._arguments: dict[str, ArgumentSchema] = {}
        self.missing: Mapping[str, str] = dict(missing or {})
        self.settings = settings
        self.shared = shared
        self.replayed = replayed
        self._shown: tuple[list[dict[str, JSON]], str] | None = None
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool, arguments: ArgumentSchema | None = None) -> None:
        """Add a tool. If `arguments` is given, calls are checked against it and not against the tool's schema. Raises
        `ConfigError` if the name is taken."""
        if tool.name in self._tools:
            raise ConfigError(f"Two tools are called '{tool.name}'; rename one of them")
        self._tools[tool.name] = tool
        self._shown = None
        if arguments is not None:
            self._arguments[tool.name] = arguments

    def with_tools(self, tools: Iterable[Tool] | None = None, *, replayed: bool | None = None) -> ToolRegistry:
        """Return a copy of the registry, without the argument schemas passed to `register`. `tools` and `replayed`, if
        given, replace the registry's values."""
        return ToolRegistry(
            self._tools.values() if tools is None else tools,
            self.missing,
            self.settings,
            self.shared,
            self.replayed if replayed is None else replayed,
        )

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def argument_schema(self, name: str) -> ArgumentSchema:
        """Return the compiled argument schema of a tool. Raises `KeyError` for an unknown tool, and `ConfigError` if
        the schema is not a valid JSON schema."""
        schema = self._arguments.get(name)
        if schema is None:
            schema = self._arguments[name] = compiled(self._tools[name].schema)
        return schema

    def missing_reason(self, name: str) -> str | None:
        """Return the reason why the tool cannot be used here; None if it can be used or is unknown."""
        tool = self._tools.get(name)
        return None if tool is None else tool.missing_in(replayed=self.replayed)

    def known_as(self, name: str) -> str:
        """Return the registered name of the tool with the alias `name`; any other name is returned unchanged."""
        other = TOOL_ALIASES.get(name, name)
        return other if name not in self._tools and other in self._tools else name

    def list_tools(self) -> list[str]:
        return list(self._tools)

    def __iter__(self) -> Iterator[str]:
        """Return the names of the tools."""
        return iter(self._tools)

    def __repr__(self) -> str:
        return f"ToolRegistry({list(self)})"

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    async def call(self, name: str, arguments: Mapping[str, JSON] | None = None) -> ToolResult:
        """Run a tool by its name, outside any rollout. See `execute`."""
        return await self.execute(ToolCall(name, dict(arguments or {})))

    def tools(self) -> list[Tool]:
        return list(self._tools.values())

    def get_schemas(self) -> list[ToolSchema]:
        return [tool.schema for tool in self._tools.values()]

    def definitions(self) -> list[dict[str, JSON]]:
        """Return all schemas as OpenAI function definitions: fresh copies that the caller may change."""
        return [schema.to_dict() for schema in self.get_schemas()]

    def shown(self) -> tuple[list[dict[str, JSON]], str]:
        """Return the definitions and their `schema_hash`, computed once. All callers share the list: do not change
        it."""
        if self._shown is None:
            definitions = self.definitions()
            self._shown = definitions, schema_hash(definitions)
        return self._shown

    def get_prompt_description(self) -> str:
        """Return one JSON line per tool, for prompts that list tools as text."""
        return "\n".join(schema.to_prompt_description() for schema in self.get_schemas())

    def parallel_safe(self) -> frozenset[str]:
        """Return the names of tools whose calls may run concurrently."""
        return frozenset(tool.name for tool in self._tools.values() if tool.parallel_safe)

    async def execute(self, call: ToolCall) -> ToolResult:
        """Run a call outside any rollout, for tools that need no slot. Every failure is a result."""
        tool = self.get(call.name)
        if call.error or tool is None:
            hint = nearest(call.name, self)
            unknown = f"Unknown tool: {call.name}" + (f".{hint}" if hint else "")
            return ToolResult(False, error=call.error or unknown, uniq_id=call.uniq_id)
        try:
            async with ToolRun(shared=self.shared) as run:
                outcome = await run_tool(tool, self.argument_schema(call.name).parse(call.arguments), run)
        except InvalidArguments as mistake:
            return ToolResult(False, error=str(mistake), uniq_id=call.uniq_id)
        except PalaestraError as error:
            text = f"Tool execution failed: {type(error).__name__}: {error}"
            return ToolResult(False, error=text, uniq_id=call.uniq_id)
        return result_of(outcome.reply, call.uniq_id)


def schema_hash(schemas: Sequence[Mapping[str, JSON]]) -> str:
    """Return the SHA-256 (hex) of tool definitions in their order; the order of keys inside a schema does not
    matter."""
    text = json.dumps(list(schemas), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Kit:
    """The tools of an agent, resolved once; all rollouts of a group have the same. `offered` has the definitions that
    models see, if the environment replaced those of the registry."""

    registry: ToolRegistry
    toolsets: tuple[str, ...] = ()
    offered: Sequence[dict[str, JSON]] | None = None

    @property
    def definitions(self) -> list[dict[str, JSON]]:
        """The tool definitions that models see. Rollouts and records share them, so do not change them."""
        return self.registry.shown()[0] if self.offered is None else list(self.offered)

    @property
    def names(self) -> list[str]:
        """The names of the tools that the agent may call."""
        return (
            self.registry.list_tools() if self.offered is None else [each["function"]["name"] for each in self.offered]
        )

    @property
    def tools_hash(self) -> str:
        """The `schema_hash` of the definitions, which identifies them in records."""
        return self.registry.shown()[1] if self.offered is None else schema_hash(self.offered)
