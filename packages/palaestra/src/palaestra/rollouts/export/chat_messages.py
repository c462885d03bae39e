"""Reads messages in the OpenAI shape for every format that is made from conversations.

Any shape that a model, a tool or a data set produced is read as well as possible, without validation. Invariant: the
text of arguments, replies and results is as recorded, and all other message fields that are not empty are in
`ChatMessage.rest`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from palaestra_slots.core.types import JSON, Message

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_TAKEN = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})
_ROLES = {"developer": "system", "function": "tool"}


@dataclass(frozen=True, slots=True)
class MessageCall:
    """One tool call. `arguments` is the text as the model wrote it."""

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, JSON] | None:
        """Return the arguments as an object; None if the text is not a JSON object. Empty text means no arguments."""
        return parsed_object(self.arguments) if self.arguments.strip() else {}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `role` is system, user, assistant or tool, or an unknown role as recorded; `content` is text or a
    list of parts."""

    role: str
    content: str | list[JSON]
    reasoning: str = ""
    calls: tuple[MessageCall, ...] = ()
    call_id: str = ""
    name: str = ""
    rest: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of the content; a part that is not text appears as its kind in brackets."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part_text(part) or f"[{part_kind(part)}]" for part in self.content)

    @property
    def only_text(self) -> bool:
        """Whether `text` is the whole content."""
        return isinstance(self.content, str) or all(part_text(part) is not None for part in self.content)


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Read all messages, in order."""
    return [chat_message(message) for message in messages]


def chat_message(message: Message) -> ChatMessage:
    """Read one message of any shape."""
    role = str(message.get("role") or "")
    thought = next((key for key in _REASONING_KEYS if isinstance(message.get(key), str) and message[key]), "")
    rest = {key: value for key, value in message.items() if key not in _TAKEN and key != thought and value}
    calls = message.get("tool_calls") or ()
    # Not readable as calls, but nothing of a message may be lost in an export.
    if not isinstance(calls, (list, tuple)):
        calls, rest["tool_calls"] = (), calls
    if role in _ROLES:
        rest["role"] = role
    return ChatMessage(
        role=_ROLES.get(role, role),
        content=_content(message.get("content")),
        reasoning=message[thought] if thought else "",
        calls=tuple(map(_read_call, calls)),
        call_id=str(message.get("tool_call_id") or ""),
        name=str(message.get("name") or ""),
        rest=rest,
    )


def parsed_object(text: str) -> dict[str, JSON] | None:
    """Return the JSON object in the text, or None."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def part_text(part: JSON) -> str | None:
    """Return the text of one content part; None if the part is not text."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    return text if isinstance(text, str) else None


def part_kind(part: JSON) -> str:
    """Return the kind of a content part."""
    return str(part.get("type") if isinstance(part, Mapping) else type(part).__name__)[:40]


def calls_in_text(messages: Sequence[ChatMessage]) -> bool:
    """Return whether the prompt lists the tools and the calls are written as text. An export then need not list the
    tools."""
    told = any("<tools>" in message.text for message in messages if message.role == "system")
    return told and not any(message.calls for message in messages)


def own_turns(messages: Sequence[ChatMessage], turns: int) -> list[int | None]:
    """Return, for each message that the model wrote, the number (from 1) of its turn, and None for each other message.

    The last `turns` assistant messages are the model's own; earlier ones were part of the prompt.
    """
    first = sum(message.role == "assistant" for message in messages) - turns
    numbers: list[int | None] = []
    count = 0
    for message in messages:
        count += message.role == "assistant"
        numbers.append(count - first if message.role == "assistant" and count > first else None)
    return numbers


def unanswered(messages: Sequence[ChatMessage]) -> bool:
    """Return whether some call has no result before the next message that is not a result."""
    open_ids: set[str] = set()
    for message in messages:
        if message.role == "tool":
            open_ids.discard(message.call_id)
        elif open_ids:
            return True
        open_ids |= {call.id for call in message.calls}
    return bool(open_ids)


def _content(content: JSON) -> str | list[JSON]:
    if content is None:
        return ""
    return content if isinstance(content, (str, list)) else json.dumps(content, ensure_ascii=False)


def _read_call(call: JSON) -> MessageCall:
    """Read a call of any shape. Arguments that are an object become JSON text."""
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return MessageCall(str(call.get("id") or ""), str(function.get("name") or ""), arguments)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    """Parse a number. Raises `ValueError` if it is infinite, because JSON has no infinite numbers."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large a number")
    return value
