"""Measures a template's behaviour by rendering small conversations with marks, once per template and set of tools.

A mark stands for an assistant's text. It is random per process, so no model or tool can imitate it, and no token of it
reaches an engine. Invariant (T5): a template that does not show the tools, or drops their results, is refused with the
reason.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import TypeAlias

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.templates.jinja import REASONING_FIELDS, THINK_OPEN, for_template, reasoning_of, tojson
from palaestra_tokens.tokenizers import Tokenizer

_MOST_AFTER = 4

NONCE = "".join(chr(ord("a") + byte % 26) for byte in secrets.token_bytes(12))

CONTENT = f"Qc{NONCE}"
"""The mark that stands for a text."""

_EARLIER, _LATEST = "E", "Q"

CALL_ID = "call00000"
"""An id that every family accepts: Mistral requires nine letters or digits."""

StepKind: TypeAlias = tuple[tuple[bool, bool, int], tuple[str, ...]]
"""A reply's shape, and the roles of the messages after it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of an assistant message; templates treat shapes differently. `calls` are pairs of id and name."""

    content: bool
    reasoning: bool
    calls: Sequence[tuple[str, str]] = ()

    @property
    def kind(self) -> tuple[bool, bool, int]:
        """The properties that decide how a template continues: whether there is content, whether there is thinking, and
        whether there are no calls, one call or several."""
        return self.content, self.reasoning, min(len(self.calls), 2)

    def marks(self) -> list[str]:
        """Return the marks that a faithful rendering of `message()` shows, in any order."""
        marks = [_mark("a", number) for number in range(len(self.calls))]
        if self.content or not self.calls:
            marks.append(CONTENT)
        return [*marks, _mark("r")] if self.reasoning else marks

    def message(self, stand: str = _LATEST) -> Message:
        message: Message = {"role": "assistant", "content": ""}
        if self.content or not self.calls:
            message["content"] = _mark("c", stand=stand)
        if self.reasoning:
            message["reasoning_content"] = _mark("r", stand=stand)
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": {"x": _mark("a", i, stand)}},
                }
                for i, (call_id, name) in enumerate(self.calls)
            ]
        return message


def _mark(part: str, number: int | None = None, stand: str = _LATEST) -> str:
    return f"{stand}{part}{NONCE}" + ("" if number is None else f"{number}z")


def shape_of(message: Message) -> Shape:
    calls = [(call.get("id", ""), call["function"]["name"]) for call in message.get("tool_calls") or ()]
    return Shape(content=bool(message.get("content")), reasoning=bool(reasoning_of(message)), calls=calls)


def step_kind(reply: Message, after: Sequence[Message]) -> StepKind:
    """Return the kind of a step. Of many messages after a reply, only the first few count."""
    return shape_of(reply).kind, tuple(str(message.get("role")) for message in after[:_MOST_AFTER])


def step_kinds(messages: Sequence[Message]) -> tuple[StepKind, ...]:
    """Return the kinds of steps in a conversation, each once, with the latest last."""
    kinds: tuple[StepKind, ...] = ()
    replies = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    for number, following in pairwise([*replies, len(messages)]):
        kinds = with_latest(kinds, step_kind(messages[number], messages[number + 1 : following]))
    return kinds


def with_latest(kinds: tuple[StepKind, ...], latest: StepKind) -> tuple[StepKind, ...]:
    """Return the kinds with one more step: the latest last, the others in an order that does not depend on when they
    occurred."""
    if kinds and kinds[-1] == latest:
        return kinds
    # Sorted, so that conversations with the same kinds of steps share what was measured.
    return (*sorted(kind for kind in kinds if kind != latest), latest)


def stand_ins(kind: StepKind, tool: str) -> list[Message]:
    """Return a short step of this kind: a reply and the messages after it. The reply's calls use `tool`."""
    (content, reasoning, calls), roles = kind
    ids = [f"{CALL_ID[:-1]}{number}" for number in range(calls)]
    shape = Shape(content, reasoning, [(call_id, tool) for call_id in ids])
    after: list[Message] = []
    for number, role in enumerate(roles):
        message: Message = {"role": role, "content": "."}
        if role == "tool":
            message["tool_call_id"] = ids[min(number, len(ids) - 1)] if ids else CALL_ID
        after.append(message)
    return [shape.message(_EARLIER), *after]


def last_stand_in(text: str) -> int:
    """Return where the last part of a stand-in's reply begins, or -1 if there is none."""
    return max(text.rfind(_mark(part, stand=_EARLIER)) for part in "acr")


