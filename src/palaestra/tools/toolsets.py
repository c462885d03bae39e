"""The named groups of tools, as data, and how a choice of groups becomes a list of tool names.

Not for building tools (`registry.py`) and not for random draws of toolsets, which are distributions.

Invariant: `enabled` is applied first, then `disabled`. Disabling a toolset takes away what it lists itself; what it
only includes goes too when it is a pure bundle, so disabling one toolset never strips a tool that another one owns.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from palaestra.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Toolset:
    """A group of tools: those it lists itself and those of the toolsets it includes."""

    description: str
    tools: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    on_request: bool = False
    """Only for who asks for it by name: what would stand beside another tool for the same thing."""


TOOLSETS: Mapping[str, Toolset] = {
    "terminal": Toolset("Run shell commands in the workspace", ("terminal", "process")),
    "file": Toolset("Read, write, edit and search files", ("read_file", "write_file", "patch", "search_files")),
    "terminal_stateful": Toolset("A shell that goes on between calls", ("terminal_stateful",), on_request=True),
    "tmux": Toolset("A terminal with a screen, and keys to press", ("tmux",), on_request=True),
    "default": Toolset("Terminal and files: what most tasks need", includes=("terminal", "file")),
}

ALIASES: Mapping[str, str] = {"terminal_tools": "terminal", "file_tools": "file"}
"""Older names of toolsets, still understood everywhere a toolset is named."""


def resolve_toolsets(
    enabled: Iterable[str] | None = None,
    disabled: Iterable[str] | None = None,
    toolsets: Mapping[str, Toolset] = TOOLSETS,
) -> list[str]:
    """The tool names of the enabled toolsets (None: of all) without those of the disabled, each once, in table order.

    None leaves out those that are there on request. Raises `ConfigError` for an unknown toolset, with the nearest name.
    """
    if enabled is None:
        enabled = [name for name, toolset in toolsets.items() if not toolset.on_request]
    chosen = set().union(*(_members(name, toolsets) for name in _known(enabled, toolsets)))
    removed = set().union(*(_owned(name, toolsets) for name in _known(disabled or (), toolsets)))
    in_order = dict.fromkeys(tool for toolset in toolsets.values() for tool in toolset.tools)
    return [tool for tool in in_order if tool in chosen - removed]


def _known(names: Iterable[str], toolsets: Mapping[str, Toolset]) -> list[str]:
    if isinstance(names, str):
        raise ConfigError(f"toolsets must be a list of names, got the string '{names}'")
    return [_canonical(name, toolsets) for name in names]


def _canonical(name: str, toolsets: Mapping[str, Toolset]) -> str:
    found = ALIASES.get(name, name)
    if found in toolsets:
        return found
    close = difflib.get_close_matches(name, [*toolsets, *ALIASES], n=1, cutoff=0.5)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    raise ConfigError(f"Unknown toolset '{name}'.{hint} Available toolsets: {', '.join(sorted(toolsets))}")


def _members(name: str, toolsets: Mapping[str, Toolset], above: frozenset[str] = frozenset()) -> set[str]:
    """Own tools and those of all includes; a toolset that includes itself in a circle counts once."""
    toolset = toolsets[name]
    inner = [included for included in toolset.includes if included not in above]
    return set(toolset.tools).union(*(_members(included, toolsets, above | {name}) for included in inner))


def _owned(name: str, toolsets: Mapping[str, Toolset]) -> set[str]:
    return set(toolsets[name].tools) or _members(name, toolsets)
