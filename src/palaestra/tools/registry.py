"""Which tools exist and which of them a rollout gets: `ToolRegistry`, `build_tool_registry`, `get_tool_definitions`.

Not for running tools (`binding.py`, `executor.py`). There is no global registry: each caller builds the one it needs,
and importing this module registers nothing.

Invariant: schemas leave a registry as fresh copies, so no caller can change what another one sees; `schema_hash` names
exactly the set and order of schemas that a model was shown.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.tools.schema import Tool, ToolSchema
from palaestra.tools.toolsets import TOOLSETS, Toolset, resolve_toolsets

logger = logging.getLogger(__name__)


class ToolRegistry:
    """Tools by name, in the order in which they were registered."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool) -> None:
        """Add a tool. Raises `ConfigError` when the name is taken."""
        if tool.name in self._tools:
            raise ConfigError(f"Two tools are called '{tool.name}'; rename one of them")
        self._tools[tool.name] = tool

    def get(self, name: str) -> Tool | None:
        """The tool of that name, or None."""
        return self._tools.get(name)

    def list_tools(self) -> list[str]:
        """All names, in order."""
        return list(self._tools)

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


def build_tool_registry(
    enabled_toolsets: Iterable[str] | None = None,
    disabled_toolsets: Iterable[str] | None = None,
    tool_server_url: str | None = None,
    extra: Iterable[Tool] = (),
) -> ToolRegistry:
    """The tools of the enabled toolsets (None: all) without those of the disabled ones.

    `extra` are tools that an environment brings along: they are in unless their toolset is disabled. Tools that say why
    they cannot be used here (`Tool.missing`) are left out with a warning. Raises `ConfigError` for unknown toolsets.
    """
    if tool_server_url is not None:
        raise ConfigError("External tool servers are not supported yet; leave tool_server_url unset")
    brought, disabled = list(extra), list(disabled_toolsets or ())
    toolsets = {**{tool.toolset: Toolset("Tools of the environment") for tool in brought}, **TOOLSETS}
    names = resolve_toolsets(enabled_toolsets, disabled, toolsets)
    built_in = {tool.name: tool for tool in builtin_tools()}
    chosen = [built_in[name] for name in names] + [tool for tool in brought if tool.toolset not in disabled]
    return ToolRegistry(tool for tool in chosen if _usable(tool))


def get_tool_definitions(
    enabled_toolsets: Iterable[str] | None = None,
    disabled_toolsets: Iterable[str] | None = None,
    quiet_mode: bool = False,
) -> list[dict[str, JSON]]:
    """OpenAI function definitions of the chosen tools: fresh copies. Unless `quiet_mode`, their names are logged."""
    registry = build_tool_registry(enabled_toolsets, disabled_toolsets)
    if not quiet_mode:
        logger.info("%d tools: %s", len(registry.list_tools()), ", ".join(registry.list_tools()))
    return registry.definitions()


def schema_hash(schemas: Sequence[Mapping[str, JSON]]) -> str:
    """SHA-256 (hex) of tool definitions in their order; the order of keys inside a schema does not matter."""
    text = json.dumps(list(schemas), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def builtin_tools() -> tuple[Tool, ...]:
    """All tools that come with the package, in the order in which models see them."""
    from palaestra.tools.builtin.edits import PATCH
    from palaestra.tools.builtin.files import READ_FILE, WRITE_FILE
    from palaestra.tools.builtin.process import PROCESS
    from palaestra.tools.builtin.search import SEARCH_FILES
    from palaestra.tools.builtin.terminal import TERMINAL
    from palaestra.tools.builtin.terminal_stateful import TERMINAL_STATEFUL
    from palaestra.tools.builtin.tmux import TMUX

    return (TERMINAL, PROCESS, READ_FILE, WRITE_FILE, PATCH, SEARCH_FILES, TERMINAL_STATEFUL, TMUX)


def _usable(tool: Tool) -> bool:
    reason = tool.missing()
    if reason is not None:
        logger.warning("tool %s is left out: %s", tool.name, reason)
    return reason is None