_USER: Message = {"role": "user", "content": "."}
_RESULT = "result" + CONTENT
_REASONING = "thinking" + CONTENT


RenderTemplate: TypeAlias = Callable[..., str]
"""`TurnRenderer._render`: renders messages with the renderer's variables and its tools, or with the given tools. Raises
`ConfigError`."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The results of probing. `reasoning_field` is the template's field for thinking, or None. `joined` is true if the
    template refuses a call with both thinking and content. `stop_ids` are the tokens with which a model ends its turn.
    After a reply, the template writes one of `closers`, which are part of the reply, or one of `openers`, which begin
    the next message, as in GLM's templates."""

    reasoning_field: str | None
    joined: bool
    stop_ids: tuple[int, ...]
    closers: tuple[int, ...]
    openers: tuple[int, ...]
    think_open: str = THINK_OPEN


def probe_template(
    render: RenderTemplate, tokenizer: Tokenizer, tools: Sequence[Mapping[str, JSON]], stop_ids: Sequence[int] = ()
) -> Traits:
    """Probe a template. `stop_ids` are additional tokens that end a turn; they are not checked. Raises `ConfigError` if
    the template does not show the user's text, the tools or their results, or if no token that ends a turn is found."""
    if CONTENT not in render([{"role": "user", "content": CONTENT}]):
        raise ConfigError("The chat template does not show a user's text; does it require a list of parts?")
    if tools:
        _check_tools(render, tools)
    ends = _ends(render, tokenizer, tools)
    known = getattr(tokenizer, "stop_ids", None) or [getattr(tokenizer, "eos_token_id", None)]
    stops = [*stop_ids, *(number for number in known if isinstance(number, int)), *ends.closing, *ends.openers]
    if not stops:
        raise ConfigError("No token that ends a turn of this chat template was found: pass stop_ids=.")
    field_name = _reasoning_field(render, tools)
    return Traits(
        reasoning_field=field_name,
        joined=bool(tools and field_name) and _refuses_both(render, field_name, tools),
        stop_ids=tuple(dict.fromkeys(stops)),
        closers=tuple(dict.fromkeys([*ends.closing, *ends.instead])),
        openers=tuple(dict.fromkeys(ends.openers)),
    )


def _call_shape(tools: Sequence[Mapping[str, JSON]]) -> Shape:
    name = _function(tools[0]).get("name", "f") if tools else "f"
    return Shape(content=False, reasoning=False, calls=[(CALL_ID, name)])


def _function(tool: Mapping[str, JSON]) -> Mapping[str, JSON]:
    function: Mapping[str, JSON] = tool.get("function") or tool
    return function


def _properties(tool: Mapping[str, JSON]) -> Mapping[str, JSON]:
    properties: Mapping[str, JSON] = (_function(tool).get("parameters") or {}).get("properties") or {}
    return properties


