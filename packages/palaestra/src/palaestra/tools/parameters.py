"""JSON schemas of parameters. Models see the keys in order: the keys of `first` come before the description, those of
`more` after it."""

from __future__ import annotations

from collections.abc import Mapping

from palaestra_slots.core.types import JSON


def text(description: str, first: Mapping[str, JSON] | None = None, **more: JSON) -> dict[str, JSON]:
    """Return the schema of a string."""
    return {"type": "string", **(first or {}), "description": description, **more}


def choice(description: str, options: list[str], **more: JSON) -> dict[str, JSON]:
    """Return the schema of a string that must be one of `options`."""
    return text(description, {"enum": options}, **more)


def flag(description: str) -> dict[str, JSON]:
    """Return the schema of a boolean that is false by default."""
    return {"type": "boolean", "description": description, "default": False}


def integer(description: str, first: Mapping[str, JSON] | None = None, **more: JSON) -> dict[str, JSON]:
    """Return the schema of an integer."""
    return {"type": "integer", **(first or {}), "description": description, **more}
