"""Which tools a rollout gets: `build_tool_registry` and `get_tool_definitions`.

Invariant: a tool that was requested is in the registry or, with its reason, in `missing`; with `strict` the latter is
an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.tools.registry.catalog import all_tools, builtin_tools, usable_packages
from palaestra.tools.registry.entry_points import Installed
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.registry.toolsets import TOOLSETS, Toolset, resolve_toolsets
from palaestra.tools.runtime.scoped_objects import States
from palaestra.tools.serving.tool_server_client import ToolServerLink
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import Tool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunConditions:
    """Conditions of a run for its tools.

    Without `network`, tools that touch the world are chosen only by the name of their toolset: an agent without a
    network must not get one by another way. With `replayed`, such tools are there whatever they lack, because a
    recording answers. `shared` holds the objects that the run's rollouts share.
    """

    network: bool = True
    replayed: bool = False
    shared: States | None = None


def build_tool_registry(
    enabled_toolsets: Iterable[str] | None = None,
    disabled_toolsets: Iterable[str] | None = None,
    tool_server_url: str | ToolServerLink | None = None,
    extra: Iterable[Tool] = (),
    *,
    strict: bool = False,
    installed: Sequence[Installed] | None = None,
    settings: ToolSettings | None = None,
    conditions: RunConditions = RunConditions(),
) -> ToolRegistry:
    """The tools of the enabled toolsets (None: all that work here) without those of the disabled ones.

    `extra` are tools that an environment brings: they are in unless their toolset is disabled. `installed` are those of
    other packages, by default what their entry points offer. External tools run at `tool_server_url` (an address,
    `inprocess`, or a link) if given, and then need nothing here. Tools that cannot be used are left out and named in
    the registry's `missing`; with `strict` they are an error, and the toolsets must be named.

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
    unasked = enabled is None and not conditions.network
    chosen = [known[name] for name in names if not (unasked and known[name].touches_world)]
    if tool_server_url is not None:
        link = ToolServerLink(tool_server_url) if isinstance(tool_server_url, str) else tool_server_url
        served = link.served([*chosen, *own])
        chosen, own = served[: len(chosen)], served[len(chosen) :]
    reasons = {tool.name: tool.missing_in(replayed=conditions.replayed) for tool in (*own, *chosen)}
    requested = own if enabled is None else [*own, *chosen]
    missing = {tool.name: reason for tool in requested if (reason := reasons[tool.name]) is not None}
    missing |= {each.toolset: each.problem for each in others if each.problem and each.toolset in (enabled or ())}
    if strict and missing:
        text = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise ConfigError(f"Tools that were asked for are missing: {text}")
    usable = (tool for tool in (*chosen, *own) if reasons[tool.name] is None)
    return ToolRegistry(usable, missing, settings, conditions.shared, conditions.replayed)


def get_tool_definitions(
    enabled_toolsets: Iterable[str] | None = None,
    disabled_toolsets: Iterable[str] | None = None,
    quiet_mode: bool = False,
    *,
    strict: bool = False,
) -> list[dict[str, JSON]]:
    """OpenAI function definitions of the chosen tools: fresh copies. Raises `ConfigError` as `build_tool_registry`.

    Unless `quiet_mode`, their names are logged, and those of requested tools that are missing.
    """
    registry = build_tool_registry(enabled_toolsets, disabled_toolsets, strict=strict)
    if not quiet_mode:
        logger.info("%d tools: %s", len(registry.list_tools()), ", ".join(registry.list_tools()))
        for name, reason in registry.missing.items():
            logger.warning("tool %s is left out: %s", name, reason)
    return registry.definitions()


def unrestricted(
    registry: ToolRegistry | None = None, settings: ToolSettings | None = None, *, replayed: bool = False
) -> ToolRegistry:
    """Every known tool, those of `registry` before others of their name: for code, never shown to a model.

    Tools that are missing here are in it and answer with their reason. The others get `settings`, or the registry's.
    """
    registry = registry or ToolRegistry(replayed=replayed)
    settings = settings or registry.settings
    others = (tool for tool in all_tools(settings) if registry.get(tool.name) is None)
    tools = [*registry.tools(), *others]
    return ToolRegistry(tools, settings=settings, shared=registry.shared, replayed=registry.replayed)


def chosen_tools(
    tools: Iterable[Tool], enabled_toolsets: Iterable[str] | None, disabled_toolsets: Iterable[str] | None
) -> list[Tool]:
    """The tools in the enabled toolsets (None: in all that are not on request) and in no disabled one.

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


def _toolsets_of(brought: Sequence[Tool], others: Sequence[Installed]) -> dict[str, Toolset]:
    """The toolsets of tools from outside the package."""
    made = {tool.toolset: Toolset("Tools of the environment") for tool in brought}
    for each in others:
        before = made[each.toolset].tools if each.toolset in made else ()
        names = tuple(tool.name for tool in each.tools)
        made[each.toolset] = Toolset(f"Tools of {each.origin}", (*before, *names))
    return made
