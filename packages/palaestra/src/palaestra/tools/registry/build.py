"""Selects the tools of a rollout from all known ones: `build_tool_registry` and `get_tool_definitions`.

The modules of built-in tools are loaded by toolset, so a run loads only those that it uses. Other packages offer tools
through entry points in the group `palaestra.tools`:

    [project.entry-points."palaestra.tools"]
    weather = "weather_package.tools:TOOLS"

The entry point's name is the toolset. Its value is a tool, a list of tools, or a function that returns one of these.

Invariants: a requested tool whose toolset is not disabled is in the registry, or in `missing` with the reason. With
`strict`, a missing tool is an error. A package that cannot be loaded does not affect the others.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from itertools import chain
from typing import Protocol, cast

from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.registry.toolsets import ALIASES, TOOLSETS, Toolset, resolve_toolsets
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import States, Tool
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import plugins
from palaestra_slots.core.types import JSON

logger = logging.getLogger(__name__)

GROUP = "palaestra.tools"
TOOLSETS_GROUP = "palaestra.toolsets"
SERVERS_GROUP = "palaestra.tool_servers"

# fmt: off
_BUILTIN: Mapping[str, tuple[str, ...]] = {
    "terminal": ("builtin.terminal:TERMINAL", "builtin.process:PROCESS"),
    "file": ("builtin.file_tools:READ_FILE", "builtin.file_tools:WRITE_FILE", "builtin.patch:PATCH",
             "builtin.search:SEARCH_FILES"),
    "todo": ("builtin.todo:TODO",),
    "terminal_stateful": (),
    "tmux": (),
    "code_execution": ("builtin.execute_code:EXECUTE_CODE",),
    "delegation": ("builtin.delegate_task:DELEGATE_TASK",),
    "clarify": ("builtin.clarify:CLARIFY",),
    **dict.fromkeys((
        "memory", "session_search", "web", "web_crawl", "browser", "vision", "image_gen", "tts", "moa", "skills",
        "cronjob", "messaging", "homeassistant", "rl",
    ), ()),
}
# fmt: on
"""References to each toolset's tools, `module:name` below `palaestra.tools`: to a tool, several tools, or a function
that makes them from the settings. Extensions provide the toolsets without references, by entry points in the group
`TOOLSETS_GROUP`, which have the toolset's name and refer to the same kinds of object."""

BUILTIN_NAMES: Mapping[str, str] = {name: toolset for toolset in _BUILTIN for name in TOOLSETS[toolset].tools}
"""The names of the built-in tools, each with its toolset, in the order in which `builtin_tools` returns them."""


class ToolServer(Protocol):
    """Runs external tools elsewhere."""

    def served(self, tools: Iterable[Tool]) -> list[Tool]:
        """Return the tools. External ones are replaced by tools that call the server."""


NOT_INSTALLED = "the package that provides it is not installed"
"""The reason why a tool of an extension is missing."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The tools that one entry point offers. If it could not be loaded, `problem` is set and `tools` is empty."""

    toolset: str
    origin: str
    tools: tuple[Tool, ...] = ()
    problem: str | None = None


def builtin_tools(settings: ToolSettings | None = None, toolsets: Collection[str] | None = None) -> tuple[Tool, ...]:
    """Return the tools of `toolsets` (None: all toolsets of this package) in a fixed order, including tools that cannot
    be used."""
    settings = settings or ToolSettings()
    wanted = _BUILTIN if toolsets is None else [toolset for toolset in _BUILTIN if toolset in toolsets]
    found: list[Tool] = []
    for offered in (each for toolset in wanted for each in _references(toolset)):
        # A tool made by a decorator is callable too, but calling it would run it.
        made = offered(settings) if callable(offered) and not isinstance(offered, Tool) else offered
        found += _checked_tools(made)
    return tuple(found)


def _references(toolset: str) -> Iterator[object]:
    """Yield what a toolset refers to, or nothing if its extension is not installed."""
    for reference in _BUILTIN[toolset]:
        module, _, name = reference.partition(":")
        yield getattr(import_module(f"palaestra.tools.{module}"), name)
    if not _BUILTIN[toolset] and toolset in (points := plugins.installed(TOOLSETS_GROUP)):
        yield plugins.load(points[toolset])


@functools.cache
def installed_tools() -> tuple[Installed, ...]:
    """Return the tools of installed packages, by entry point. Looked up once per process."""
    return tuple(
        load(point) for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    )


def load(point: EntryPoint) -> Installed:
    """Load one entry point. Never raises: `problem` reports an error."""
    origin = f"{point.dist.name} ({point.value})" if point.dist is not None else point.value
    try:
        return Installed(point.name, origin, _checked_tools(point.load()))
    except Exception as error:  # another package's code may raise anything
        return Installed(point.name, origin, problem=f"{origin} could not be loaded: {type(error).__name__}: {error}")


