"""What one rollout may use, and how full its context is. Arithmetic only: the loop decides when to ask.

Not for limits that belong to somebody else: a request's timeout is the client's, a command's is the tool's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from palaestra.core.types import JSON, Message

BYTES_PER_TOKEN = 4
"""The usual stand-in where no engine has counted yet: English and code come to three to five bytes per token."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Ceilings for a whole rollout; None means none. Reaching one ends it with outcome `budget`, which is scored.

    `wall_s` also cuts off a model call or tool call that is under way; the others are looked at between turns.
    """

    turns: int | None = None
    completion_tokens: int | None = None
    wall_s: float | None = None

    def used_up(self, turns: int, completion_tokens: int, elapsed_s: float) -> str:
        """Which ceiling has been reached, as a sentence, or the empty string."""
        if self.turns is not None and turns >= self.turns:
            return f"budget of {self.turns} turns used up"
        if self.completion_tokens is not None and completion_tokens >= self.completion_tokens:
            return f"budget of {self.completion_tokens} completion tokens used up ({completion_tokens})"
        if self.wall_s is not None and elapsed_s >= self.wall_s:
            return f"budget of {self.wall_s:g} seconds used up"
        return ""

    def reply_tokens(self, max_tokens: int | None, completion_tokens: int) -> int | None:
        """How long the next reply may be, given a limit per reply and what has been used."""
        if self.completion_tokens is None:
            return max_tokens
        left = max(1, self.completion_tokens - completion_tokens)
        return left if max_tokens is None else min(max_tokens, left)


def estimated_tokens(messages: Iterable[Message]) -> int:
    """A rough count of the tokens of messages that no engine has counted yet."""
    return sum(_text_bytes(message) for message in messages) // BYTES_PER_TOKEN


def _text_bytes(value: JSON) -> int:
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, dict):
        return sum(_text_bytes(part) for part in value.values())
    if isinstance(value, list):
        return sum(_text_bytes(part) for part in value)
    return 0
