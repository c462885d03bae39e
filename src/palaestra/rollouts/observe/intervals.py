"""95 % confidence intervals of rates and means.

Sources: E. B. Wilson (1927) for rates, which holds for few trials and at 0 and 1; Student's t with clustered errors for
means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964
"""The normal distribution's 97.5 % quantile: 95 % lie within it on both sides."""

_FEW = (12.706205, 4.302653, 3.182446, 2.776445)
"""The same of Student's distribution with 1 to 4 degrees of freedom."""


def rate_interval(count: float, trials: int) -> tuple[float, float]:
    """The Wilson interval of `count` in at least one trial, 0 to 1.

    `count` may be a sum of estimates between 0 and 1, one per trial: such a sum varies at most as much as a count does.
    """
    share, spread = count / trials, Z * Z / trials
    middle = (share + spread / 2) / (1 + spread)
    reach = Z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return (0.0 if count == 0 else middle - reach, 1.0 if count == trials else middle + reach)


def mean_interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The interval of the mean of all values, which correlate within a cluster (the rollouts of one task); None for
    fewer than two clusters. If all values are within 0 and 1, so is the interval.

    Source: the cluster-robust standard error of a mean with its small-sample factor, and Student's t with one degree of
    freedom less than there are clusters.
    """
    clusters = [cluster for cluster in clusters if cluster]
    if len(clusters) < 2:
        return None
    count = sum(map(len, clusters))
    mean = math.fsum(value for cluster in clusters for value in cluster) / count
    squares = math.fsum(math.fsum(value - mean for value in cluster) ** 2 for cluster in clusters)
    freedom = len(clusters) - 1
    reach = student(freedom) * math.sqrt(squares * len(clusters) / freedom) / count
    if all(0 <= value <= 1 for cluster in clusters for value in cluster):
        return max(0.0, mean - reach), min(1.0, mean + reach)
    return mean - reach, mean + reach


def clustered_rate_interval(clusters: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """The interval of the share of True in at least one trial, if trials correlate within a cluster: the union of
    `rate_interval`, which takes them as independent, and `mean_interval`, which has no width if all are equal."""
    trials = sum(map(len, clusters))
    low, high = rate_interval(sum(map(sum, clusters)), trials)
    wider = mean_interval(clusters) or (low, high)
    return min(low, wider[0]), max(high, wider[1])


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution, to two parts in ten thousand. Source: Abramowitz and Stegun,
    26.7.5."""
    if freedom <= len(_FEW):
        return _FEW[freedom - 1]
    square = Z * Z
    terms = (
        (square + 1) / 4,
        ((5 * square + 16) * square + 3) / 96,
        (((3 * square + 19) * square + 17) * square - 15) / 384,
        ((((79 * square + 776) * square + 1482) * square - 1920) * square - 945) / 92160,
    )
    return Z * (1 + math.fsum(term / float(freedom) ** power for power, term in enumerate(terms, 1)))
