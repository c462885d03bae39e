"""Reads replies of model servers in any shape: Palaestra's own records, SDK objects or plain dicts.

Names may be unknown and arguments malformed: `tool_calls.py` checks them. Invariant: content and arguments that the
server sends as strings are not changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from palaestra_slots.core.errors import EngineReplyError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engine import extra_of_call, extra_of_message
from palaestra_tokens.finish_reasons import read_finish_reason


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """One call that the model requests. `arguments` is the text that the server sent, or JSON if it sent an object.
    `extra` has the provider's own fields, those of the function in its `function`."""

    id: str
    name: str
    arguments: str
    extra: Mapping[str, JSON] = field(default_factory=dict)

    def message(self) -> dict[str, JSON]:
        """Return the call as it goes into the history."""
        function = {**self.extra.get("function", {}), "name": self.name, "arguments": self.arguments}
        return {**self.extra, "id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Reply:
    """One assistant turn. The token counts are those that the server reported, or 0 if it reported none. `extra` has
    the provider's own fields of the message, which a server may need back."""

    content: str
    reasoning: str | None
    calls: tuple[RequestedCall, ...]
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    extra: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def cut_off(self) -> bool:
        """Whether the reply ended at its length limit."""
        return self.finish_reason == "length"

    def cut_off_text(self, max_tokens: int | None) -> str:
        """Return what cut the reply off. `max_tokens` is the limit of the request. A reply that is shorter, or had no
        limit, filled the rest of the model's window, or reached the server's own limit, which no reply names."""
        if max_tokens is not None and not 0 < self.completion_tokens < max_tokens:
            return f"the reply was cut off at its limit of {max_tokens} tokens"
        return (
            f"the reply was cut off after {self.completion_tokens} tokens: with its prompt of {self.prompt_tokens} it "
            "filled the model's window, or it reached the server's own limit"
        )

    def message(self) -> Message:
        """Return the assistant message that goes into the history."""
        message: Message = {**self.extra, "role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.message() for call in self.calls]
        return message


def read_reply(completion: object, turn: int) -> Reply:
    """Return the first choice of a chat completion. A call whose id is missing or repeated gets a new id that contains
    `turn` (from 1).

    Raises `EngineReplyError` if there is no choice, if the choice has no message, or if the server broke off the reply,
    and `ReplyWithheld` if the provider's filter did.
    """
    choices = part(completion, "choices")
    if not isinstance(choices, Sequence) or not choices:
        raise EngineReplyError("The model server's reply has no choices.")
    message = part(choices[0], "message")
    if message is None:
        raise EngineReplyError("The model server's reply has a choice without a message.")
    reason = part(choices[0], "finish_reason")
    usage = part(completion, "usage")
    return Reply(
        content=text_of(part(message, "content")) or text_of(part(message, "refusal")),
        reasoning=_reasoning(message),
        calls=_requested_calls(part(message, "tool_calls"), turn),
        finish_reason=read_finish_reason(reason if isinstance(reason, str) else None, "The model server"),
        prompt_tokens=_token_count(part(usage, "prompt_tokens")),
        completion_tokens=_token_count(part(usage, "completion_tokens")),
        extra=_extra(message),
    )


def part(value: object, name: str) -> JSON:
    """Return a field of an object or of a dict; None if it is missing."""
    if not isinstance(value, msgspec.Struct) and isinstance(value, Mapping):
        return value.get(name)
    return getattr(value, name, None)


def text_of(content: JSON) -> str:
    """Return message content as text. The text parts of a list are joined. Content that is neither a string nor a list
    becomes an empty string."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = (piece if isinstance(piece, str) else part(piece, "text") for piece in content)
        return "".join(text for text in texts if isinstance(text, str))
    return ""


def _reasoning(message: object) -> str | None:
    """Return the reasoning text. Servers use three names for it; the first that contains text counts."""
    # Some servers send both, with the same text, so they are not joined.
    for name in ("reasoning_content", "reasoning"):
        value = part(message, name)
        if isinstance(value, str) and value:
            return value
    details = part(message, "reasoning_details")
    if not isinstance(details, Sequence):
        return None
    texts = (part(detail, "text") for detail in details)
    return "\n".join(text for text in texts if isinstance(text, str) and text) or None


def _extra(message: object) -> Mapping[str, JSON]:
    details = part(message, "reasoning_details")
    extra = extra_of_message(message)
    return {**extra, "reasoning_details": list(details)} if details and isinstance(details, Sequence) else extra


def _requested_calls(raw_calls: JSON, turn: int) -> tuple[RequestedCall, ...]:
    if not isinstance(raw_calls, Sequence) or isinstance(raw_calls, str):
        return ()
    calls: list[RequestedCall] = []
    seen: set[str] = set()
    for index, raw in enumerate(raw_calls):
        function = part(raw, "function")
        call_id, name = part(raw, "id"), part(function, "name")
        if not isinstance(call_id, str) or not call_id or call_id in seen:
            call_id = f"call_{turn}_{index}"  # calls with the same id could not be told apart
        seen.add(call_id)
        text = _raw(part(function, "arguments"))
        calls.append(RequestedCall(call_id, name if isinstance(name, str) else "", text, extra_of_call(raw)))
    return tuple(calls)


def _raw(arguments: JSON) -> str:
    """Return the arguments as text. Some servers send the object itself."""
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else json.dumps(arguments, ensure_ascii=False, default=str)


def _token_count(value: JSON) -> int:
    return value if type(value) is int and value > 0 else 0
