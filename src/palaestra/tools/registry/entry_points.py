"""Tools of other installed packages: what their entry points in the group `palaestra.tools` offer.

    [project.entry-points."palaestra.tools"]
    weather = "weather_package.tools:TOOLS"

The entry point's name is the toolset, its value a tool, a list of tools, or a function without parameters that returns
one of these. Invariant: a package that cannot be loaded breaks nothing else; its toolset is known, with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from palaestra.tools.tool import Tool

GROUP = "palaestra.tools"


@dataclass(frozen=True, slots=True)
class Installed:
    """What one entry point offers. If it could not be loaded, `problem` is set and there are no tools."""

    toolset: str
    origin: str
    tools: tuple[Tool, ...] = ()
    problem: str | None = None


@functools.cache
def installed_tools() -> tuple[Installed, ...]:
    """The offers of installed packages, by name. Looked up once per process."""
    return tuple(
        load(point) for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    )


def load(point: EntryPoint) -> Installed:
    """Load one entry point. Never raises: an error is in `problem`."""
    origin = f"{point.dist.name} ({point.value})" if point.dist is not None else point.value
    try:
        return Installed(point.name, origin, _tools(point.load()))
    except Exception as error:  # another package's code: it may raise anything
        return Installed(point.name, origin, problem=f"{origin} could not be loaded: {type(error).__name__}: {error}")


def _tools(offered: object) -> tuple[Tool, ...]:
    if callable(offered) and not isinstance(offered, (Tool, type)):
        offered = offered()
    found = (offered,) if isinstance(offered, Tool) else tuple(offered) if isinstance(offered, Iterable) else (offered,)
    for each in found:
        if not isinstance(each, Tool):
            raise TypeError(f"{each!r:.80} is not a tool; declare it with @tool")
    return found
