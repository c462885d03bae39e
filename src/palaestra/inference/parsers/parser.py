"""What a parser of tool calls is, and what it finds: text, reasoning, calls and broken calls, in order. No I/O.

For every reader of raw model output. Not for judging arguments against a tool's schema: that is done where the call is
run. Invariant: what was sampled is never repaired. A call is either exactly what its format promises, or a `BrokenCall`
with the reason; nothing in between is ever handed on, and a broken call costs none of its siblings.

The small pieces from which every format writes its calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Protocol, TypeAlias

from palaestra.core.types import JSON
from palaestra.inference.engine import FunctionCall, ToolCallMessage

Tools: TypeAlias = Sequence[Mapping[str, JSON]]
"""Tool schemas in the OpenAI shape. Formats whose values are untyped text read the arguments' types from them."""


class Reason(StrEnum):
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
class Text:
    """What the model says to the reader. `text` is the output from `start` to `end`, exactly."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks, without the tags around it. Calls quoted in it are no calls."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Call:
    """One well-formed call. `arguments_text` is JSON: as the model wrote it where the format writes JSON.

    `start` and `end` bound the call in the output, its tags included.
    """

    id: str
    name: str
    arguments: Mapping[str, JSON]
    arguments_text: str
    start: int
    end: int

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, JSON], call_id: str = "") -> Call:
        """A call to render, not found in any output."""
        return cls(call_id, name, arguments, json.dumps(arguments, ensure_ascii=False), 0, 0)

    def message(self) -> ToolCallMessage:
        """The call as an assistant message carries it."""
        return ToolCallMessage(id=self.id, function=FunctionCall(name=self.name, arguments=self.arguments_text))


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """One call that must not run. `name` is empty where it could not be read; `text` is the call as sampled."""

    id: str
    name: str
    reason: Reason
    detail: str
    text: str
    start: int
    end: int

    def message(self) -> ToolCallMessage:
        """The call for a loop that answers malformed arguments with an error: these are never a JSON object."""
        arguments = self.text
        try:
            if isinstance(json.loads(arguments), dict):
                arguments = json.dumps(arguments)
        except (ValueError, RecursionError):
            pass
        return ToolCallMessage(id=self.id, function=FunctionCall(name=self.name, arguments=arguments))


Piece: TypeAlias = Text | Reasoning | Call | BrokenCall


@dataclass(frozen=True, slots=True)
class Parsed:
    """What one output holds: pieces in order, spans ascending and disjoint.

    Unpacks as the pair that the contract's parsers return: `content, tool_calls = parser.parse(text)`.
    """

    pieces: tuple[Piece, ...]

    @property
    def calls(self) -> list[Call]:
        """The calls that may run."""
        return [piece for piece in self.pieces if isinstance(piece, Call)]

    @property
    def errors(self) -> list[BrokenCall]:
        """The calls that must be answered with an error."""
        return [piece for piece in self.pieces if isinstance(piece, BrokenCall)]

    @property
    def texts(self) -> list[Text]:
        """Text before, between and after the calls. Whitespace alone is no text."""
        return [piece for piece in self.pieces if isinstance(piece, Text)]

    @property
    def reasoning(self) -> str | None:
        """All thinking, one block per paragraph, or None."""
        blocks = (piece.text.strip() for piece in self.pieces if isinstance(piece, Reasoning))
        return "\n\n".join(block for block in blocks if block) or None

    @property
    def content(self) -> str | None:
        """All text joined, or None. Bare of whitespace at its ends, unless nothing but text was there."""
        joined = "".join(text.text for text in self.texts)
        return (joined if len(self.pieces) == len(self.texts) else joined.strip()) or None

    def written(self, text: str) -> str:
        """All but the thinking, with calls as they stand in the output `text`: what is said where nothing is a call."""
        kinds = groupby(self.pieces, lambda piece: isinstance(piece, Reasoning))
        runs = [list(run) for thinks, run in kinds if not thinks]
        joined = "".join(text[run[0].start : run[-1].end] for run in runs)
        return joined.strip() if len(self.pieces) > sum(map(len, runs)) else joined

    @property
    def tool_calls(self) -> list[ToolCallMessage] | None:
        """The calls that may run as messages, or None."""
        return [call.message() for call in self.calls] or None

    @property
    def all_tool_calls(self) -> list[ToolCallMessage] | None:
        """Broken calls too, in order: for a loop that answers each of those with an error."""
        return [piece.message() for piece in self.pieces if isinstance(piece, Call | BrokenCall)] or None

    def _pair(self) -> tuple[str | None, list[ToolCallMessage] | None]:
        return self.content, self.tool_calls

    def __iter__(self) -> Iterator[JSON]:
        return iter(self._pair())

    def __getitem__(self, index: int) -> JSON:
        return self._pair()[index]

    def __len__(self) -> int:
        return 2


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Everything before position `end` was thinking whose beginning lies in the prompt: calls in it must not run."""

    end: int


Event: TypeAlias = TextDelta | ReasoningDelta | Call | BrokenCall | TakenBack
"""What a stream tells as it goes. A call is told when it is complete, never in parts: half a call must not run."""


class StreamParser(Protocol):
    """Reads one output as it is sampled. What `end` returns is what `parse` makes of the whole text."""

    def feed(self, chunk: str) -> list[Event]:
        """What the text so far settles beyond what was told before."""
        ...

    def end(self, cut: bool = False) -> Parsed:
        """No more text comes. `cut` as in `Parser.parse`."""
        ...


class ToolCallParser(Protocol):
    """The contract's parser, which scripts may implement and register."""

    def parse(self, text: str) -> Parsed | tuple[str | None, list[ToolCallMessage] | None]:
        """The content and the calls; None for either that is not there."""
        ...


class Parser(Protocol):
    """One format of tool calls in raw model text."""

    @property
    def name(self) -> str: ...

    def parse(
        self, text: str, *, tools: Tools | None = None, cut: bool = False, thinking: bool | None = None, turn: int = 0
    ) -> Parsed:
        """What `text` holds. Never raises, whatever the model wrote; linear in the length of the text.

        `cut`: the output ended because it ran out of room, so a call without its end is broken. `thinking`:
        whether the prompt ended inside the model's thinking, so that the output begins in it. None where that is not
        known: then an end tag of thinking that was not opened says so, and calls before it are none. `turn` (from 1):
        which of a conversation's replies this is, so that calls without an id get one that no other turn has.
        """
        ...

    def stream(self, *, tools: Tools | None = None, thinking: bool | None = None, turn: int = 0) -> StreamParser:
        """The same, piece by piece."""
        ...

    def render(self, calls: Sequence[Call], text: str = "", *, tools: Tools | None = None) -> str:
        """The output that holds `text` and then `calls`. Raises `Unwritable` when it would not be read back so."""
        ...


class Unwritable(ValueError):
    """The format cannot express these calls: an argument contains the tags around it, or is of an unknown type."""


class Malformed(Exception):
    """Raised inside a grammar where a call breaks its promise; `at` is where. Becomes a `BrokenCall`."""

    def __init__(self, reason: Reason, detail: str, at: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.at = at


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
