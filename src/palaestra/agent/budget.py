"""What one rollout may use, and how full its context is. Arithmetic only: the loop decides when to ask.

Not for limits that belong to somebody else: a request's timeout is the client's, a command's is the tool's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message, Prices

BYTES_PER_TOKEN = 4
"""The usual stand-in where no engine has counted yet: English and code come to three to five bytes per token."""


@dataclass(frozen=True, slots=True)
class Used:
    """What a rollout has used so far. Tokens are summed over its model calls, each of which reads the whole
    conversation; `output_bytes` are those of tool results, as the model reads them."""

    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    output_bytes: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Budget:
    """Ceilings for a whole rollout; None means none. Reaching one ends it with outcome `budget`, which is scored.

    `tokens` are those read and those written. `cost` is in the currency of `prices`, which it needs. `wall_s` also cuts
    off a model call or tool call that is under way, and does not count what is `uncharged`; the others are looked at
    between turns, so that the last turn may go beyond them. Raises `ConfigError` for a cost without prices.
    """

    turns: int | None = None
    tokens: int | None = None
    completion_tokens: int | None = None
    output_bytes: int | None = None
    cost: float | None = None
    wall_s: float | None = None
    prices: Prices | None = None

    def __post_init__(self) -> None:
        if self.cost is not None and self.prices is None:
            raise ConfigError("a budget of a cost needs the prices of tokens")

    def used_up(self, used: Used) -> str:
        """Which ceiling has been reached, as a sentence, or the empty string."""
        tokens = used.prompt_tokens + used.completion_tokens
        if self.turns is not None and used.turns >= self.turns:
            return f"budget of {self.turns} turns used up"
        if self.tokens is not None and tokens >= self.tokens:
            return f"budget of {self.tokens} tokens used up ({tokens})"
        if self.completion_tokens is not None and used.completion_tokens >= self.completion_tokens:
            return f"budget of {self.completion_tokens} completion tokens used up ({used.completion_tokens})"
        if self.output_bytes is not None and used.output_bytes >= self.output_bytes:
            return f"budget of {self.output_bytes} bytes of tool output used up ({used.output_bytes})"
        if self.cost is not None and self.prices is not None:
            cost = self.prices.cost(used.prompt_tokens, used.completion_tokens)
            if cost >= self.cost:
                return f"budget of {self.cost:g} used up (it cost {cost:.4g})"
        if self.wall_s is not None and used.elapsed_s >= self.wall_s:
            return f"budget of {self.wall_s:g} seconds used up"
        return ""

    def left(self, used: Used, shares: int) -> Budget:
        """The budget of each of so many who share what is left. Of time there is no share: it goes on for all."""

        def share(most: int | None, gone: int) -> int | None:
            return None if most is None else max(0, most - gone) // shares

        cost = None
        if self.cost is not None and self.prices is not None:
            cost = max(0.0, self.cost - self.prices.cost(used.prompt_tokens, used.completion_tokens)) / shares
        return Budget(
            turns=share(self.turns, used.turns),
            tokens=share(self.tokens, used.prompt_tokens + used.completion_tokens),
            completion_tokens=share(self.completion_tokens, used.completion_tokens),
            output_bytes=share(self.output_bytes, used.output_bytes),
            cost=cost,
            prices=self.prices,
        )

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
