"""How often a task is solved in several attempts. Does no I/O.

Not for how sure that is: `rollouts/intervals.py`.
"""

from __future__ import annotations

import math


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that at least one of `k` attempts passes, where `passed` of `n >= k` did.

    The unbiased estimate of Chen et al. 2021 (arXiv:2107.03374), eq. 1.
    """
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be told from {passed} of {n}")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)
