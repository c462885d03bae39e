"""Names, toolsets and availability of all known tools, in the formats that the project's interface contract fixes.
`build.py` selects the tools."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

from palaestra.tools.registry.build import BUILTIN_NAMES, all_tools, get_available_toolsets
from palaestra.tools.registry.toolsets import TOOL_ALIASES, TOOLSETS, resolve_toolsets
from palaestra_slots.core.types import JSON

logger = logging.getLogger(__name__)

TOOL_TO_TOOLSET_MAP: Mapping[str, str] = MappingProxyType(dict(BUILTIN_NAMES))
"""The toolset that each tool of the package belongs to."""

TOOLSET_REQUIREMENTS: Mapping[str, Mapping[str, JSON]] = MappingProxyType(
    {name: {"name": name, "env_vars": [], "tools": resolve_toolsets([name])} for name in TOOLSETS}
)
"""The requirements of each toolset. No tool here reads environment variables, so `env_vars` is empty."""


def get_all_tool_names() -> list[str]:
    """Return the names of all known tools, including those that cannot be used."""
    return [tool.name for tool in all_tools()]


def get_toolset_for_tool(tool_name: str) -> str | None:
    """Return the toolset of a tool, given the tool's name or an alias, or None for an unknown name."""
    name = TOOL_ALIASES.get(tool_name, tool_name)
    return next((tool.toolset for tool in all_tools() if tool.name == name), None)


def check_toolset_requirements() -> dict[str, bool]:
    """Return whether each toolset is available."""
    return {name: each["available"] for name, each in get_available_toolsets().items()}


def check_tool_availability(quiet: bool = False) -> tuple[list[str], list[dict[str, JSON]]]:
    """Return the names of the available toolsets, and for each unavailable toolset its `name`, `env_vars`, `tools` and
    `missing` tools. Unavailable toolsets are logged unless `quiet` is true."""
    toolsets = get_available_toolsets()
    unavailable = [
        {"name": name, "env_vars": [], "tools": each["tools"], "missing": each["missing"]}
        for name, each in toolsets.items()
        if not each["available"]
    ]
    if not quiet:
        for each in unavailable:
            logger.info("toolset %s is not available: %s", each["name"], each["missing"])
    return [name for name, each in toolsets.items() if each["available"]], unavailable
