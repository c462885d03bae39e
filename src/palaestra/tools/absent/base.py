"""How a tool that is not here is declared. Invariant: it is never shown to a model and never does anything."""

from __future__ import annotations

from collections.abc import Mapping

from palaestra.core.types import JSON
from palaestra.tools.schema import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema

EXTERNAL = frozenset({"web", "vision", "image_gen", "tts", "moa"})
"""Toolsets that need no slot: a tool server may have what is not here."""


def absent(
    name: str,
    toolset: str,
    reason: str,
    description: str,
    parameters: Mapping[str, JSON] | None = None,
    required: tuple[str, ...] = (),
) -> FunctionTool:
    """A tool that says why it is not here, wherever it is asked for."""

    async def refuse(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        raise ToolMistake(f"{name} cannot be used here: {reason}")

    schema = ToolSchema(name, description, parameters or {}, required, external=toolset in EXTERNAL)
    return FunctionTool(schema, refuse, toolset, missing=lambda: reason)


def text(description: str, *options: str) -> dict[str, JSON]:
    """A string parameter, one of `options` where there are any."""
    return {"type": "string", "description": description, **({"enum": list(options)} if options else {})}


def flag(description: str) -> dict[str, JSON]:
    """A switch that is off unless it is set."""
    return {"type": "boolean", "description": description, "default": False}


def number(description: str, **more: JSON) -> dict[str, JSON]:
    """A whole number."""
    return {"type": "integer", "description": description, **more}


def texts(description: str, **more: JSON) -> dict[str, JSON]:
    """A list of strings."""
    return {"type": "array", "items": {"type": "string"}, "description": description, **more}
