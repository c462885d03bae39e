"""From the text that a model wrote to an assistant message: thinking, content, tool calls.

Not for tokens, and not for judging calls. Invariant (T6): nothing is repaired; thinking is taken out before calls are
looked for, unknown names and malformed arguments stay as the model wrote them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.inference.engine import AssistantMessage, FunctionCall, ToolCallMessage
from palaestra.inference.templates.messages import THINK_CLOSE, THINK_OPEN


class Parser(Protocol):
    """The contract's tool-call parser: the content without the calls, and the calls or None.

    Those of `palaestra.inference.parsers` also take `tools=` (the schemas), `cut=` (the reply ran out of room),
    `thinking=` (it begins inside its thinking) and `turn=` (for the ids of calls), and find thinking and broken calls
    too.
    """

    def parse(self, text: str) -> JSON: ...


def parser_named(parser: Parser | str | None) -> Parser | None:
    """The parser itself, or the one of that name. Raises `ConfigError`."""
    if not isinstance(parser, str):
        return parser
    if parser == "none":
        return None
    try:
        found: Parser = importlib.import_module("palaestra.inference.parsers").get_parser(parser)
    except (ImportError, KeyError) as error:
        raise ConfigError(f"There is no tool-call parser '{parser}': {error}.") from None
    return found


class Speech:
    """Reads replies with one parser; None leaves calls in the content."""

    def __init__(self, parser: Parser | str | None) -> None:
        self._parser = parser_named(parser)
        self._accepts = _accepted(_function(self._parser.parse)) if self._parser else frozenset()

    def read(
        self, text: str, *, thinking: bool, cut: bool, tools: Sequence[Mapping[str, JSON]], turn: int
    ) -> AssistantMessage:
        """The message. `thinking`: the reply begins inside its thinking. `turn` goes into the ids of calls."""
        reasoning, content, calls = self._parts(text, thinking, cut, tools, turn)
        return AssistantMessage(
            content=content,
            reasoning_content=reasoning,
            tool_calls=[
                _call(call, ("turn" in self._accepts and _part(call, "id")) or f"call_{turn}_{index}")
                for index, call in enumerate(calls)
            ]
            or None,
        )

    def _parts(
        self, text: str, thinking: bool, cut: bool, tools: Sequence[Mapping[str, JSON]], turn: int
    ) -> tuple[str | None, str | None, Sequence[JSON]]:
        """Thinking, content and calls. Where there are no tools, nothing is a call: it stays in the content."""
        reasoning, said = split_thinking(text, thinking)
        if self._parser is None or not (tools or "thinking" in self._accepts):
            return reasoning, said, ()
        known = {"tools": tools, "cut": cut, "thinking": thinking, "turn": turn}
        options = {name: value for name, value in known.items() if name in self._accepts}
        if "thinking" in options:  # a parser that knows its format's thinking, which need not be in these tags
            parsed = self._parser.parse(text, **options)
            if not tools:
                return parsed.reasoning, parsed.written(text), ()
            return parsed.reasoning, parsed.content, parsed.all_tool_calls or ()
        content, calls = self._parser.parse(said, **options)
        return reasoning, content, calls or ()


def split_thinking(text: str, inside: bool) -> tuple[str | None, str]:
    """The thinking (None where there is none) and the rest. Thinking that was not closed is all there is."""
    begun = text.lstrip()
    if begun.startswith(THINK_OPEN):
        text, inside = begun[len(THINK_OPEN) :], True
    if not inside:
        return None, text
    thought, closed, rest = text.partition(THINK_CLOSE)
    return thought.strip("\n") or None, rest.lstrip("\n") if closed else ""


def _function(method: Callable[..., JSON]) -> Callable[..., JSON]:
    """What all bound methods of one name have in common."""
    return getattr(method, "__func__", method)


@functools.lru_cache(maxsize=64)
def _accepted(parse: Callable[..., JSON]) -> frozenset[str]:
    try:
        parameters = inspect.signature(parse).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return frozenset({"tools", "cut"})
    return frozenset(parameter.name for parameter in parameters) & {"tools", "cut", "thinking", "turn"}


def _call(call: JSON, call_id: str) -> ToolCallMessage:
    """Any parser's call as ours, under this id: that of a parser that knows nothing of turns may be random."""
    function = _part(call, "function") or call
    arguments = _part(function, "arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else msgspec.json.encode(arguments).decode()
    return ToolCallMessage(id=call_id, function=FunctionCall(name=_part(function, "name") or "", arguments=arguments))


def _part(value: JSON, name: str) -> JSON:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
