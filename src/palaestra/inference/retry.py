"""When to try a request again, and how long to wait before. Pure: no I/O, no sleeping.

Invariant: only what can pass by itself is tried again (rate limits, server errors, connection failures); what the
server understood and refused is not.
"""

from __future__ import annotations

import email.utils
import random
from dataclasses import dataclass

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