def _checked_tools(offered: object) -> tuple[Tool, ...]:
    # As above, calling a tool would run it.
    if callable(offered) and not isinstance(offered, (Tool, type)):
        offered = offered()
    found = (offered,) if isinstance(offered, Tool) else tuple(offered) if isinstance(offered, Iterable) else (offered,)
    for each in found:
        if not isinstance(each, Tool):
            raise TypeError(f"{each!r:.80} is not a tool; declare it with @tool")
    return found


def all_tools(settings: ToolSettings | None = None, others: Iterable[Installed] | None = None) -> list[Tool]:
    """Return every tool of this package, then the tools of other packages (`usable_packages`), including tools that
    cannot be used."""
    return [*builtin_tools(settings), *(tool for each in usable_packages(others) for tool in each.tools)]


def usable_packages(others: Iterable[Installed] | None = None) -> list[Installed]:
    """Return the tools of other packages, by default of entry points. A package with a tool or toolset whose name
    already exists has a `problem` instead of tools."""
    taken = set(BUILTIN_NAMES)
    kept: list[Installed] = []
    for each in installed_tools() if others is None else others:
        clashes = [f"tool '{tool.name}'" for tool in each.tools if tool.name in taken]
        if each.toolset in TOOLSETS or each.toolset in ALIASES:
            clashes = [f"toolset '{each.toolset}'"]
        if clashes:
            problem = f"{each.origin} provides the {clashes[0]}, which already exists"
            each = Installed(each.toolset, each.origin, problem=problem)
        taken.update(tool.name for tool in each.tools)
        kept.append(each)
    return kept


def get_available_toolsets(
    settings: ToolSettings | None = None, others: Iterable[Installed] | None = None
) -> dict[str, dict[str, JSON]]:
    """Return a description of each toolset by name: `available` (at least one tool works here), `tools`, `description`,
    and the `missing` tools with the reason. `others` defaults to the tools of installed packages."""
    known = {tool.name: tool for tool in all_tools(settings, others)}
    builtin = ((name, toolset.description, resolve_toolsets([name])) for name, toolset in TOOLSETS.items())
    offered = (
        (each.toolset, each.problem or f"Tools of {each.origin}", [tool.name for tool in each.tools])
        for each in usable_packages(others)
    )
    return {
        name: _toolset_fields(text, [known[tool] for tool in tools if tool in known])
        for name, text, tools in (*builtin, *offered)
    }


def _toolset_fields(description: str, tools: list[Tool]) -> dict[str, JSON]:
    missing = {tool.name: reason for tool in tools if (reason := tool.missing()) is not None}
    return {
        "available": len(missing) < len(tools),
        "description": description,
        "tools": [tool.name for tool in tools],
        "missing": missing,
        "requirements": [],
    }


@dataclass(frozen=True, slots=True)
class RunConditions:
    """The conditions under which a run uses its tools.

    Without `network`, tools with `touches_world` are selected only if their toolset is named. With `replayed`, such
    tools are never missing, because a recording answers their calls. `shared` holds the objects that the run's rollouts
    share.
    """

    network: bool = True
    replayed: bool = False
    shared: States | None = None


def build_tool_registry(
    enabled_toolsets: Iterable[str] | None = None,
    disabled_toolsets: Iterable[str] | None = None,
    tool_server_url: str | ToolServer | None = None,
    extra: Iterable[Tool] = (),
    *,
    strict: bool = False,
    installed: Sequence[Installed] | None = None,
    settings: ToolSettings | None = None,
    conditions: RunConditions = RunConditions(),
    provided: Iterable[Tool] = (),
) -> ToolRegistry:
    """Return the tools of the enabled toolsets, without the tools of the disabled toolsets. If `enabled_toolsets` is
    None, all tools that work here are enabled, except those of toolsets that must be requested by name.

    `extra` are the environment's tools, which only `disabled_toolsets` removes. `provided` tools replace known tools of
    the same name, such as built-in tools that only some programs can provide. `installed` are tools of other packages,
    by default from entry points. If `tool_server_url` (an address, `inprocess`, or a client) is given, it runs external
    tools. The registry leaves out tools that cannot be used. If they were requested, it lists them in `missing`, or,
    with `strict`, `ConfigError` is raised. `strict` needs named toolsets. Raises `ConfigError` also for unknown
    toolsets and for two tools of the same name.
    """
    if strict and enabled_toolsets is None:
        raise ConfigError("strict needs named toolsets, or a distribution: the tools that work differ between machines")
    enabled, disabled, brought = _as_names(enabled_toolsets), _as_names(disabled_toolsets) or [], list(extra)
    others = usable_packages(installed)
    names = resolve_toolsets(enabled, disabled, {**_toolsets_of(brought, others), **TOOLSETS})
    known = _known_tools(names, others, provided, settings)
    own = [tool for tool in brought if tool.toolset not in disabled]
    chosen = [known[name] for name in names if name in known]
    # A run without network must not reach out by default; who names such a tool wants it.
    if enabled is None and not conditions.network:
        chosen = [tool for tool in chosen if not tool.touches_world]
    if tool_server_url is not None:
        # One call for all, so that the server sees every name; it returns as many tools, in the same order.
        served = _tool_server(tool_server_url).served([*chosen, *own])
        chosen, own = served[: len(chosen)], served[len(chosen) :]
    missing = _unusable(own, conditions)
    unusable = missing | _unusable(chosen, conditions)
    if enabled is not None:  # without names, whatever works here is requested
        missing = unusable | _not_offered(enabled, names, known, others)
    if strict and missing:
        raise ConfigError(f"Requested tools are missing: {'; '.join(map(': '.join, missing.items()))}")
    usable = [tool for tool in (*chosen, *own) if tool.name not in unusable]
    return ToolRegistry(usable, missing, settings, conditions.shared, conditions.replayed)


