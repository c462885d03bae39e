"""Marks: words put in place of what an assistant said, to see what a template makes of it.

A mark is random per process, so nothing that a model or a tool writes can pass for one. Marks are only ever rendered to
be measured; no token of them reaches an engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from palaestra.core.types import Message
from palaestra.inference.templates.messages import reasoning_of

_MOST_AFTER = 4

NONCE = "".join(chr(ord("a") + byte % 26) for byte in secrets.token_bytes(12))

CONTENT = f"Qc{NONCE}"
"""The mark of a text."""

_EARLIER, _LATEST = "E", "Q"

CALL_ID = "call00000"
"""An id that every family accepts: Mistral's wants nine letters or digits."""

StepKind: TypeAlias = tuple[tuple[bool, bool, int], tuple[str, ...]]
"""A reply's shape, and the roles of the messages that came after it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of what an assistant message consists; templates treat shapes differently. `calls` are (id, name)."""

    content: bool
    reasoning: bool
    calls: Sequence[tuple[str, str]] = ()

    @property
    def kind(self) -> tuple[bool, bool, int]:
        """What matters for how a template goes on: one call, or several."""
        return self.content, self.reasoning, min(len(self.calls), 2)

    def marks(self) -> list[str]:
        """The marks that a faithful rendering of `message()` shows, in no order."""
        marks = [_mark("a", number) for number in range(len(self.calls))]
        if self.content or not self.calls:
            marks.append(CONTENT)
        return [*marks, _mark("r")] if self.reasoning else marks

    def message(self, stand: str = _LATEST) -> Message:
        """An assistant message of this shape, in the OpenAI shape with arguments as objects."""
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
    """The mark of a part of a message: content, reasoning, or the arguments of a call."""
    return f"{stand}{part}{NONCE}" + ("" if number is None else f"{number}z")


def shape_of(message: Message) -> Shape:
    """The shape of an assistant message."""
    calls = [(call.get("id", ""), call["function"]["name"]) for call in message.get("tool_calls") or ()]
    return Shape(content=bool(message.get("content")), reasoning=bool(reasoning_of(message)), calls=calls)


def step_kind(reply: Message, after: Sequence[Message]) -> StepKind:
    """What kind of step a conversation took. Of many messages after a reply, the first few tell."""
    return shape_of(reply).kind, tuple(str(message.get("role")) for message in after[:_MOST_AFTER])


def step_kinds(messages: Sequence[Message]) -> tuple[StepKind, ...]:
    """The kinds of steps in a conversation, each once, the latest last."""
    kinds: tuple[StepKind, ...] = ()
    replies = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    for number, following in pairwise([*replies, len(messages)]):
        kinds = with_latest(kinds, step_kind(messages[number], messages[number + 1 : following]))
    return kinds


def with_latest(kinds: tuple[StepKind, ...], latest: StepKind) -> tuple[StepKind, ...]:
    """The kinds with one more step: the latest last, the others in an order that does not depend on when they were."""
    if kinds and kinds[-1] == latest:
        return kinds
    return (*sorted(kind for kind in kinds if kind != latest), latest)


def stand_ins(kind: StepKind, tool: str) -> list[Message]:
    """A step of this kind in few words: a reply and what came after it. Calls are of `tool`."""
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
    """Where the last thing begins that a stand-in's reply says, -1 where it says nothing."""
    return max(text.rfind(_mark(part, stand=_EARLIER)) for part in "acr")
