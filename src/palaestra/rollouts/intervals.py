"""How sure a rate or a mean is: 95 % confidence intervals.

Not for comparing two runs. Sources: E. B. Wilson (1927) for rates, which holds for few trials and at 0 and 1; the
normal approximation with clustered errors for means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964
"""The normal distribution's 97.5 % quantile: 95 % lie within it on both sides."""


def rate_interval(count: float, trials: int) -> tuple[float, float]:
    """The Wilson interval of `count` in at least one trial, 0 to 1.

    `count` may be a sum of estimates between 0 and 1, one per trial: such a sum varies at most as much as a count does.
    """
    share, spread = count / trials, Z * Z / trials
    middle = (share + spread / 2) / (1 + spread)
    reach = Z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return (0.0 if count == 0 else middle - reach, 1.0 if count == trials else middle + reach)


def mean_interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The interval of the mean of all values, which are alike within a cluster (the rollouts of one task); None for
    fewer than two clusters. Source: the cluster-robust standard error of a mean, with its small-sample factor.
    """
    clusters = [cluster for cluster in clusters if cluster]
    if len(clusters) < 2:
        return None
    count = sum(map(len, clusters))
    mean = math.fsum(value for cluster in clusters for value in cluster) / count
    squares = math.fsum(math.fsum(value - mean for value in cluster) ** 2 for cluster in clusters)
    reach = Z * math.sqrt(squares * len(clusters) / (len(clusters) - 1)) / count
    return mean - reach, mean + reach
