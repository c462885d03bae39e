"""The limits of one rollout: ceilings for turns, tokens, output and cost, and a wall clock that ends a conversation.

The loop checks the ceilings between turns; the wall clock also cuts off a call in progress. The timeouts of single
requests and commands are set elsewhere, by the client and by the tool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from palaestra_slots.core.clock import ChargedTo, Clock
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.threads import running_loop
from palaestra_slots.core.types import JSON, Message, Prices

BYTES_PER_TOKEN = 4
"""The estimate used until a server has counted the tokens: English and code have three to five bytes per token."""

IMAGE_TOKENS = 1000
"""The estimate for one image, whose data is not read as text."""


@dataclass(frozen=True, slots=True)
class Used:
    """The amounts that a rollout has used so far. Tokens are summed over its model calls, each of which reads the whole
    conversation. `output_bytes` counts the tool results as the model reads them, and is 0 unless the budget limits
    it."""

    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    output_bytes: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Budget:
    """Ceilings for a whole rollout; None means no limit. If a ceiling is reached before the agent is done, the rollout
    ends with the outcome `budget` and is scored.

    `tokens` are prompt and completion tokens. `cost` needs `prices` and is in their currency. `wall_s` also cuts off a
    call in progress. It does not include the time spent waiting for a slot, or for a model server that is overloaded or
    has failed. The other ceilings are checked between turns, so the last turn may exceed them. Raises `ConfigError` if
    `cost` is set without `prices`.
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
            raise ConfigError("a cost budget needs token prices; set prices as well as cost")

    def used_up(self, used: Used) -> str:
        """Return a message that names the ceiling that has been reached, or an empty string if none has."""
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
                return f"cost budget of {self.cost:g} used up ({cost:.4g})"
        # Last, because the other ceilings are reached at the same turn whenever the rollout is played again.
        if self.wall_s is not None and used.elapsed_s >= self.wall_s:
            return f"budget of {self.wall_s:g} seconds used up"
        return ""

    def left(self, used: Used, shares: int) -> Budget:
        """Return one of `shares` equal shares of the remaining budget. The share has no `wall_s`: the shares are used
        concurrently, and the caller sets their time limit."""

        def equal_share(most: int | None, gone: int) -> int | None:
            return None if most is None else max(0, most - gone) // shares

        cost = None
        if self.cost is not None and self.prices is not None:
            cost = max(0.0, self.cost - self.prices.cost(used.prompt_tokens, used.completion_tokens)) / shares
        return Budget(
            turns=equal_share(self.turns, used.turns),
            tokens=equal_share(self.tokens, used.prompt_tokens + used.completion_tokens),
            completion_tokens=equal_share(self.completion_tokens, used.completion_tokens),
            output_bytes=equal_share(self.output_bytes, used.output_bytes),
            cost=cost,
            prices=self.prices,
        )

    def reply_tokens(self, max_tokens: int | None, completion_tokens: int) -> int | None:
        """Return the token limit of the next reply, given a limit per reply and the completion tokens used so far."""
        if self.completion_tokens is None:
            return max_tokens
        left = max(1, self.completion_tokens - completion_tokens)
        return left if max_tokens is None else min(max_tokens, left)


class WallClock:
    """The time that one conversation takes, from `start`, and the limit that ends it.

    Time that the conversation spends waiting for a slot, or for a model server that is overloaded or has failed, is not
    counted (`uncharged`); the clock stops while any of several concurrent tasks waits. The limit uses the event loop's
    clock; all other times use the given clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = self._stood_s = 0.0
        self._waiting = 0
        self._wall_s: float | None = None
        self._limit: asyncio.Timeout | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the clock from zero."""
        self._started_s = self._stood_s = self._clock.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, without uncharged time."""
        return (self._stood_s if self._waiting else self._clock.monotonic()) - self._started_s

    @asynccontextmanager
    async def limited(self, wall_s: float | None) -> AsyncIterator[asyncio.Timeout]:
        """End the block with `TimeoutError` after `wall_s` charged seconds; None sets no limit."""
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(wall_s) as self._limit:
                self._wall_s = wall_s
                with ChargedTo(self.standing):
                    yield self._limit
        finally:
            self._limit = None

    def charge(self, seconds: float) -> None:
        """Set the seconds that have passed, for a conversation that began in another process."""
        self._stood_s = self._clock.monotonic()
        self._started_s = self._stood_s - seconds
        self._set_limit()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Stop the clock during the block. Blocks may overlap, and may run in the event loop of another thread, as the
        tools of a `ToolSession` do."""
        self._on_own_loop(self._stop_clock)
        try:
            yield
        finally:
            self._on_own_loop(self._go)

    def _on_own_loop(self, step: Callable[[], None]) -> None:
        if self._loop is None or self._loop is running_loop():
            step()
        else:
            with contextlib.suppress(RuntimeError):  # that loop has ended, and the limit with it
                self._loop.call_soon_threadsafe(step)

    def _stop_clock(self) -> None:
        if not self._waiting:
            self._stood_s = self._clock.monotonic()
        self._waiting += 1
        self._set_limit()

    def _go(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._started_s += self._clock.monotonic() - self._stood_s
        self._set_limit()

    def _set_limit(self) -> None:
        limit, wall_s = self._limit, self._wall_s
        # asyncio refuses to reschedule a timeout that has expired, and a wait
        # may end while its cancellation is under way.
        if limit is None or wall_s is None or limit.expired():
            return
        limit.reschedule(None if self._waiting else asyncio.get_running_loop().time() + wall_s - self.elapsed_s)


def estimated_tokens(messages: Iterable[Message]) -> int:
    """Return an estimate of the tokens in messages that no server has counted yet."""
    return sum(_text_bytes(message) for message in messages) // BYTES_PER_TOKEN


def _text_bytes(value: JSON) -> int:
    if isinstance(value, str):
        image = value.startswith("data:image/")
        return IMAGE_TOKENS * BYTES_PER_TOKEN if image else len(value.encode(errors="replace"))
    if isinstance(value, dict):
        return sum(_text_bytes(part) for part in value.values())
    if isinstance(value, list):
        return sum(_text_bytes(part) for part in value)
    return 0
