"""The small pieces from which every format writes its calls."""

from __future__ import annotations

import json

from palaestra.core.types import JSON
from palaestra.inference.parsers.base import Call


def named_object(call: Call, key: str = "arguments") -> str:
    """`{"name": …, "arguments": …}`, the arguments as they were written."""
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {call.arguments_text}}}'


def bare(value: JSON) -> str:
    """A value as text: strings as they are, everything else as JSON, in which half surrogate pairs stay escaped."""
    if isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
