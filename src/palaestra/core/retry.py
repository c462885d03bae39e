"""When to try a request again, and how long to wait before: no I/O here, and time comes from a clock.

Invariant: only what can pass by itself is tried again (rate limits, server errors, connection failures); what the
server understood and refused is not.
"""

from __future__ import annotations

import email.utils
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from palaestra.core.clock import Clock
from palaestra.core.uncharged_time import uncharged

T = TypeVar("T")

RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""Rate limits, server errors and the gateway errors that proxies add (520 to 529)."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter over its upper half.

    `attempts` counts the first try. A wait the server asks for (`Retry-After`) is honoured up to `longest_s`.
    """

    attempts: int = 8
    first_s: float = 0.5
    longest_s: float = 60.0

    def wait_s(self, failures: int, asked_s: float | None, rng: random.Random) -> float:
        """Seconds to wait after the given number of failures (from 1)."""
        backoff_s = min(self.longest_s, self.first_s * 2.0 ** (failures - 1)) * rng.uniform(0.5, 1.0)
        if asked_s is None:
            return backoff_s
        return min(self.longest_s, asked_s) + self.first_s * rng.random()  # spread those who were told the same time


AT_START = RetryPolicy(attempts=4, first_s=0.25, longest_s=2.0)
"""For the look at the start: a wrong address should be an error within seconds."""


def retry_after_s(header: str | None, now: float) -> float | None:
    """Seconds from a `Retry-After` header, which holds seconds or an HTTP date (RFC 9110, 10.2.3); None if neither.

    `now` is seconds since the epoch.
    """
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds < 1e9 else None


class Passing(Exception):
    """What may pass by itself. `problem` is raised in the end if it does not; `asked_s` is when the server wants to be
    asked again, `waited_s` for how long the try waited for its turn, which is not of the time for all tries."""

    def __init__(self, problem: Exception, asked_s: float | None = None, waited_s: float = 0.0) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.asked_s = asked_s
        self.waited_s = waited_s


async def persist(
    send: Callable[[int, float], Awaitable[T]],
    *,
    retry: RetryPolicy,
    timeout_s: float,
    clock: Clock,
    rng: random.Random,
    again: Callable[[float, Exception], None] = lambda wait_s, problem: None,
) -> T:
    """What `send` gives, tried again for as long as it raises `Passing`, within `timeout_s` for all tries together.

    From the first failure on the time is `uncharged`: it is the service that has to be waited for.
    `send` is told which try it is (from 1) and the seconds left; `again` is told of each wait. Raises the last problem.
    """
    started_s, tries = clock.monotonic(), 1
    try:
        return await send(tries, timeout_s)
    except Passing as passing:
        failed = passing
    with uncharged():
        while True:
            started_s += failed.waited_s
            wait_s = retry.wait_s(tries, failed.asked_s, rng)
            left_s = timeout_s - (clock.monotonic() - started_s) - wait_s
            if tries >= retry.attempts or left_s <= 0:
                raise failed.problem from failed.__cause__
            again(wait_s, failed.problem)
            await clock.sleep(wait_s)
            tries += 1
            try:
                return await send(tries, left_s)
            except Passing as passing:
                failed = passing
