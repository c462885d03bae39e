"""Computes pass@k, the pass rate and the mean reward from the rewards of tasks, with the intervals of
`intervals.py`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

from palaestra.core.types import JSON
from palaestra.rollouts.observe.intervals import Cluster, mean_interval, pass_interval, share_interval, with_interval

PASSED = 1.0


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the probability that at least one of `k` attempts passes, if `passed` of `n` attempts passed. `n` must be
    at least `k`. This is the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374), eq. 1."""
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be computed from {passed} passes in {n} attempts")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def pass_metrics(rewards: Iterable[Sequence[float]], attempts: int) -> dict[str, JSON]:
    """Return `scored`, `pass_rate`, `mean_reward`, and `pass@k` for k = 1, 2, 4 … and `attempts`, with their intervals.
    `rewards` has the scored rewards of each task and is iterated over several times. A metric without data is left out.
    A task with fewer than k rewards is left out of pass@k; `pass@k/tasks` counts the other tasks."""
    sizes = array("q", map(len, rewards))  # arrays, because a run may have very many tasks
    passes = array("q", (sum(reward >= PASSED for reward in scored) for scored in rewards))
    total, passed = sum(sizes), sum(passes)
    found: dict[str, JSON] = {"scored": total}
    if total:
        shares = share_interval(map(Cluster, passes, sizes))
        found |= with_interval("pass_rate", passed / total, shares)
        found |= with_interval("mean_reward", sum(map(sum, rewards)) / total, mean_interval(rewards))
    for k in sorted({attempts, *(1 << power for power in range(attempts.bit_length()) if 1 << power <= attempts)}):
        rates = array("d", (pass_at_k(n, each, k) for n, each in zip(sizes, passes, strict=True) if n >= k))
        if rates:
            interval = pass_interval(rates, sum(n for n in sizes if n >= k) / k)
            found |= with_interval(f"pass@{k}", sum(rates) / len(rates), interval)
            found[f"pass@{k}/tasks"] = len(rates)
    return found
