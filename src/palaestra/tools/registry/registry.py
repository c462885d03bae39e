"""Which tools exist and which of them a rollout gets: `ToolRegistry`, `build_tool_registry`, `get_tool_definitions`.

Not for running tools in slots (`binding.py`, `executor.py`, `session.py`). There is no global registry: each caller
builds the one it needs, and importing this module registers nothing.

Invariants: schemas leave a registry as fresh copies, so no caller can change what another one sees; `schema_hash` names
exactly the set and order of schemas that a model was shown; a tool that was asked for is in the registry or, with its
reason, in `missing`, and with `strict` the latter is an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from palaestra.core.errors import ConfigError, PalaestraError
from palaestra.core.types import JSON
from palaestra.tools.arguments import ArgumentSchema, InvalidArguments, compiled
from palaestra.tools.call_text import ToolCall, ToolResult, result_of
from palaestra.tools.registry.entry_points import Installed, installed_tools
from palaestra.tools.registry.toolsets import ALIASES, TOOL_ALIASES, TOOLSETS, Toolset, resolve_toolsets
from palaestra.tools.runtime.scoped_objects import States
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import Tool, ToolRun, ToolSchema, run_tool

if TYPE_CHECKING:
    from palaestra.tools.serving.tool_server_client import ToolServerLink

logger = logging.getLogger(__name__)


class ToolRegistry:
    """Tools by name, in the order in which they were registered. `missing` names those asked for but not here.

    `settings` are what its tools were made with. `shared` is what rollouts with these tools have together; who made it
    closes it. None: each has its own. With `replayed`, tools that touch the world are answered from a recording and
    need nothing here.
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
        self.replayed = replayed
        self.settings = settings
        self.shared = shared
        self.missing: Mapping[str, str] = dict(missing or {})
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool, arguments: ArgumentSchema | None = None) -> None:
        """Add a tool. `arguments` replaces its schema for checking calls. Raises `ConfigError` if the name is taken."""
        if tool.name in self._tools:
            raise ConfigError(f"Two tools are called '{tool.name}'; rename one of them")
        self._tools[tool.name] = tool
        if arguments is not None:
            self._arguments[tool.name] = arguments

    def copy(self) -> ToolRegistry:
        """The same tools, to which others can be added."""
        return ToolRegistry(self._tools.values(), self.missing, self.settings, self.shared, self.replayed)

    def get(self, name: str) -> Tool | None:
        """The tool of that name, or None."""
        return self._tools.get(name)

    def argument_schema(self, name: str) -> ArgumentSchema:
        """The compiled argument schema of a tool. Raises `KeyError`, or `ConfigError` if it is no JSON schema."""
        schema = self._arguments.get(name)
        if schema is None:
            schema = self._arguments[name] = compiled(self._tools[name].schema)
        return schema

    def missing_reason(self, name: str) -> str | None:
        """Why the tool cannot be used here, or None if it can or is unknown."""
        tool = self._tools.get(name)
        return None if tool is None else _reason(tool, self.replayed)

    def known_as(self, name: str) -> str:
        """The registered name of what a caller in code calls `name`; `name` itself where nothing is known by it."""
        other = TOOL_ALIASES.get(name, name)
        return other if name not in self._tools and other in self._tools else name

    def list_tools(self) -> list[str]:
        """All names, in order."""
        return list(self._tools)

    def tools(self) -> list[Tool]:
        """All tools, in order."""
        return list(self._tools.values())

    def get_schemas(self) -> list[ToolSchema]:
        """All schemas, in order."""
        return [tool.schema for tool in self._tools.values()]

    def definitions(self) -> list[dict[str, JSON]]:
        """All schemas as OpenAI function definitions: fresh copies that the caller may change."""
        return [schema.to_dict() for schema in self.get_schemas()]

    def get_prompt_description(self) -> str:
        """One JSON line per tool, for prompts that list tools as text."""
        return "\n".join(schema.to_prompt_description() for schema in self.get_schemas())

    def parallel_safe(self) -> frozenset[str]:
        """Names of the tools whose calls may run at the same time."""
        return frozenset(tool.name for tool in self._tools.values() if tool.parallel_safe)

    async def execute(self, call: ToolCall) -> ToolResult:
        """Run a call outside any rollout, for tools that need no slot. Mistakes and failures are results."""
        tool = self.get(call.name)
        if call.error or tool is None:
            return ToolResult(False, error=call.error or f"Unknown tool: {call.name}", uniq_id=call.uniq_id)
        try:
            async with ToolRun(shared=self.shared) as run:
                outcome = await run_tool(tool, self.argument_schema(call.name).parse(call.arguments), run)
        except InvalidArguments as mistake:
            return ToolResult(False, error=str(mistake), uniq_id=call.uniq_id)
        except PalaestraError as error:
            logger.warning("tool %s failed", call.name, exc_info=True)
            text = f"Tool execution failed: {type(error).__name__}: {error}"
            return ToolResult(False, error=text, uniq_id=call.uniq_id)
        return result_of(outcome.reply, call.uniq_id)


