"""What a function's docstring tells a model: the text before its sections, and the lines of its `Args:`.

The form is Google's: `name: text` or `name (type): text`, with further lines indented deeper. Other sections are for
people and are left out.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from palaestra.core.config import nearest
from palaestra.core.errors import ConfigError

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?):\s*$")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Documented:
    """What the tool does, and what its parameters mean."""

    summary: str
    parameters: dict[str, str] = field(default_factory=dict)


def documented(called: str, docstring: str | None, parameters: Collection[str]) -> Documented:
    """Read a docstring. Raises `ConfigError` when there is none, or when it describes a parameter that is not there."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    starts = [number for number, line in enumerate(lines) if _SECTION.match(line)]
    summary = _joined(lines[: starts[0]] if starts else lines)
    if not summary:
        raise ConfigError(f"tool {called} has no docstring: its first lines are what a model reads")
    told: dict[str, str] = {}
    for start, end in pairwise([*starts, len(lines)]):
        if lines[start].startswith(("Args", "Arguments", "Parameters")):
            told |= _entries(lines[start + 1 : end])
    for name in told:
        if name not in parameters:
            raise ConfigError(
                f"tool {called}: its docstring describes {name!r}, which is not a parameter.{nearest(name, parameters)}"
            )
    return Documented(summary, told)


def _entries(lines: list[str]) -> dict[str, str]:
    body = inspect.cleandoc("\n" + "\n".join(lines)).splitlines()
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in body:
        entry = _ENTRY.match(line)
        if entry is not None:
            current = found.setdefault(entry[1], [])
            current.append(entry[2])
        elif line.strip():
            current.append(line.strip())
    return {name: " ".join(each).strip() for name, each in found.items()}


def _joined(lines: list[str]) -> str:
    """Paragraphs as they are, the lines of each joined."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines).strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
