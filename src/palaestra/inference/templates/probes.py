"""Finds out what a template does, by rendering small conversations with marks: once per template and set of tools.

Invariant (T5): a template that does not show the tools, or drops what they answer, is refused with the reason; nothing
is sampled from a prompt in which the model cannot see what it is asked to use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message
from palaestra.inference.templates.marks import CONTENT, REASONING, Shape
from palaestra.inference.templates.messages import REASONING_FIELDS, THINK_OPEN, for_template
from palaestra.inference.tokens import Tokenizer

_USER: Message = {"role": "user", "content": "."}
_RESULT = "Qt" + CONTENT


class Render(Protocol):
    """Renders messages with the tools and variables at hand. Raises `ConfigError`."""

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Traits:
    """What was found out.

    `reasoning_field` is where the template looks for thinking, None where it knows no field. `stop_ids` are the tokens
    with which a model ends its turn. `ends` are those that the template writes after a reply: `closes` says that they
    belong to the reply; otherwise they open the next message, as GLM's do.
    """

    reasoning_field: str | None
    stop_ids: tuple[int, ...]
    ends: tuple[int, ...]
    closes: bool
    think_open: str = THINK_OPEN


def probe(
    render: Render, tokenizer: Tokenizer, tools: Sequence[Mapping[str, JSON]], stop_ids: Sequence[int] = ()
) -> Traits:
    """Look at a template. `stop_ids` given by the caller are believed. Raises `ConfigError`."""
    if tools:
        _check_tools(render, tools)
    closing, following = _ends(render, tokenizer, tools)
    known = getattr(tokenizer, "stop_ids", None) or [getattr(tokenizer, "eos_token_id", None)]
    stops = [*stop_ids, *(number for number in known if isinstance(number, int)), *(closing or following)]
    if not stops:
        raise ConfigError("No token ends a turn of this chat template, as far as can be seen: pass stop_ids=.")
    return Traits(
        reasoning_field=_reasoning_field(render, tools),
        stop_ids=tuple(dict.fromkeys(stops)),
        ends=tuple(dict.fromkeys([*closing, *following])),
        closes=bool(closing),
    )


def _call(tools: Sequence[Mapping[str, JSON]]) -> Shape:
    name = _function(tools[0]).get("name", "f") if tools else "f"
    return Shape(content=False, reasoning=False, calls=[("call00000", name)])


def _function(tool: Mapping[str, JSON]) -> Mapping[str, JSON]:
    function: Mapping[str, JSON] = tool.get("function") or tool
    return function


def _check_tools(render: Render, tools: Sequence[Mapping[str, JSON]]) -> None:
    text = render([_USER])
    for tool in tools:
        function = _function(tool)
        parameters = (function.get("parameters") or {}).get("properties") or {}
        missing = [word for word in (function.get("name", ""), *parameters) if word not in text]
        if missing:
            raise ConfigError(
                f"The chat template does not show tool '{function.get('name')}' to the model ('{missing[0]}' is not in "
                "the prompt), so it could only guess. Use a template with tools, or run without tools."
            )
    message = _call(tools).message()
    result: Message = {"role": "tool", "tool_call_id": "call00000", "content": _RESULT}
    try:
        shown = render(for_template([_USER, message, result], None))
    except ConfigError as error:
        raise ConfigError(f"The chat template has no place for a tool call and its result. {error}") from None
    if _RESULT not in shown:
        raise ConfigError("The chat template drops what tools answer: the model would never see a result.")


def _reasoning_field(render: Render, tools: Sequence[Mapping[str, JSON]]) -> str | None:
    """The field whose thinking is shown at least somewhere."""
    result: Message = {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "."}
    plain: Message = {"role": "assistant", "content": CONTENT}
    calling = for_template([_call(tools).message()], None)[0]
    for field in REASONING_FIELDS:
        for conversation in (
            [_USER, {**plain, field: REASONING}],
            [_USER, {**calling, field: REASONING}, result],
        ):
            if any(REASONING in text for text in _tried(render, conversation)):
                return field
    return None


def _tried(render: Render, messages: list[Message], generation: bool = False) -> Iterator[str]:
    """The rendering, if the template has one."""
    try:
        yield render(messages, add_generation_prompt=generation)
    except ConfigError:
        return


def _ends(render: Render, tokenizer: Tokenizer, tools: Sequence[Mapping[str, JSON]]) -> tuple[list[int], list[int]]:
    """Special tokens after a reply: those that close it when it is the last message, and others when it is not."""
    conversations: list[tuple[Shape, Message]] = [(Shape(content=True, reasoning=False), _USER)]
    if tools:
        call = _call(tools)
        conversations.append(
            (call, {"role": "tool", "tool_call_id": "call00000", "name": call.calls[0][1], "content": "."})
        )
    closing: list[int] = []
    following: list[int] = []
    for shape, _ in conversations:
        for text in _tried(render, for_template([_USER, shape.message()], None)):
            # before a call's end there may be special tokens of the call, so only the very last one counts
            closing += _special(tokenizer, _after_marks(text, shape).rstrip())[-1 if shape.calls else 0 :][:1]
    for shape, after in conversations:
        for text in _tried(render, for_template([_USER, shape.message(), after], None)):
            found = _special(tokenizer, _after_marks(text, shape))
            following += [] if any(number in closing for number in found) else found[:1]
    return closing, following


def _after_marks(text: str, shape: Shape) -> str:
    """What stands after the last thing said; nothing where nothing that was said is shown."""
    ends = [text.rfind(found) + len(found) for found in shape.marks() if found in text]
    return text[max(ends) :] if ends else ""


def _special(tokenizer: Tokenizer, text: str) -> list[int]:
    """The special tokens of a text, in order."""
    special = getattr(tokenizer, "special_ids", None) or getattr(tokenizer, "all_special_ids", None) or ()
    return [number for number in tokenizer.encode(text, add_special_tokens=False) if number in special]
