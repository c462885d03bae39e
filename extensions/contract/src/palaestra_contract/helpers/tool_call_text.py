"""`parse_tool_call` and `extract_tool_call`, with which Atropos environments read a call from a model's text.

They repair less than a parser of `palaestra_tokens.parsers` and read only the first call; a new environment gives
the agent tools instead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from palaestra_slots.core.types import JSON
from palaestra_tokens.parsers import ParsedOutput

ParseResult: TypeAlias = ParsedOutput
"""What `parse` of a parser returns; it unpacks into the content and the calls."""

logger = logging.getLogger(__name__)

ERROR = "-ERROR-"
"""The name that stands for a call that cannot be read."""


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """Return the stripped text between the first pair of a tag, or None. Tags are tried in order; by default only
    `tool_call`."""
    for tag in preferred_tags or ("tool_call",):
        inner, ended, _ = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")
        if ended:
            return inner.strip()
    return None


def parse_tool_call(
    response: str,
    available_tools: Sequence[Mapping[str, JSON]] | None = None,
    preferred_tags: Sequence[str] | None = None,
) -> tuple[str, dict[str, JSON], bool]:
    """Return the name and the arguments of a reply's first call, and whether there is an error.

    Single quotes count as double quotes. If there is no call, or its JSON is invalid, the answer is
    `("-ERROR-", {}, True)`; for a tool that `available_tools` lacks, the arguments are kept.
    """
    written = extract_tool_call(response, preferred_tags)
    if not written:
        logger.debug("no tool call in the reply %r", response[:200])
        return ERROR, {}, True
    try:
        call = json.loads(written.replace("'", '"'), strict=False)
        name, arguments = call.get("name", ""), call.get("arguments", {})
    except (ValueError, AttributeError, RecursionError) as error:
        logger.debug("the tool call %r cannot be read: %s", written[:200], error)
        return ERROR, {}, True
    if available_tools and (not name or name not in set(_offered_names(available_tools))):
        return ERROR, arguments, True
    return name, arguments, False


def _offered_names(tools: Sequence[Mapping[str, JSON]]) -> Iterator[str]:
    for tool in tools:
        if isinstance(tool, dict):
            if "name" in tool:
                yield tool["name"]
            elif "name" in tool.get("function", {}):
                yield tool["function"]["name"]
