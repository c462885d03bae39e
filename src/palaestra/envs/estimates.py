"""How often a task is solved, and how sure that is. Does no I/O.

`pass_at_k` is the unbiased estimate of "at least one of k attempts passes" from n of them (Chen et al. 2021,
arXiv:2107.03374, eq. 1). `interval` is Wilson's score interval for a mean over tasks: a mean of numbers between 0 and 1
varies at most as much as one of passes and failures does, so it is never too narrow for the tasks being a sample.
"""

from __future__ import annotations

import math

Z_95 = 1.959964


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that at least one of `k` attempts passes, where `passed` of `n >= k` did."""
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be told from {passed} of {n}")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def interval(mean: float, count: int, z: float = Z_95) -> tuple[float, float]:
    """The score interval of a mean of `count` numbers between 0 and 1 (Wilson 1927)."""
    if count < 1 or not 0 <= mean <= 1:
        raise ValueError(f"no interval for a mean of {mean} over {count}")
    spread = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    middle, scale = mean + z * z / (2 * count), 1 + z * z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
