"""The text that a search finds: what was said in a conversation, without the JSON in which it is recorded.

Searched are the texts of messages, their reasoning, the names and argument values of calls, and the results, also those
of sub-agents. Of arguments and results that are JSON, the strings and numbers are searched, because their keys are the
same in every rollout. A text with a quotation mark is also searched in the JSON as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from palaestra.rollouts.export.chat_messages import ChatMessage, chat_message, part_text
from palaestra_slots.core.io.durable_files import UNREADABLE
from palaestra_slots.core.types import JSON
from palaestra_view.imports.source import objects_of

_AROUND_CHARS = 80
_T = TypeVar("_T")
_TextT = TypeVar("_TextT", str, bytes)


class _Said(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"[]")
    subagents: msgspec.Raw = msgspec.Raw(b"[]")


class _Line(msgspec.Struct):
    trajectory: _Said


class Wanted:
    """A text to search for. Case does not matter if it is ASCII."""

    def __init__(self, text: str) -> None:
        self._folds = text.isascii()
        self._text = self._folded(text)
        self._as_written = '"' in text
        self._encoded = [self._folded(each) for each in _spellings(text)]

    def passage(self, line: bytes) -> str | None:
        """Return the passage around the text in a rollout's line of the journal; None if it does not occur."""
        if not self._may_be_in(line):  # most lines are not decoded
            return None
        try:
            said = _decode_as(line, _Line).trajectory
            if not self._may_be_in(bytes(said.messages)) and not self._may_be_in(bytes(said.subagents)):
                return None
            messages, subagents = _decode_as(said.messages, list), _decode_as(said.subagents, list)
        except UNREADABLE:
            return None
        for text in _texts(messages, subagents, self._as_written):
            at = self._folded(text).find(self._text)
            if at >= 0:
                return " ".join(text[max(0, at - _AROUND_CHARS) : at + len(self._text) + _AROUND_CHARS].split())
        return None

    def _may_be_in(self, data: bytes) -> bool:
        folded = data.lower() if self._folds else data
        return any(each in folded for each in self._encoded)

    def _folded(self, text: _TextT) -> _TextT:
        return text.lower() if self._folds else text


def _decode_as(data: bytes | msgspec.Raw, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError:  # such bytes are shown as U+FFFD
        return msgspec.json.decode(bytes(data).decode("utf-8", "replace"), type=kind)


def _spellings(text: str) -> list[bytes]:
    """Return how a text may stand in a journal: as JSON, or as JSON in JSON, as arguments and many results are, with or
    without escapes for characters that are not ASCII."""
    once = [json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)]
    twice = [json.dumps(each, ensure_ascii=False)[1:-1] for each in once]
    return [each.encode("utf-8", "replace") for each in dict.fromkeys((*once, *twice))]


def _texts(messages: Sequence[JSON], subagents: Sequence[JSON], as_written: bool) -> Iterator[str]:
    """Yield the texts of a conversation and of its sub-agents. With `as_written`, JSON is also yielded as it is."""
    for message in messages:
        if isinstance(message, Mapping):
            yield from _texts_of(chat_message(dict(message)), as_written)
    for subagent in subagents:
        if isinstance(subagent, Mapping):
            said, below = (objects_of(subagent.get(name)) for name in ("messages", "subagents"))
            yield from _texts(said, below, as_written)


def _texts_of(message: ChatMessage, as_written: bool) -> Iterator[str]:
    yield message.reasoning
    for part in [message.content] if isinstance(message.content, str) else message.content:
        text = part_text(part)
        if text is None:
            yield from _leaf_values({**part, "type": None} if isinstance(part, dict) else part)
        elif message.role == "tool":
            yield from _in_json(text, as_written)
        else:
            yield text
    for call in message.calls:
        yield call.name
        yield from _in_json(call.arguments, as_written)


def _in_json(text: str, as_written: bool) -> Iterator[str]:
    """Yield the values of a JSON object or list, or the text itself if it is neither."""
    value: JSON = None
    if text.lstrip()[:1] in ("{", "["):
        try:
            value = msgspec.json.decode(text)
        except (*UNREADABLE, UnicodeError):
            value = None
    if as_written or not isinstance(value, dict | list):
        yield text
    yield from _leaf_values(value)


def _leaf_values(value: JSON) -> Iterator[str]:
    """Yield the strings and numbers in a value, in order. Images, which are data addresses, are left out."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            if not one.startswith("data:"):
                yield one
        elif isinstance(one, Mapping):
            waiting += reversed(list(one.values()))
        elif isinstance(one, list):
            waiting += reversed(one)
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield str(one)
