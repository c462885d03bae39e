"""Draws toolsets at random: the named distributions, as data, and a function for one draw.

The project's interface contract fixes the names and the numbers. A number is the chance, in percent, that a draw
includes a toolset. The chances are independent of each other. Invariant: a draw depends only on the distribution and
the generator. A run uses a separate generator for each group, so the rollouts of a group share one draw, and a resumed
run makes the same draws.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution. `chances` maps toolsets to their chances in percent, in the order in which they are drawn."""

    description: str
    chances: Mapping[str, int]


# fmt: off
DISTRIBUTIONS: Mapping[str, Distribution] = {
    "default": Distribution(
        "Everything, always",
        {"web": 100, "vision": 100, "image_gen": 100, "terminal": 100, "file": 100, "moa": 100, "browser": 100}),
    "image_gen": Distribution(
        "Mostly making and looking at images", {"image_gen": 90, "vision": 90, "web": 55, "terminal": 45, "moa": 10}),
    "research": Distribution(
        "Reading the web, with images and second opinions",
        {"web": 90, "browser": 70, "vision": 50, "moa": 40, "terminal": 10}),
    "science": Distribution(
        "Web, terminal and files, often with a browser",
        {"web": 94, "terminal": 94, "file": 94, "vision": 65, "browser": 50, "image_gen": 15, "moa": 10}),
    "development": Distribution(
        "Terminal and files, now and then the web", {"terminal": 80, "file": 80, "moa": 60, "web": 30, "vision": 10}),
    "safe": Distribution(
        "No terminal and no files", {"web": 80, "browser": 70, "vision": 60, "image_gen": 60, "moa": 50}),
    "balanced": Distribution(
        "Each toolset in half of the draws",
        {"web": 50, "vision": 50, "image_gen": 50, "terminal": 50, "file": 50, "moa": 50, "browser": 50}),
    "minimal": Distribution("The web alone", {"web": 100}),
    "terminal_only": Distribution("Terminal and files", {"terminal": 100, "file": 100}),
    "terminal_web": Distribution("Terminal, files and the web", {"terminal": 100, "file": 100, "web": 100}),
    "creative": Distribution("Images, now and then the web", {"image_gen": 90, "vision": 90, "web": 30}),
    "reasoning": Distribution("Second opinions, little else", {"moa": 90, "web": 30, "terminal": 20}),
    "browser_use": Distribution("A browser, mostly with search and images", {"browser": 100, "web": 80, "vision": 70}),
    "browser_only": Distribution("A browser alone", {"browser": 100}),
    "browser_tasks": Distribution(
        "A browser, now and then images or a terminal", {"browser": 97, "vision": 12, "terminal": 15}),
    "terminal_tasks": Distribution(
        "Terminal, files and web, often with a browser",
        {"terminal": 97, "file": 97, "web": 97, "browser": 75, "vision": 50, "image_gen": 10}),
    "mixed_tasks": Distribution(
        "Browser, terminal and files, now and then more",
        {"browser": 92, "terminal": 92, "file": 92, "web": 35, "vision": 15, "image_gen": 15}),
}
# fmt: on


def find_distribution(name: str) -> Distribution:
    """Return the distribution with this name. Raises `ConfigError`, with the nearest name, for an unknown name."""
    found = DISTRIBUTIONS.get(name)
    if found is None:
        raise ConfigError(
            f"Unknown distribution '{name}'.{nearest(name, DISTRIBUTIONS)} "
            f"Available distributions: {', '.join(sorted(DISTRIBUTIONS))}"
        )
    return found


def sample_toolsets_from_distribution(distribution_name: str, rng: random.Random | None = None) -> list[str]:
    """Return the toolsets of one draw. If no toolset is drawn, return the likeliest toolset (the first of several that
    are equally likely).

    If `rng` is None, the draw cannot be repeated. Raises `ConfigError` for an unknown name.
    """
    chances = find_distribution(distribution_name).chances
    rng = rng if rng is not None else random.Random()
    drawn = [toolset for toolset, chance in chances.items() if rng.random() * 100 < chance]
    return drawn or [max(chances, key=lambda toolset: chances[toolset])]


def get_distribution(name: str) -> dict[str, JSON] | None:
    """Return `{"description", "toolsets": {name: percent}}` as a copy, or None for an unknown name."""
    return list_distributions().get(name)


def list_distributions() -> dict[str, dict[str, JSON]]:
    """Return all distributions by name, each as `get_distribution` returns it."""
    return {
        name: {"description": each.description, "toolsets": dict(each.chances)} for name, each in DISTRIBUTIONS.items()
    }


def validate_distribution(distribution_name: str) -> bool:
    """Return whether there is a distribution with this name."""
    return distribution_name in DISTRIBUTIONS


def print_distribution_info(distribution_name: str) -> None:
    """Print a distribution's toolsets, likeliest first. Raises `ConfigError` for an unknown name."""
    found = find_distribution(distribution_name)
    sys.stdout.write(f"{distribution_name}: {found.description}\n")
    for toolset, chance in sorted(found.chances.items(), key=lambda entry: -entry[1]):
        sys.stdout.write(f"  {chance:3}%  {toolset}\n")
