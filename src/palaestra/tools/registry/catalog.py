"""All known tools, of this package and of installed ones: their names, toolsets and availability, in the contract's
shapes. `build.py` chooses the tools of a rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from palaestra.core.types import JSON
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
from palaestra.tools.registry.entry_points import Installed, installed_tools
from palaestra.tools.registry.toolsets import ALIASES, TOOL_ALIASES, TOOLSETS, resolve_toolsets
from palaestra.tools.registry.unavailable import ASSISTANT, MODELS, TRAINING
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import Tool

logger = logging.getLogger(__name__)


def builtin_tools(settings: ToolSettings | None = None) -> tuple[Tool, ...]:
    """All tools of the package, in the order in which models see them. Without the `settings` they need, some are
    missing and report it."""
    settings = settings or ToolSettings()
    files = (READ_FILE, WRITE_FILE, PATCH, SEARCH_FILES)
    here = (TERMINAL, PROCESS, *files, TODO, TERMINAL_STATEFUL, TMUX, EXECUTE_CODE, DELEGATE_TASK)
    people = (CLARIFY, MEMORY, SESSION_SEARCH)
    eyes = (*browser_tools(settings), vision_tool(settings))
    web = (*web_tools(settings), web_crawl_tool(settings))
    return (*here, *people, *web, *eyes, *MODELS, *ASSISTANT, *TRAINING)


def all_tools(settings: ToolSettings | None = None, others: Iterable[Installed] | None = None) -> list[Tool]:
    """Every tool of the package, then those of others (`usable_packages`), missing ones included."""
    return [*builtin_tools(settings), *(tool for each in usable_packages(others) for tool in each.tools)]


def usable_packages(others: Iterable[Installed] | None = None) -> list[Installed]:
    """What other packages offer, by default through entry points. A package whose names are taken offers nothing, and
    its `problem` says so."""
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


TOOL_TO_TOOLSET_MAP: Mapping[str, str] = MappingProxyType({tool.name: tool.toolset for tool in builtin_tools()})
"""The toolset that each tool of the package belongs to."""

TOOLSET_REQUIREMENTS: Mapping[str, Mapping[str, JSON]] = MappingProxyType(
    {name: {"name": name, "env_vars": [], "tools": resolve_toolsets([name])} for name in TOOLSETS}
)
"""What each toolset needs. No tool here reads an environment variable, so `env_vars` are empty."""


def get_all_tool_names() -> list[str]:
    """All known tools, missing ones included."""
    return [tool.name for tool in all_tools()]


def get_toolset_for_tool(tool_name: str) -> str | None:
    """The toolset of a tool, by any of its names; None for an unknown name."""
    name = TOOL_ALIASES.get(tool_name, tool_name)
    return next((tool.toolset for tool in all_tools() if tool.name == name), None)


def get_available_toolsets(
    settings: ToolSettings | None = None, others: Iterable[Installed] | None = None
) -> dict[str, dict[str, JSON]]:
    """Each toolset: `available` (at least one tool works here), `tools`, `description`, and `missing` tools with the
    reason. `others` are by default what packages offer."""
    known = {tool.name: tool for tool in all_tools(settings, others)}
    builtin = ((name, toolset.description, resolve_toolsets([name])) for name, toolset in TOOLSETS.items())
    offered = (
        (each.toolset, each.problem or f"Tools of {each.origin}", [tool.name for tool in each.tools])
        for each in usable_packages(others)
    )
    return {name: _toolset(text, [known[tool] for tool in tools]) for name, text, tools in (*builtin, *offered)}


def check_toolset_requirements() -> dict[str, bool]:
    """Which toolsets are available."""
    return {name: each["available"] for name, each in get_available_toolsets().items()}


def check_tool_availability(quiet: bool = False) -> tuple[list[str], list[dict[str, JSON]]]:
    """The available toolsets, and `name`, `env_vars`, `tools` and `missing` of the others, logged unless `quiet`."""
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


def _toolset(description: str, tools: list[Tool]) -> dict[str, JSON]:
    missing = {tool.name: reason for tool in tools if (reason := tool.missing()) is not None}
    return {
        "available": len(missing) < len(tools),
        "description": description,
        "tools": [tool.name for tool in tools],
        "missing": missing,
        "requirements": [],
    }