def _marked(tool: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the tool with unique names, because a template can contain any plain word by accident."""
    function = dict(_function(tool))
    function["name"] = f"{function.get('name', '')}{NONCE}"
    if parameters := function.get("parameters"):
        properties = {name + NONCE: value for name, value in _properties(tool).items()}
        required = [f"{name}{NONCE}" for name in parameters.get("required") or ()]
        function["parameters"] = {**parameters, "properties": properties, "required": required}
    return {**tool, "function": function} if "function" in tool else function


def _check_tools(render: RenderTemplate, tools: Sequence[Mapping[str, JSON]]) -> None:
    text = render([_USER], tools=[_marked(tool) for tool in tools])
    for tool in tools:
        name = _function(tool).get("name", "")
        missing = [word for word in (name, *_properties(tool)) if not _shows(text, word + NONCE)]
        if missing:
            raise ConfigError(
                f"The chat template does not show tool '{name}' to the model ('{missing[0]}' is not in the prompt), so "
                "it could only guess. Use a template with tools, or run without tools."
            )
    message = _call_shape(tools).message()
    result: Message = {"role": "tool", "tool_call_id": CALL_ID, "content": _RESULT}
    try:
        shown = render(for_template([_USER, message, result], None))
    except ConfigError as error:
        raise ConfigError(f"The chat template has no place for a tool call and its result. {error}") from None
    if _RESULT not in shown:
        raise ConfigError("The chat template drops the results of tools, so the model would never see one.")


def _shows(text: str, word: str) -> bool:
    """Return whether a rendering contains the word, unchanged or as it is written in JSON."""
    return any(
        each in text for each in (word, *(tojson(word, ensure_ascii=escaped)[1:-1] for escaped in (False, True)))
    )


def _reasoning_field(render: RenderTemplate, tools: Sequence[Mapping[str, JSON]]) -> str | None:
    """Return the first of `REASONING_FIELDS` that the template shows in at least one conversation."""
    result: Message = {"role": "tool", "tool_call_id": CALL_ID, "name": "f", "content": "."}
    plain: Message = {"role": "assistant", "content": "."}
    calling = for_template([_call_shape(tools).message()], None)[0]
    for name in REASONING_FIELDS:
        for conversation in (
            [_USER, {**plain, name: _REASONING}],
            [_USER, {**calling, name: _REASONING}, result],
        ):
            if any(_REASONING in text for text in _tried(render, conversation)):
                return name
    return None


def _refuses_both(render: RenderTemplate, field_name: str | None, tools: Sequence[Mapping[str, JSON]]) -> bool:
    """Return whether the template accepts a call with thinking, but not a call with thinking and content."""
    result: Message = {"role": "tool", "tool_call_id": CALL_ID, "content": "."}
    shapes = [Shape(content=content, reasoning=True, calls=_call_shape(tools).calls) for content in (False, True)]
    alone, both = (for_template([_USER, shape.message(), result], field_name) for shape in shapes)
    return any(_tried(render, alone)) and not any(_tried(render, both))


def _tried(render: RenderTemplate, messages: list[Message]) -> Iterator[str]:
    try:
        yield render(messages, add_generation_prompt=False)
    except ConfigError:
        return


@dataclass(slots=True)
class _Ends:
    """Tokens after a reply: `closing` closes a reply that is the last message, `instead` replaces `closing` if a
    message follows, and `openers` open the next message if nothing closes a reply."""

    closing: list[int] = field(default_factory=list)
    instead: list[int] = field(default_factory=list)
    openers: list[int] = field(default_factory=list)


def _ends(render: RenderTemplate, tokenizer: Tokenizer, tools: Sequence[Mapping[str, JSON]]) -> _Ends:
    ends = _Ends()
    for shape, after in _probed_shapes(tools):
        alone = [_ids_after_marks(tokenizer, render, [shape.message()], shape)]
        if shape.calls:  # a token that occurs once per call ends a call, not a turn
            calls = Shape(content=False, reasoning=False, calls=[*shape.calls, ("call00001", shape.calls[0][1])])
            alone.append(_ids_after_marks(tokenizer, render, [calls.message()], shape))
        closing = _closing(tokenizer, alone, shape)
        ends.closing += closing
        ids = _ids_after_marks(tokenizer, render, [shape.message(), after], shape)
        if not any(number in ids for number in closing):
            own = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone[0], ids, strict=False)))
            found = [number for number in ids[own:] if number in _special_ids(tokenizer)][:1]
            (ends.instead if closing else ends.openers).extend(found)
    return ends


def _probed_shapes(tools: Sequence[Mapping[str, JSON]]) -> Iterator[tuple[Shape, Message]]:
    """Yield the shapes of replies to probe, each with a message that may follow it."""
    yield Shape(content=True, reasoning=False), _USER
    if tools:
        call = _call_shape(tools)
        yield call, {"role": "tool", "tool_call_id": CALL_ID, "name": call.calls[0][1], "content": "."}


def _closing(tokenizer: Tokenizer, alone: Sequence[Sequence[int]], shape: Shape) -> list[int]:
    """Return the special token that closes a reply at the end of a conversation: right after text, or at the very end
    of calls."""
    special = _special_ids(tokenizer)
    if not shape.calls:
        return [number for number in alone[0] if number in special][:1]
    last = alone[0][-1:]
    return [number for number in last if number in special and all(ids.count(number) <= 1 for ids in alone)]


def _ids_after_marks(
    tokenizer: Tokenizer, render: RenderTemplate, messages: Sequence[Message], shape: Shape
) -> list[int]:
    """Return the tokens of the text after the last mark of `shape`, or none if the template refuses the messages."""
    for text in _tried(render, for_template([_USER, *messages], None)):
        return list(tokenizer.encode(_after_marks(text, shape).rstrip(), add_special_tokens=False))
    return []


def _after_marks(text: str, shape: Shape) -> str:
    ends = [text.rfind(found) + len(found) for found in shape.marks() if found in text]
    return text[max(ends) :] if ends else ""


def _special_ids(tokenizer: Tokenizer) -> Collection[int]:
    ids: Collection[int] = getattr(tokenizer, "special_ids", None) or getattr(tokenizer, "all_special_ids", None) or ()
    return ids
