"""What can be asked about all tools at once, in the shapes of the contract: names, toolsets, availability.

Not for choosing the tools of a rollout (`registry.py`). Everything is worked out when it is asked for, from the tools
of the package and of installed packages; nothing here can be changed by a caller.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
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
    """All tools that the package knows, in the order in which models see them; those that are missing say so.

    Some are missing because of `settings`; without any, those that need a key or an address are.
    """
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


TOOL_TO_TOOLSET_MAP: Mapping[str, str] = MappingProxyType({tool.name: tool.toolset for tool in builtin_tools()})
"""The toolset that each tool of the package belongs to."""

TOOLSET_REQUIREMENTS: Mapping[str, Mapping[str, JSON]] = MappingProxyType(
    {name: {"name": name, "env_vars": [], "tools": resolve_toolsets([name])} for name in TOOLSETS}
)
"""What each toolset needs. No tool here reads an environment variable, so `env_vars` are empty."""


def get_all_tool_names() -> list[str]:
    """All tools that are known here, those that are missing too."""
    return [tool.name for tool in all_tools()]


def get_toolset_for_tool(tool_name: str) -> str | None:
    """The toolset a tool belongs to; None for a name that no tool has. Other names of a tool count."""
    name = TOOL_ALIASES.get(tool_name, tool_name)
    return next((tool.toolset for tool in all_tools() if tool.name == name), None)


def get_available_toolsets(
    settings: ToolSettings | None = None, others: Iterable[Installed] | None = None
) -> dict[str, dict[str, JSON]]:
    """Each toolset: `available` (has at least one tool that works here), `tools`, `description`, `missing`.

    `missing` has the tools that do not work here, with the reason; `settings` are what the tools are told, `others` by
    default what packages offer.
    """
    known = {tool.name: tool for tool in all_tools(settings, others)}
    return {
        name: _toolset(description, [known[tool] for tool in tools])
        for name, description, tools in (
            *_builtin(),
            *((e.toolset, _about(e), _names(e)) for e in usable_packages(others)),
        )
    }


def check_toolset_requirements() -> dict[str, bool]:
    """Which toolsets are available."""
    return {name: each["available"] for name, each in get_available_toolsets().items()}


def check_tool_availability(quiet: bool = False) -> tuple[list[str], list[dict[str, JSON]]]:
    """The toolsets that are available, and for each other one `name`, `env_vars`, `tools` and the `missing` reasons.

    Unless `quiet`, the latter are logged.
    """
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


def _builtin() -> Iterator[tuple[str, str, list[str]]]:
    for name, toolset in TOOLSETS.items():
        yield name, toolset.description, resolve_toolsets([name])


def _about(offered: Installed) -> str:
    return offered.problem or f"Tools of {offered.origin}"


def _names(offered: Installed) -> list[str]:
    return [tool.name for tool in offered.tools]
