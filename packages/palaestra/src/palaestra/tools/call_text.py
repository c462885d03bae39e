"""Calls and results as text in a prompt: `ToolCall`, `ToolResult`, and the `<tool_call>` format.

`palaestra_tokens.parsers` reads the formats of model families. Invariant (T6): a call is never silently dropped or
repaired; a malformed call has an `error`, which is its answer. Ids are derived from content and position, not random
(D2).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pydantic_core import to_jsonable_python

from palaestra_slots.core.types import JSON

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BEGINS = re.compile("<tool_call>|<think>")
_ENDS_OR_BEGINS = re.compile("</?tool_call>")
_JSON = json.JSONDecoder()
_LONGEST_WORD = 16
"""An upper bound, in characters, for the length of a JSON escape or literal. If a text is cut inside one, the decoder
fails at most this far before the end."""


@dataclass(slots=True)
class ToolCall:
    """One call that a model made. If its text is malformed, `error` is set and nothing may run.

    If `uniq_id` is empty, an id is derived from the call's content.
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
        """Return all `<tool_call>{"name": …, "arguments": {…}}</tool_call>` blocks outside thinking, in order. A tag
        inside a JSON string belongs to the string.

        A last block without its closing tag counts if its JSON is complete, since many servers strip the tag as a stop
        string. With `cut` (the reply ended at the length limit), such a block is malformed.
        """
        return [cls._parse(body, closed, place, cut) for place, (body, closed) in enumerate(_blocks(text))]

    @classmethod
    def _parse(cls, body: str, closed: str, place: int, cut: bool) -> ToolCall:
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
        """Return whether the text has a call outside its thinking, well-formed or not."""
        return next(_blocks(text), None) is not None


@dataclass(slots=True)
class ToolResult:
    """The result of a call. `metadata` holds the reply's other keys, such as the exit code."""

    success: bool
    output: str = ""
    error: str = ""
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    uniq_id: str | None = None

    @property
    def exit_code(self) -> int:
        """The command's exit status; without a command, 0 for a success and 1 for a failure."""
        return int(self.metadata.get("exit_code", 0 if self.success else 1))

    def to_dict(self) -> dict[str, JSON]:
        """Return all fields as a plain dict."""
        return {
            "success": self.success,
            "output": self.output,
            "error": self.error,
            "metadata": dict(self.metadata),
            "uniq_id": self.uniq_id,
        }

    def to_xml(self) -> str:
        """Return the `<tool_response>` block that goes into the next prompt. All fields but `success` and `output` are
        left out if empty, and so is metadata that the output repeats (see `result_of`), for which the model would pay
        twice."""
        shown: dict[str, JSON] = {"success": self.success, "output": self.output}
        metadata = {} if self.output == _fields_json(self.metadata) else dict(self.metadata)
        optional: dict[str, JSON] = {"uniq_id": self.uniq_id, "error": self.error, "metadata": metadata}
        shown.update((key, value) for key, value in optional.items() if value)
        return f"<tool_response>{json.dumps(shown, ensure_ascii=False)}</tool_response>"


def result_of(reply: Mapping[str, JSON] | str, uniq_id: str | None = None) -> ToolResult:
    """Return a tool's reply as a `ToolResult`: its main text as output, its error as error, and all other keys as
    metadata. Without a main text, the output is the other keys as JSON.

    If a command exited with a status N other than 0 and the reply has no error, the error is `Exit code: N`.
    """
    if isinstance(reply, str):
        return ToolResult(True, reply, uniq_id=uniq_id)
    rest = dict(reply)
    error = str(rest.pop("error", None) or "")
    exit_code = rest.get("exit_code", 0)
    if not error and exit_code != 0:
        error = f"Exit code: {exit_code}"
    success = not error
    key = next((key for key in ("output", "content", "diff") if isinstance(rest.get(key), str)), None)
    output = rest.pop(key) if key is not None else _fields_json(rest) if rest else ""
    return ToolResult(success, output, error, rest, uniq_id)


def _fields_json(fields: Mapping[str, JSON]) -> str:
    return json.dumps(fields, ensure_ascii=False, default=str)


def reply_of(result: ToolResult) -> dict[str, JSON] | str:
    """Return a `ToolResult` as a tool's reply: the reverse of `result_of`. A successful result that has only an output
    becomes text.

    Sets, dates and the like become JSON values. Raises `ValueError` for a value that JSON cannot represent.
    """
    if result.success and not result.error and not result.metadata and isinstance(result.output, str):
        return result.output
    error = result.error or (None if result.success else "The tool reported a failure without a reason.")
    told: dict[str, JSON] = plain({**result.metadata, "output": result.output, "error": error})
    return told


def shortened(text: str, most: int) -> str:
    """Return the first `most` characters of a text. If the text is longer, the number of omitted characters follows."""
    return text if len(text) <= most else f"{text[:most]}… [{len(text) - most} more characters]"


def plain(value: object) -> JSON:
    """Return the value as JSON. Raises `ValueError` if JSON cannot represent it, for example if it is an integer of
    more than 4300 digits."""
    told = to_jsonable_python(value)
    json.dumps(told)
    return told


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the content of each block with its closing tag, or with an empty string if the tag is missing."""
    at = 0
    while (mark := _BEGINS.search(text, at)) is not None:
        if mark[0] != _OPEN:
            end = text.find("</think>", mark.end())
            at = len(text) if end < 0 else end
            continue
        found = _ENDS_OR_BEGINS.search(text, _json_end(text, mark.end()))
        end = len(text) if found is None else found.start()
        closed = _CLOSE if found is not None and found[0] == _CLOSE else ""
        yield text[mark.end() : end], closed
        at = end + len(closed)


def _json_end(text: str, start: int) -> int:
    """Return the end of the JSON that begins at `start`, or `start` if there is none. Reads little beyond that end."""
    size = 256
    while True:
        # A window, because a JSON error counts the lines before it: many broken blocks would take quadratic time.
        window = text[start : start + size]
        begin = len(window) - len(window.lstrip())
        try:
            return start + _JSON.raw_decode(window, begin)[1]
        except json.JSONDecodeError as error:
            breaks_off = error.pos > size - _LONGEST_WORD or error.msg.startswith("Unterminated string")
            if not breaks_off or start + size >= len(text):
                return start
        except (ValueError, RecursionError):
            return start
        size *= 4


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
