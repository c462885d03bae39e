"""Calls and results as text in a prompt: `ToolCall`, `ToolResult`, and the `<tool_call>` form they are read from.

Not for model servers that return structured calls, and not a parser for every model family: this is the one tagged form
that environments written to the contract use directly.

Invariant (T6): a call is never silently dropped or mended. What cannot be read comes back as a call whose `error` says
why, and whoever runs calls answers it with that error. Ids derive from content and place, never from chance (D2).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from palaestra.core.types import JSON

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(slots=True)
class ToolCall:
    """One call that a model asked for. `error` is set, and nothing may run, when its text could not be understood.

    Without a `uniq_id` the call gets one that derives from its content.
    """

    name: str
    arguments: dict[str, JSON]
    raw_text: str = ""
    uniq_id: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        self.uniq_id = self.uniq_id or _derived_id(self.name, self.arguments, self.raw_text)

    @classmethod
    def parse_from_text(cls, text: str, *, cut: bool = False) -> list[ToolCall]:
        """All `<tool_call>{"name": …, "arguments": {…}}</tool_call>` blocks, in order; thinking is left out.

        A last block without its closing tag counts when its JSON is complete, since many servers strip the tag as a
        stop string. With `cut` (the reply ended at the length limit) it is malformed instead.
        """
        blocks = _THINKING.sub("", text).split(_OPEN)[1:]
        return [cls._parse(block, place, cut) for place, block in enumerate(blocks)]

    @classmethod
    def _parse(cls, block: str, place: int, cut: bool) -> ToolCall:
        body, closed, _ = block.partition(_CLOSE)
        raw = _OPEN + body + closed
        call = cls(name="", arguments={}, raw_text=raw, uniq_id=_derived_id(place, raw))
        if not closed and cut:
            call.error = "Malformed tool call: the reply was cut off before </tool_call>."
            return call
        try:
            call.name, call.arguments = _name_and_arguments(json.loads(body))
        except (ValueError, RecursionError) as error:
            call.error = f"Malformed tool call: {error}"
        return call

    @staticmethod
    def has_tool_call(text: str) -> bool:
        """Whether the text asks for a call outside its thinking, well-formed or not."""
        return _OPEN in _THINKING.sub("", text)


@dataclass(slots=True)
class ToolResult:
    """What came of a call. `metadata` is what the tool told besides its output, such as the exit code."""

    success: bool
    output: str = ""
    error: str = ""
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    uniq_id: str | None = None

    def to_dict(self) -> dict[str, JSON]:
        """All fields as a plain dict."""
        return {
            "success": self.success,
            "output": self.output,
            "error": self.error,
            "metadata": dict(self.metadata),
            "uniq_id": self.uniq_id,
        }

    def to_xml(self) -> str:
        """The `<tool_response>` block that goes into the next prompt; empty fields are left out."""
        shown: dict[str, JSON] = {"success": self.success, "output": self.output}
        optional: dict[str, JSON] = {"uniq_id": self.uniq_id, "error": self.error, "metadata": dict(self.metadata)}
        shown.update((key, value) for key, value in optional.items() if value)
        return f"<tool_response>{json.dumps(shown, ensure_ascii=False)}</tool_response>"


def result_of(reply: Mapping[str, JSON] | str, uniq_id: str | None = None) -> ToolResult:
    """A tool's reply in the contract's shape: its main text as output, all else as metadata."""
    if isinstance(reply, str):
        return ToolResult(True, reply, uniq_id=uniq_id)
    rest = dict(reply)
    error = str(rest.pop("error", None) or "")
    success = not error and rest.get("exit_code", 0) == 0
    key = next((key for key in ("output", "content", "diff") if isinstance(rest.get(key), str)), None)
    output = rest.pop(key) if key is not None else json.dumps(rest, ensure_ascii=False) if rest else ""
    return ToolResult(success, output, error, rest, uniq_id)


def reply_of(result: ToolResult) -> dict[str, JSON] | str:
    """A result in the contract's shape as a tool's reply: the reverse of `result_of` for tools that return results."""
    if result.success and not result.error and not result.metadata:
        return result.output
    error = result.error or (None if result.success else "The tool reported a failure without a reason.")
    return {**result.metadata, "output": result.output, "error": error}


def _name_and_arguments(value: JSON) -> tuple[str, dict[str, JSON]]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('expected a JSON object with "name" and "arguments".')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f'"arguments" of {value["name"]} must be a JSON object.')
    return value["name"], arguments


def _derived_id(*parts: JSON) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return "call_" + hashlib.sha256(text.encode()).hexdigest()[:8]
