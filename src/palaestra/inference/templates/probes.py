"""Finds out what a template does, by rendering small conversations with marks: once per template and set of tools.

Invariant (T5): a template that does not show the tools, or drops what they answer, is refused with the reason; nothing
is sampled from a prompt in which the model cannot see what it is asked to use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message
from palaestra.inference.templates.marks import CALL_ID, CONTENT, NONCE, Shape
from palaestra.inference.templates.messages import REASONING_FIELDS, THINK_OPEN, for_template
from palaestra.inference.tokens import Tokenizer

_USER: Message = {"role": "user", "content": "."}
_RESULT = "result" + CONTENT
_REASONING = "thinking" + CONTENT


class Render(Protocol):
    """Renders messages with the variables at hand, and the tools, or others. Raises `ConfigError`."""

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, JSON]] | None = None,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Traits:
    """What was found out.

    `reasoning_field` is where the template looks for thinking, None where it knows no field; `joined` says that it
    refuses thinking and content together where there is a call. `stop_ids` are the tokens
    with which a model ends its turn. The template writes one of `closers` after a reply, as a part of it, or one of
    `openers`, which begin the next message, as GLM's do.
    """

    reasoning_field: str | None
    joined: bool
    stop_ids: tuple[int, ...]
    closers: tuple[int, ...]
    openers: tuple[int, ...]
    think_open: str = THINK_OPEN


def probe(
    render: Render, tokenizer: Tokenizer, tools: Sequence[Mapping[str, JSON]], stop_ids: Sequence[int] = ()
) -> Traits:
    """Look at a template. `stop_ids` given by the caller are believed. Raises `ConfigError`."""
    if CONTENT not in render([{"role": "user", "content": CONTENT}]):
        raise ConfigError("The chat template does not show what a user says; does it want a list of parts?")
    if tools:
        _check_tools(render, tools)
    ends = _ends(render, tokenizer, tools)
    known = getattr(tokenizer, "stop_ids", None) or [getattr(tokenizer, "eos_token_id", None)]
    stops = [*stop_ids, *(number for number in known if isinstance(number, int)), *ends.closing, *ends.openers]
    if not stops:
        raise ConfigError("No token ends a turn of this chat template, as far as can be seen: pass stop_ids=.")
    field_name = _reasoning_field(render, tools)
    return Traits(
        reasoning_field=field_name,
        joined=bool(tools and field_name) and _refuses_both(render, field_name, tools),
        stop_ids=tuple(dict.fromkeys(stops)),
        closers=tuple(dict.fromkeys([*ends.closing, *ends.instead])),
        openers=tuple(dict.fromkeys(ends.openers)),
    )


def _call(tools: Sequence[Mapping[str, JSON]]) -> Shape:
    name = _function(tools[0]).get("name", "f") if tools else "f"
    return Shape(content=False, reasoning=False, calls=[(CALL_ID, name)])


def _function(tool: Mapping[str, JSON]) -> Mapping[str, JSON]:
    function: Mapping[str, JSON] = tool.get("function") or tool
    return function


def _properties(tool: Mapping[str, JSON]) -> Mapping[str, JSON]:
    properties: Mapping[str, JSON] = (_function(tool).get("parameters") or {}).get("properties") or {}
    return properties


def _marked(tool: Mapping[str, JSON]) -> dict[str, JSON]:
    """The tool under names that stand nowhere else in a prompt: a template can hold any word by accident."""
    function = dict(_function(tool))
    function["name"] = f"{function.get('name', '')}{NONCE}"
    if parameters := function.get("parameters"):
        properties = {name + NONCE: value for name, value in _properties(tool).items()}
        required = [f"{name}{NONCE}" for name in parameters.get("required") or ()]
        function["parameters"] = {**parameters, "properties": properties, "required": required}
    return {**tool, "function": function} if "function" in tool else function


def _check_tools(render: Render, tools: Sequence[Mapping[str, JSON]]) -> None:
    text = render([_USER], tools=[_marked(tool) for tool in tools])
    for tool in tools:
        name = _function(tool).get("name", "")
        missing = [word for word in (name, *_properties(tool)) if word + NONCE not in text]
        if missing:
            raise ConfigError(
                f"The chat template does not show tool '{name}' to the model ('{missing[0]}' is not in the prompt), so "
                "it could only guess. Use a template with tools, or run without tools."
            )
    message = _call(tools).message()
    result: Message = {"role": "tool", "tool_call_id": CALL_ID, "content": _RESULT}
    try:
        shown = render(for_template([_USER, message, result], None))
    except ConfigError as error:
        raise ConfigError(f"The chat template has no place for a tool call and its result. {error}") from None
    if _RESULT not in shown:
        raise ConfigError("The chat template drops what tools answer: the model would never see a result.")


def _reasoning_field(render: Render, tools: Sequence[Mapping[str, JSON]]) -> str | None:
    """The field whose thinking is shown at least somewhere."""
    result: Message = {"role": "tool", "tool_call_id": CALL_ID, "name": "f", "content": "."}
    plain: Message = {"role": "assistant", "content": "."}
    calling = for_template([_call(tools).message()], None)[0]
    for name in REASONING_FIELDS:
        for conversation in (
            [_USER, {**plain, name: _REASONING}],
            [_USER, {**calling, name: _REASONING}, result],
        ):
            if any(_REASONING in text for text in _tried(render, conversation)):
                return name
    return None


def _refuses_both(render: Render, field_name: str | None, tools: Sequence[Mapping[str, JSON]]) -> bool:
    """Whether a call may come with thinking, but not with thinking and content."""
    result: Message = {"role": "tool", "tool_call_id": CALL_ID, "content": "."}
    shapes = [Shape(content=content, reasoning=True, calls=_call(tools).calls) for content in (False, True)]
    alone, both = (for_template([_USER, shape.message(), result], field_name) for shape in shapes)
    return any(_tried(render, alone)) and not any(_tried(render, both))


def _tried(render: Render, messages: list[Message]) -> Iterator[str]:
    """The rendering, if the template has one."""
    try:
        yield render(messages, add_generation_prompt=False)
    except ConfigError:
        return


@dataclass(slots=True)
class _Ends:
    """Tokens after a reply: that close it when it is the last message, that stand there `instead` when it is not, and
    that open the next message where nothing closes a reply.
    """

    closing: list[int] = field(default_factory=list)
    instead: list[int] = field(default_factory=list)
    openers: list[int] = field(default_factory=list)


def _ends(render: Render, tokenizer: Tokenizer, tools: Sequence[Mapping[str, JSON]]) -> _Ends:
    ends = _Ends()
    for shape, after in _probed_shapes(tools):
        alone = [_encoded(tokenizer, render, [shape.message()], shape)]
        if shape.calls:  # what stands once per call ends a call, not a turn
            calls = Shape(content=False, reasoning=False, calls=[*shape.calls, ("call00001", shape.calls[0][1])])
            alone.append(_encoded(tokenizer, render, [calls.message()], shape))
        closing = _closing(tokenizer, alone, shape)
        ends.closing += closing
        ids = _encoded(tokenizer, render, [shape.message(), after], shape)
        if not any(number in ids for number in closing):
            own = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone[0], ids, strict=False)))
            found = [number for number in ids[own:] if number in _special_ids(tokenizer)][:1]
            (ends.instead if closing else ends.openers).extend(found)
    return ends


def _probed_shapes(tools: Sequence[Mapping[str, JSON]]) -> Iterator[tuple[Shape, Message]]:
    """A reply, and what may come after it."""
    yield Shape(content=True, reasoning=False), _USER
    if tools:
        call = _call(tools)
        yield call, {"role": "tool", "tool_call_id": CALL_ID, "name": call.calls[0][1], "content": "."}


def _closing(tokenizer: Tokenizer, alone: Sequence[Sequence[int]], shape: Shape) -> list[int]:
    """The special token that closes a reply which is the last message: right after text, at the very end of calls."""
    special = _special_ids(tokenizer)
    if not shape.calls:
        return [number for number in alone[0] if number in special][:1]
    last = alone[0][-1:]
    return [number for number in last if number in special and all(ids.count(number) <= 1 for ids in alone)]


def _encoded(tokenizer: Tokenizer, render: Render, messages: Sequence[Message], shape: Shape) -> list[int]:
    """What is rendered after the first thing that `shape` says, as tokens; nothing where the template refuses."""
    for text in _tried(render, for_template([_USER, *messages], None)):
        return list(tokenizer.encode(_after_marks(text, shape).rstrip(), add_special_tokens=False))
    return []


def _after_marks(text: str, shape: Shape) -> str:
    """What stands after the last thing said; nothing where nothing that was said is shown."""
    ends = [text.rfind(found) + len(found) for found in shape.marks() if found in text]
    return text[max(ends) :] if ends else ""


def _special_ids(tokenizer: Tokenizer) -> Collection[int]:
    ids: Collection[int] = getattr(tokenizer, "special_ids", None) or getattr(tokenizer, "all_special_ids", None) or ()
    return ids
