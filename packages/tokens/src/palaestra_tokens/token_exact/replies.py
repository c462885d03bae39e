"""Samples one reply with as many requests as needed, and reads its text into an assistant message.

Invariants: the tokens of an aborted request are appended to the prompt of the next one, so nothing is sampled twice or
lost; every answer is checked; nothing is repaired (T6): unknown names and malformed arguments stay as sampled.
"""

from __future__ import annotations

import functools
import inspect
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from palaestra_slots.core.clock import Clock
from palaestra_slots.core.errors import ConfigError, EngineReplyError, EngineUnavailable
from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import AssistantMessage, FunctionCall, Sampled, TokenEngine, ToolCallMessage
from palaestra_tokens.ledger import HIGHEST_LOGPROB, Piece, Prompt
from palaestra_tokens.parsers import ToolCallParser, get_parser
from palaestra_tokens.templates.jinja import THINK_CLOSE, THINK_OPEN

MAX_RESUMES = 200
"""The number of aborted answers to one request after which the engine counts as unavailable."""

LOWEST_LOGPROB = -3.4e38
"""The lowest log-probability that the ledger accepts; in 32 bits, a lower one would become minus infinity."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0


async def sample(
    engine: TokenEngine, prompt: Prompt, settings: Mapping[str, JSON], vocabulary: int | None, clock: Clock
) -> list[Piece]:
    """Sample the reply to `prompt[T]`: one piece, or several if requests were aborted or the weights changed meanwhile.
    All pieces but the last extend the prompt. `vocabulary` is the tokenizer's number of ids, if known. Raises
    `EngineReplyError` for an impossible answer and `EngineUnavailable` if the engine keeps aborting."""
    pieces: list[Piece] = []
    left, empty = settings.get("max_tokens"), 0
    for _ in range(MAX_RESUMES):
        sent = prompt.checksum
        sampled = await engine.generate(prompt, settings if left is None else {**settings, "max_tokens": left})
        if problem := _problem(sampled, left, vocabulary):
            raise EngineReplyError(f"Engine '{engine.name}' answered a prompt of {len(prompt)} tokens with {problem}.")
        *before, sampled = sampled.by_version()
        for part in before:
            pieces.append(Piece(part, sent))
            prompt.grow(array("i", part.ids))
            sent, left = prompt.checksum, None if left is None else left - len(part.ids)
        piece = Piece(sampled, sent)
        if sampled.finish_reason != "abort":
            return [*pieces, piece]
        if not sampled.ids:
            empty += 1
            # While it loads weights, an engine may abort each request immediately:
            # without a wait, all resumes would soon be used.
            await clock.sleep(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0**empty))
            continue
        ids, empty = array("i", sampled.ids), 0
        prompt.grow(ids)
        pieces.append(piece)
        # The request was aborted exactly at its limit, so there is nothing left to resume.
        if left is not None and (left := left - len(ids)) <= 0:
            return [*pieces[:-1], replace(piece, sampled=replace(sampled, finish_reason="length"))]
    raise EngineUnavailable(
        f"Engine '{engine.name}' aborted one request {MAX_RESUMES} times, at {len(prompt)} tokens. Check its log."
    )


def _problem(sampled: Sampled, most: int | None, vocabulary: int | None) -> str:
    """Return why the answer cannot have been sampled, or an empty string if it can."""
    ids, logprobs = sampled.ids, sampled.logprobs
    if len(ids) != len(logprobs):
        return f"{len(ids)} token ids with {len(logprobs)} log-probabilities"
    if sampled.finish_reason not in ("stop", "length", "abort"):
        return f"finish reason '{sampled.finish_reason}'"
    if most is not None and len(ids) > most:
        return f"{len(ids)} tokens, more than the {most} requested"
    if ids and (min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary)):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        return f"token id {wrong}, which the tokenizer ({vocabulary} ids) does not have"
    # The sum is NaN if any value is; `min` and `max` may miss it.
    known = not ids or (math.isfinite(sum(logprobs)) and LOWEST_LOGPROB <= min(logprobs) <= max(logprobs))
    if not known or (ids and max(logprobs) > HIGHEST_LOGPROB):
        return "an impossible log-probability"
    return ""


class ReplyReader:
    """Reads replies with one parser, given as an object or by name. Without a parser (None or `none`), calls stay in
    the content.

    Parsers of existing scripts take only the text. Palaestra's parsers also take `tools=`, `cut=`, `thinking=` and
    `turn=`, and find thinking and broken calls. Raises `ConfigError` for an unknown name.
    """

    def __init__(self, parser: ToolCallParser | str | None) -> None:
        if isinstance(parser, str):
            try:
                parser = None if parser == "none" else get_parser(parser)
            except (ImportError, KeyError) as error:
                raise ConfigError(f"Tool-call parser '{parser}' cannot be loaded: {error}.") from None
        self._parser = parser
        self._accepts = frozenset[str]()
        if parser is not None:
            # The function and not the bound method, so that the cache keeps no parser alive.
            self._accepts = _accepted(getattr(parser.parse, "__func__", parser.parse))

    def read(
        self, text: str, *, thinking: bool, cut: bool, tools: Sequence[Mapping[str, JSON]], turn: int
    ) -> AssistantMessage:
        """Return the message. If `thinking` is true, the reply begins inside its thinking. `turn` is part of the ids of
        calls."""
        reasoning, rest = split_thinking(text, thinking)
        content: str | None = rest
        calls: Sequence[JSON] = ()  # without tools, calls stay in the content
        if self._parser is not None and (tools or "thinking" in self._accepts):
            known = {"tools": tools, "cut": cut, "thinking": thinking, "turn": turn}
            options = {name: value for name, value in known.items() if name in self._accepts}
            if "thinking" in options:  # a parser that knows its format's thinking, which may have other tags
                parsed: JSON = self._parser.parse(text, **options)
                # Without tools, a call is part of the text, as the model wrote it.
                reasoning, content = parsed.reasoning, parsed.content if tools else parsed.written(text)
                calls = (parsed.all_tool_calls or ()) if tools else ()
            else:
                content, found = self._parser.parse(rest, **options)
                calls = found or ()
        return AssistantMessage(
            content=content,
            reasoning_content=reasoning,
            tool_calls=[
                _own_call(call, ("turn" in self._accepts and _field(call, "id")) or f"call_{turn}_{index}")
                for index, call in enumerate(calls)
            ]
            or None,
        )


def split_thinking(text: str, inside: bool) -> tuple[str | None, str]:
    """Return the thinking, if any, and the rest. Unclosed thinking extends to the end."""
    begun = text.lstrip()
    if begun.startswith(THINK_OPEN):
        text, inside = begun[len(THINK_OPEN) :], True
    if not inside:
        return None, text
    thought, closed, rest = text.partition(THINK_CLOSE)
    return thought.strip("\n") or None, rest.lstrip("\n") if closed else ""


@functools.lru_cache(maxsize=64)
def _accepted(parse: Callable[..., JSON]) -> frozenset[str]:
    try:
        parameters = inspect.signature(parse).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        # A parser with `**kwargs` takes `thinking` too, but need not return the pieces that `read` then expects.
        return frozenset({"tools", "cut"})
    return frozenset(parameter.name for parameter in parameters) & {"tools", "cut", "thinking", "turn"}


def _own_call(call: JSON, call_id: str) -> ToolCallMessage:
    """Convert a call from any parser to Palaestra's own type, with the id `call_id`, because a parser that does not
    accept `turn` may give random ids."""
    function = _field(call, "function") or call
    arguments = _field(function, "arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else msgspec.json.encode(arguments).decode()
    return ToolCallMessage(id=call_id, function=FunctionCall(name=_field(function, "name") or "", arguments=arguments))


def _field(value: JSON, name: str) -> JSON:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