def _as_names(names: Iterable[str] | None) -> Collection[str] | None:
    # A text stays one, because `resolve_toolsets` reports it. As a list, it would be names of one letter each.
    return names if names is None or isinstance(names, str) else [*names]


def _known_tools(
    names: Collection[str], packages: Iterable[Installed], provided: Iterable[Tool], settings: ToolSettings | None
) -> dict[str, Tool]:
    """Return the tools of other packages and the built-in tools of these names, by name."""
    here = builtin_tools(settings, {BUILTIN_NAMES[name] for name in names if name in BUILTIN_NAMES})
    known = {tool.name: tool for tool in (*chain.from_iterable(each.tools for each in packages), *here)}
    return known | {tool.name: tool for tool in provided if tool.name in known}


def _unusable(tools: Iterable[Tool], conditions: RunConditions) -> dict[str, str]:
    reasons = {tool.name: tool.missing_in(replayed=conditions.replayed) for tool in tools}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _not_offered(
    enabled: Collection[str], names: Iterable[str], known: Mapping[str, Tool], packages: Iterable[Installed]
) -> dict[str, str]:
    """Return why requested tools, or toolsets of packages that cannot be used, are not among the known tools."""
    missing = {name: NOT_INSTALLED for name in names if name not in known}
    return missing | {each.toolset: each.problem for each in packages if each.problem and each.toolset in enabled}


def _tool_server(given: str | ToolServer) -> ToolServer:
    if not isinstance(given, str):
        return given
    client = plugins.load_named(SERVERS_GROUP, "http", "the client of tool servers")
    return cast("Callable[[str], ToolServer]", client)(given)


def get_tool_definitions(
    enabled_toolsets: Iterable[str] | None = None,
    disabled_toolsets: Iterable[str] | None = None,
    quiet_mode: bool = False,
    *,
    strict: bool = False,
) -> list[dict[str, JSON]]:
    """Return the OpenAI definitions of the tools that the toolsets select. Their names are logged unless `quiet_mode`.
    Raises `ConfigError`."""
    registry = build_tool_registry(enabled_toolsets, disabled_toolsets, strict=strict)
    if not quiet_mode:
        logger.info("%d tools: %s", len(registry.list_tools()), ", ".join(registry.list_tools()))
        for name, reason in registry.missing.items():
            logger.warning("tool %s is left out: %s", name, reason)
    return registry.definitions()


def unrestricted(
    registry: ToolRegistry | None = None, settings: ToolSettings | None = None, *, replayed: bool = False
) -> ToolRegistry:
    """Return every known tool, including those that cannot be used, for calls from code; models never see this
    registry. Tools of `registry` replace known tools of the same name. All remaining tools get `settings`, by default
    the registry's settings."""
    registry = ToolRegistry(replayed=replayed) if registry is None else registry
    settings = settings or registry.settings
    others = (tool for tool in all_tools(settings) if registry.get(tool.name) is None)
    tools = [*registry.tools(), *others]
    return ToolRegistry(tools, settings=settings, shared=registry.shared, replayed=registry.replayed)


def chosen_tools(
    tools: Iterable[Tool], enabled_toolsets: Iterable[str] | None, disabled_toolsets: Iterable[str] | None
) -> list[Tool]:
    """Return the tools in the enabled toolsets that are not in a disabled toolset. None enables all toolsets, except
    those that must be requested by name.

    Raises `ConfigError` for an unknown toolset.
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
    """Return the toolsets of tools from outside the package."""
    made = {tool.toolset: Toolset("Tools of the environment") for tool in brought}
    for each in others:
        before = made[each.toolset].tools if each.toolset in made else ()
        names = tuple(tool.name for tool in each.tools)
        made[each.toolset] = Toolset(f"Tools of {each.origin}", (*before, *names))
    return made