def build_tool_registry(
    enabled_toolsets: Iterable[str] | None = None,
    disabled_toolsets: Iterable[str] | None = None,
    tool_server_url: str | ToolServerLink | None = None,
    extra: Iterable[Tool] = (),
    *,
    strict: bool = False,
    installed: Sequence[Installed] | None = None,
    settings: ToolSettings | None = None,
    world: bool = True,
    replayed: bool = False,
    shared: States | None = None,
) -> ToolRegistry:
    """The tools of the enabled toolsets (None: all that work here) without those of the disabled ones.

    `extra` are tools that an environment brings along: they are in unless their toolset is disabled. `installed` are
    those of other packages, by default what their entry points offer. External tools run at `tool_server_url` (an
    address, `inprocess`, or a link) where one is given; what they lack here does not matter then. Tools that cannot be
    used here are left out and named in the registry's `missing`; with `strict` they are an error, and the toolsets must
    be named. `settings` are what the package's own tools are told; `shared` is what rollouts with these tools have
    together.

    Without `world`, tools that touch it are only for who names their toolset: an agent without a network is not to get
    one by another way. With `replayed` they are there whatever they lack, since the world is a recording.

    Raises `ConfigError` for unknown toolsets, for two tools of one name, and with `strict`.
    """
    if strict and enabled_toolsets is None:
        raise ConfigError(
            "strict needs the toolsets by name, or a distribution: `all that work here` differs between machines"
        )
    enabled = enabled_toolsets if enabled_toolsets is None or isinstance(enabled_toolsets, str) else [*enabled_toolsets]
    brought, disabled = list(extra), list(disabled_toolsets or ())
    others = usable_packages(installed)
    names = resolve_toolsets(enabled, disabled, {**_toolsets_of(brought, others), **TOOLSETS})
    known = {tool.name: tool for tool in (*(tool for each in others for tool in each.tools), *builtin_tools(settings))}
    own = [tool for tool in brought if tool.toolset not in disabled]
    chosen = [known[name] for name in names if world or enabled is not None or not known[name].touches_world]
    if tool_server_url is not None:
        link = _link(tool_server_url)
        served = link.served([*chosen, *own])
        chosen, own = served[: len(chosen)], served[len(chosen) :]
    missing = _reasons(own, replayed)
    if enabled is not None:
        missing |= _reasons(chosen, replayed) | _problems(others, enabled)
    if strict and missing:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise ConfigError(f"Tools that were asked for are missing: {reasons}")
    usable = (tool for tool in [*chosen, *own] if _reason(tool, replayed) is None)
    return ToolRegistry(usable, missing, settings, shared, replayed)


def _link(server: str | ToolServerLink) -> ToolServerLink:
    from palaestra.tools.serving.tool_server_client import ToolServerLink

    return ToolServerLink(server) if isinstance(server, str) else server


def unrestricted(registry: ToolRegistry | None = None, settings: ToolSettings | None = None) -> ToolRegistry:
    """Every tool there is, those of `registry` before others of their name: for code, never to be shown to a model.

    What is missing here is in it and answers with its reason. The others have `settings`, else those of `registry`.
    """
    registry = registry or ToolRegistry()
    settings = settings or registry.settings
    others = (tool for tool in all_tools(settings) if registry.get(tool.name) is None)
    return ToolRegistry(
        [*registry.tools(), *others], settings=settings, shared=registry.shared, replayed=registry.replayed
    )


def chosen_tools(
    tools: Iterable[Tool], enabled_toolsets: Iterable[str] | None, disabled_toolsets: Iterable[str] | None
) -> list[Tool]:
    """Those of `tools` that are in the enabled toolsets (None: in all that are not on request) and in no disabled one.

    Raises `ConfigError` for a toolset that neither the package nor any of the tools has.
    """
    known = list(tools)
    toolsets = dict(TOOLSETS)
    for tool in known:
        toolset = toolsets.get(tool.toolset, Toolset(""))
        if tool.name not in toolset.tools:
            toolsets[tool.toolset] = replace(toolset, tools=(*toolset.tools, tool.name))
    names = set(resolve_toolsets(enabled_toolsets, disabled_toolsets, toolsets))
    return [tool for tool in known if tool.name in names]


def get_tool_definitions(
    enabled_toolsets: Iterable[str] | None = None,
    disabled_toolsets: Iterable[str] | None = None,
    quiet_mode: bool = False,
    *,
    strict: bool = False,
) -> list[dict[str, JSON]]:
    """OpenAI function definitions of the chosen tools: fresh copies.

    Unless `quiet_mode`, their names are logged, and those that were asked for but are missing. Raises `ConfigError` as
    `build_tool_registry` does.
    """
    registry = build_tool_registry(enabled_toolsets, disabled_toolsets, strict=strict)
    if not quiet_mode:
        logger.info("%d tools: %s", len(registry.list_tools()), ", ".join(registry.list_tools()))
        for name, reason in registry.missing.items():
            logger.warning("tool %s is left out: %s", name, reason)
    return registry.definitions()


