"""The named groups of tools, as data, and the tool names of selected groups. The project's interface contract fixes the
names and members of the groups.

Invariant: `enabled` is applied first, then `disabled`. Disabling a toolset removes the tools that it lists. If it lists
none, the tools of the toolsets that it includes are removed. For example, disabling `browser` does not remove
`web_search`, which `browser` only includes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from palaestra_slots.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Toolset:
    """A group of tools: the tools that it lists, and the tools of the toolsets that it includes."""

    description: str
    tools: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    on_request: bool = False
    """The toolset is enabled only by name, because it duplicates another tool or needs setup (a user, a folder for
    notes)."""


# fmt: off
_BROWSER = tuple(f"browser_{action}" for action in (
    "navigate", "snapshot", "click", "type", "scroll", "back", "press", "close", "get_images", "vision", "console",
))
_TRAINING = tuple(f"rl_{action}" for action in (
    "list_environments", "select_environment", "get_current_config", "edit_config", "start_training", "check_status",
    "stop_training", "get_results", "list_runs", "test_inference",
))
_CORE = (
    "terminal", "file", "web", "vision", "image_gen", "moa", "skills", "browser", "tts", "todo", "memory",
    "session_search", "clarify", "code_execution", "delegation", "cronjob", "messaging",
)
# fmt: on

TOOLSETS: Mapping[str, Toolset] = {
    "terminal": Toolset("Run shell commands in the workspace and manage processes", ("terminal", "process")),
    "file": Toolset("Read, write, edit and search files", ("read_file", "write_file", "patch", "search_files")),
    "terminal_stateful": Toolset("A shell that keeps its state between calls", ("terminal_stateful",), on_request=True),
    "tmux": Toolset("A terminal with a screen, and keys to press", ("tmux",), on_request=True),
    "todo": Toolset("Keep a list of the steps of a task", ("todo",)),
    "web": Toolset("Search the web and read pages", ("web_search", "web_extract")),
    "web_crawl": Toolset("Crawl a web site from one page", ("web_crawl",), on_request=True),
    "search": Toolset("Search the web without reading pages", ("web_search",)),
    "browser": Toolset("Drive a browser, and search for pages to open", _BROWSER, includes=("search",)),
    "vision": Toolset("Look at images", ("vision_analyze",)),
    "image_gen": Toolset("Make images", ("image_generate",)),
    "tts": Toolset("Turn text into speech", ("text_to_speech",)),
    "moa": Toolset("Ask several models and merge their answers", ("mixture_of_agents",)),
    "skills": Toolset("Read and keep documents on how to do tasks", ("skills_list", "skill_view", "skill_manage")),
    "memory": Toolset("Keep notes from one session to the next", ("memory",), on_request=True),
    "session_search": Toolset("Search earlier conversations", ("session_search",), on_request=True),
    "clarify": Toolset("Ask the user a question", ("clarify",), on_request=True),
    "code_execution": Toolset("Run programs that call tools", ("execute_code",)),
    "delegation": Toolset("Give parts of a task to sub-agents", ("delegate_task",)),
    "cronjob": Toolset("Run prompts at set times", ("cronjob",)),
    "messaging": Toolset("Send messages to people and channels", ("send_message",)),
    "homeassistant": Toolset(
        "See and control a smart home", ("ha_list_entities", "ha_get_state", "ha_list_services", "ha_call_service")
    ),
    "rl": Toolset("Set up, start and watch training runs", _TRAINING, on_request=True),
    "default": Toolset("Terminal and files: what most tasks need", includes=("terminal", "file")),
    "debugging": Toolset("Terminal, files and the web", includes=("terminal", "file", "web")),
    "safe": Toolset("Tools that need no terminal", includes=("web", "vision", "image_gen", "moa")),
    **{
        f"hermes-{where}": Toolset(f"An assistant's tools {how}", includes=_CORE)
        for where, how in {
            "cli": "at the command line",
            "telegram": "in Telegram",
            "discord": "in Discord",
            "whatsapp": "in WhatsApp",
            "slack": "in Slack",
        }.items()
    },
}

ALIASES: Mapping[str, str] = {
    "terminal_tools": "terminal",
    "file_tools": "file",
    "web_tools": "web",
    "browser_tools": "browser",
    "vision_tools": "vision",
    "image_tools": "image_gen",
    "tts_tools": "tts",
    "moa_tools": "moa",
    "skills_tools": "skills",
    "cronjob_tools": "cronjob",
    "rl_tools": "rl",
}
"""Older names of toolsets, still accepted in place of the current ones."""

TOOL_ALIASES: Mapping[str, str] = {
    "bash": "terminal",
    "bash_stateful": "terminal_stateful",
    "process_manage": "process",
    "todo_list": "todo",
    "cronjob_manage": "cronjob",
}
"""Other names that code may use for a tool. For a model, such a name is an unknown tool."""


def resolve_toolsets(
    enabled: Iterable[str] | None = None,
    disabled: Iterable[str] | None = None,
    toolsets: Mapping[str, Toolset] = TOOLSETS,
) -> list[str]:
    """Return the tool names of the enabled toolsets without those of the disabled toolsets, each once, in the order of
    `toolsets`. If `enabled` is None, all toolsets are enabled except those with `on_request`. Raises `ConfigError` for
    an unknown toolset, with the nearest name."""
    chosen: set[str] = set()
    if enabled is None:  # only the tools that a toolset lists, because included toolsets have entries of their own
        chosen.update(*(toolset.tools for toolset in toolsets.values() if not toolset.on_request))
    else:
        chosen.update(*(_members(name, toolsets) for name in _canonical_names(enabled, toolsets)))
    removed = set().union(*(_owned(name, toolsets) for name in _canonical_names(disabled or (), toolsets)))
    in_order = dict.fromkeys(tool for toolset in toolsets.values() for tool in toolset.tools)
    return [tool for tool in in_order if tool in chosen - removed]


def _canonical_names(names: Iterable[str], toolsets: Mapping[str, Toolset]) -> list[str]:
    if isinstance(names, str):
        raise ConfigError(f"toolsets must be a list of names, got the string '{names}'")
    return [_canonical(name, toolsets) for name in names]


def _canonical(name: str, toolsets: Mapping[str, Toolset]) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"a toolset's name must be a string, not {name!r:.100}")
    found = ALIASES.get(name, name)
    if found in toolsets:
        return found
    close = difflib.get_close_matches(name, [*toolsets, *ALIASES], n=1, cutoff=0.5)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    raise ConfigError(f"Unknown toolset '{name}'.{hint} Available toolsets: {', '.join(sorted(toolsets))}")


def _members(name: str, toolsets: Mapping[str, Toolset], above: frozenset[str] = frozenset()) -> set[str]:
    """Return the tools of a toolset and of the toolsets that it includes. Includes may be circular."""
    toolset = toolsets[name]
    inner = [included for included in toolset.includes if included not in above]
    return set(toolset.tools).union(*(_members(included, toolsets, above | {name}) for included in inner))


def _owned(name: str, toolsets: Mapping[str, Toolset]) -> set[str]:
    return set(toolsets[name].tools) or _members(name, toolsets)
