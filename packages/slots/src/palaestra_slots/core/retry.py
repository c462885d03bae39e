"""Decides whether to retry a request, and how long to wait before each try. The functions do no I/O; time comes from a
clock.

Invariant: only transient failures are retried (rate limits, server errors, connection failures), never a refusal.
"""

from __future__ import annotations

import email.utils
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from palaestra_slots.core.clock import Clock, uncharged

T = TypeVar("T")

RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""Rate limits, server errors and the gateway errors that proxies add (520 to 529)."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with jitter over the upper half of each wait.

    `attempts` counts the first try. A wait that the server requests (`Retry-After`) is honoured up to `longest_s`.
    """

    attempts: int = 8
    first_s: float = 0.5
    longest_s: float = 60.0

    def wait_s(self, failures: int, asked_s: float | None, rng: random.Random) -> float:
        """Return the seconds to wait after the given number of failures (from 1)."""
        backoff_s = min(self.longest_s, self.first_s * 2.0 ** (failures - 1)) * rng.uniform(0.5, 1.0)
        if asked_s is None:
            return backoff_s
        return min(self.longest_s, asked_s) + self.first_s * rng.random()  # so that not all clients retry together


AT_START = RetryPolicy(attempts=4, first_s=0.25, longest_s=2.0)
"""The policy for the first request, so that a wrong address fails within seconds."""


def retry_after_s(header: str | None, now: float) -> float | None:
    """Return the wait, in seconds, that a `Retry-After` header requests as a number or as an HTTP date (RFC 9110,
    10.2.3); None if it contains neither, or if the wait is 1e9 seconds or more.

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


class TransientFailure(Exception):
    """A failure that may be temporary. `problem` is raised if no try succeeds. `asked_s` is the wait that the server
    requested. `waited_s` is how long the try waited for its turn; this time does not count towards the limit for all
    tries."""

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
    """Return the result of `send`, retried while it raises `TransientFailure`, within `timeout_s` for all tries
    together.

    After the first failure, time is `uncharged`, because the service causes the wait. `send` gets the number of the try
    (from 1) and the seconds left; `again` is called before each wait. If no try succeeds, raises the last `problem`.
    """
    started_s, tries = clock.monotonic(), 1
    try:
        return await send(tries, timeout_s)
    except TransientFailure as passing:
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
            except TransientFailure as passing:
                failed = passing
