"""How calls that touch the world are named, so that a recorded reply can be found again. No I/O.

Invariant: equal calls have equal keys, however their arguments were written down.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from palaestra.core.types import JSON
from palaestra.tools.tool import ToolReply


def call_key(tool: str, what: JSON, after: str = "") -> str:
    """The name of a call: a hash (hex) of the tool, what decides its reply, and the calls of its session before it."""
    text = json.dumps([tool, _plain(what), after], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def with_defaults(arguments: Mapping[str, JSON], parameters: Mapping[str, JSON]) -> dict[str, JSON]:
    """The arguments with the schema's defaults for those left out: `{}` and `{"limit": 5}` may be the same call."""
    defaults = {
        name: each["default"] for name, each in parameters.items() if isinstance(each, dict) and "default" in each
    }
    return {**defaults, **arguments}


def failed(reply: ToolReply) -> bool:
    """Whether a reply says that the call could not be done."""
    return isinstance(reply, Mapping) and bool(reply.get("error"))


def _plain(value: JSON) -> JSON:
    """Whole numbers are the same number however they are written: JSON schemas take 5.0 for an integer."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
