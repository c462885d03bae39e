"""The output of a tool-call parser: text, reasoning, calls and broken calls, in order. No I/O.

The code that runs a call checks its arguments against the tool's schema. Invariant: sampled text is never repaired. A
call either follows its format or is a `BrokenCall` with the reason, and a broken call does not affect its siblings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Protocol, TypeAlias, runtime_checkable

from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import FunctionCall, ToolCallMessage

Tools: TypeAlias = Sequence[Mapping[str, JSON]]
"""Tool schemas in the OpenAI shape. Formats with untyped values read the arguments' types from them."""


class BrokenReason(StrEnum):
    """Why a call is broken."""

    MALFORMED_JSON = "malformed_json"
    DUPLICATE_KEY = "duplicate_key"
    NOT_FINITE = "not_finite"
    TOO_DEEP = "too_deep"
    NO_NAME = "no_name"
    NO_ARGUMENTS = "no_arguments"
    NOT_AN_OBJECT = "not_an_object"
    MALFORMED_MARKUP = "malformed_markup"
    UNCLOSED = "unclosed"


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text outside calls and thinking: exactly the output from `start` to `end`."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A piece of thinking. `text` excludes the tags, which `start` and `end` include. Calls inside it are ignored."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A well-formed call. `arguments_text` is the arguments as JSON, exactly as sampled if the format writes JSON.
    `start` and `end` delimit the call, with its tags, in the output."""

    id: str
    name: str
    arguments: Mapping[str, JSON]
    arguments_text: str
    start: int
    end: int

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, JSON], call_id: str = "") -> ParsedCall:
        """Return a call to render, which has no position in an output."""
        return cls(call_id, name, arguments, json.dumps(arguments, ensure_ascii=False), 0, 0)

    def message(self) -> ToolCallMessage:
        return ToolCallMessage(id=self.id, function=FunctionCall(name=self.name, arguments=self.arguments_text))


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A call that must not run. `name` is empty if it could not be read; `text` is the call as sampled."""

    id: str
    name: str
    reason: BrokenReason
    detail: str
    text: str
    start: int
    end: int

    def message(self) -> ToolCallMessage:
        """Return the call for a loop that answers malformed arguments with an error. The arguments of the returned call
        are never a JSON object."""
        arguments = self.text
        try:
            if isinstance(json.loads(arguments), dict):
                arguments = json.dumps(arguments)
        except (ValueError, RecursionError):
            pass
        return ToolCallMessage(id=self.id, function=FunctionCall(name=self.name, arguments=arguments))


OutputPiece: TypeAlias = TextPiece | ReasoningPiece | ParsedCall | BrokenCall


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The pieces of one output: in order, with ascending and disjoint spans. It also unpacks into a pair, as existing
    scripts expect: `content, tool_calls = parser.parse(text)`."""

    pieces: tuple[OutputPiece, ...]

    @property
    def calls(self) -> list[ParsedCall]:
        return [piece for piece in self.pieces if isinstance(piece, ParsedCall)]

    @property
    def errors(self) -> list[BrokenCall]:
        """The calls to answer with an error."""
        return [piece for piece in self.pieces if isinstance(piece, BrokenCall)]

    @property
    def texts(self) -> list[TextPiece]:
        """Text before, between and after the calls. White space alone is not text."""
        return [piece for piece in self.pieces if isinstance(piece, TextPiece)]

    @property
    def reasoning(self) -> str | None:
        """All thinking, one block per paragraph, or None."""
        blocks = (piece.text.strip() for piece in self.pieces if isinstance(piece, ReasoningPiece))
        return "\n\n".join(block for block in blocks if block) or None

    @property
    def content(self) -> str | None:
        """All text joined, or None. White space at its ends is removed unless the output is only text."""
        joined = "".join(text.text for text in self.texts)
        return (joined if len(self.pieces) == len(self.texts) else joined.strip()) or None

    def written(self, text: str) -> str:
        """Return the output `text` with its calls but without its thinking: the content if no call is to be run."""
        kinds = groupby(self.pieces, lambda piece: isinstance(piece, ReasoningPiece))
        runs = [list(run) for thinks, run in kinds if not thinks]
        joined = "".join(text[run[0].start : run[-1].end] for run in runs)
        return joined.strip() if len(self.pieces) > sum(map(len, runs)) else joined

    @property
    def tool_calls(self) -> list[ToolCallMessage] | None:
        return [call.message() for call in self.calls] or None

    @property
    def all_tool_calls(self) -> list[ToolCallMessage] | None:
        """All calls in order, including broken ones, for a loop that answers each broken call with an error."""
        return [piece.message() for piece in self.pieces if isinstance(piece, ParsedCall | BrokenCall)] or None

    def _pair(self) -> tuple[str | None, list[ToolCallMessage] | None]:
        return self.content, self.tool_calls

    def __iter__(self) -> Iterator[JSON]:
        return iter(self._pair())

    def __getitem__(self, index: int) -> JSON:
        return self._pair()[index]

    def __len__(self) -> int:
        return 2


@runtime_checkable
class ToolCallParser(Protocol):
    """The interface of a parser. Scripts can implement it and register their own parser."""

    def parse(self, text: str) -> ParsedOutput | tuple[str | None, list[ToolCallMessage] | None]: ...


class Unwritable(ValueError):
    """The format cannot express a call: an argument contains the tags that enclose it, or its type is unknown."""


class Malformed(Exception):
    """Raised inside a grammar for a call that breaks its format at position `at`. Becomes a `BrokenCall`."""

    def __init__(self, reason: BrokenReason, detail: str, at: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.at = at


def named_object(call: ParsedCall, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {call.arguments_text}}}'


def bare(value: JSON) -> str:
    """Return a string as it is, and any other value as JSON. Lone surrogates stay escaped in JSON."""
    if isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
