"""Marks: words put in place of what an assistant said, to see what a template makes of it.

A mark is random per process, so nothing that a model or a tool writes can pass for one. Marks are only ever rendered to
be measured; no token of them reaches an engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from palaestra.core.types import Message

_NONCE = "".join(chr(ord("a") + byte % 26) for byte in secrets.token_bytes(12))

REASONING, CONTENT, ARGUMENT = f"Qr{_NONCE}", f"Qc{_NONCE}", f"Qa{_NONCE}"


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
        """The marks that a faithful rendering shows, in no order."""
        marks = [mark(ARGUMENT, number) for number in range(len(self.calls))]
        if self.content or not self.calls:
            marks.append(CONTENT)
        return [*marks, REASONING] if self.reasoning else marks

    def message(self) -> Message:
        """An assistant message of this shape, in the OpenAI shape with arguments as objects."""
        message: Message = {"role": "assistant", "content": CONTENT if self.content or not self.calls else ""}
        if self.reasoning:
            message["reasoning_content"] = REASONING
        if self.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"x": mark(ARGUMENT, i)}}}
                for i, (call_id, name) in enumerate(self.calls)
            ]
        return message


def mark(kind: str, number: int) -> str:
    """The `number`-th mark of a kind."""
    return f"{kind}{number}z"


def shape_of(message: Message, reasoning: bool) -> Shape:
    """The shape of an assistant message."""
    calls = [(call.get("id", ""), call["function"]["name"]) for call in message.get("tool_calls") or ()]
    return Shape(content=bool(message.get("content")), reasoning=reasoning, calls=calls)
