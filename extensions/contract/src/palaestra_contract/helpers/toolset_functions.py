"""The functions of `toolsets` that Hermes scripts import, over the toolsets of this package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from palaestra.tools.registry.toolsets import ALIASES, resolve_toolsets
from palaestra.tools.registry.toolsets import TOOLSETS as _TOOLSETS
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON

TOOLSETS: Mapping[str, Mapping[str, JSON]] = MappingProxyType(
    {
        name: {"description": each.description, "tools": list(each.tools), "includes": list(each.includes)}
        for name, each in _TOOLSETS.items()
    }
)
"""Each toolset with its description, the tools that it lists, and the toolsets that it includes."""


def get_toolset(name: str) -> dict[str, JSON] | None:
    """Return one entry of `TOOLSETS`, also by an older name; None for an unknown name."""
    found = TOOLSETS.get(ALIASES.get(name, name))
    return None if found is None else dict(found)


def resolve_toolset(name: str) -> list[str]:
    """Return the names of a toolset's tools, with those of included toolsets. `all` and `*` mean every toolset; an
    unknown name has no tools."""
    if name in ("all", "*"):
        return resolve_multiple_toolsets(TOOLSETS)
    try:
        return resolve_toolsets([name])
    except ConfigError:
        return []


def resolve_multiple_toolsets(toolset_names: Iterable[str]) -> list[str]:
    """Return the names of the tools of several toolsets, each once."""
    return list(dict.fromkeys(tool for name in toolset_names for tool in resolve_toolset(name)))


def get_all_toolsets() -> dict[str, dict[str, JSON]]:
    return {name: dict(each) for name, each in TOOLSETS.items()}


def get_toolset_names() -> list[str]:
    return sorted(TOOLSETS)


def validate_toolset(name: str) -> bool:
    """Return whether there is such a toolset; `all` and `*` count."""
    return name in ("all", "*") or get_toolset(name) is not None