def schema_hash(schemas: Sequence[Mapping[str, JSON]]) -> str:
    """SHA-256 (hex) of tool definitions in their order; the order of keys inside a schema does not matter."""
    text = json.dumps(list(schemas), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def builtin_tools(settings: ToolSettings | None = None) -> tuple[Tool, ...]:
    """All tools that the package knows, in the order in which models see them; those that are missing say so.

    Some are missing because of `settings`; without any, those that need a key or an address are.
    """
    from palaestra.tools.builtin.browser import browser_tools
    from palaestra.tools.builtin.clarify import CLARIFY
    from palaestra.tools.builtin.delegate_task import DELEGATE_TASK
    from palaestra.tools.builtin.execute_code import EXECUTE_CODE
    from palaestra.tools.builtin.file_tools import READ_FILE, WRITE_FILE
    from palaestra.tools.builtin.memory import MEMORY
    from palaestra.tools.builtin.patch import PATCH
    from palaestra.tools.builtin.process import PROCESS
    from palaestra.tools.builtin.search import SEARCH_FILES
    from palaestra.tools.builtin.session_search import SESSION_SEARCH
    from palaestra.tools.builtin.terminal import TERMINAL
    from palaestra.tools.builtin.terminal_stateful import TERMINAL_STATEFUL
    from palaestra.tools.builtin.tmux import TMUX
    from palaestra.tools.builtin.todo import TODO
    from palaestra.tools.builtin.vision import vision_tool
    from palaestra.tools.builtin.web import web_tools
    from palaestra.tools.builtin.web_crawl import web_crawl_tool
    from palaestra.tools.registry.unavailable import ASSISTANT, MODELS, TRAINING

    settings = settings or ToolSettings()
    files = (READ_FILE, WRITE_FILE, PATCH, SEARCH_FILES)
    here = (TERMINAL, PROCESS, *files, TODO, TERMINAL_STATEFUL, TMUX, EXECUTE_CODE, DELEGATE_TASK)
    people = (CLARIFY, MEMORY, SESSION_SEARCH)
    eyes = (*browser_tools(settings), vision_tool(settings))
    web = (*web_tools(settings), web_crawl_tool(settings))
    return (*here, *people, *web, *eyes, *MODELS, *ASSISTANT, *TRAINING)


def all_tools(settings: ToolSettings | None = None, others: Iterable[Installed] | None = None) -> list[Tool]:
    """Every tool of the package, then those of others (`usable_packages`); those that are missing too."""
    return [*builtin_tools(settings), *(tool for each in usable_packages(others) for tool in each.tools)]


def usable_packages(others: Iterable[Installed] | None = None) -> list[Installed]:
    """What other packages offer. One whose names are taken by others offers nothing, and says so.

    `others` are by default what the entry points offer.
    """
    taken = {tool.name for tool in builtin_tools()}
    kept: list[Installed] = []
    for each in installed_tools() if others is None else others:
        clashes = [f"tool '{tool.name}'" for tool in each.tools if tool.name in taken]
        if each.toolset in TOOLSETS or each.toolset in ALIASES:
            clashes = [f"toolset '{each.toolset}'"]
        if clashes:
            problem = f"{each.origin} brings the {clashes[0]}, which there is already"
            each = Installed(each.toolset, each.origin, problem=problem)
        taken.update(tool.name for tool in each.tools)
        kept.append(each)
    return kept


def _toolsets_of(brought: Sequence[Tool], others: Sequence[Installed]) -> dict[str, Toolset]:
    """The toolsets that tools from outside the package make."""
    made = {tool.toolset: Toolset("Tools of the environment") for tool in brought}
    for each in others:
        before = made[each.toolset].tools if each.toolset in made else ()
        names = tuple(tool.name for tool in each.tools)
        made[each.toolset] = Toolset(f"Tools of {each.origin}", (*before, *names))
    return made


def _reasons(tools: Iterable[Tool], replayed: bool) -> dict[str, str]:
    """Why some of the tools cannot be used here, by name."""
    return {tool.name: reason for tool in tools if (reason := _reason(tool, replayed)) is not None}


def _reason(tool: Tool, replayed: bool) -> str | None:
    return None if replayed and tool.touches_world else tool.missing()


def _problems(others: Sequence[Installed], enabled: Iterable[str]) -> dict[str, str]:
    """Toolsets that were asked for by name and whose package could not be loaded."""
    return {each.toolset: each.problem for each in others if each.problem is not None and each.toolset in set(enabled)}
