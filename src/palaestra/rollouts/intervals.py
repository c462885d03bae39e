"""How sure a rate or a mean is: 95 % confidence intervals.

Not for comparing two runs. Sources: E. B. Wilson (1927) for rates, which holds for few trials and at 0 and 1; the
normal approximation for means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964
"""The normal distribution's 97.5 % quantile: 95 % lie within it on both sides."""


def rate_interval(count: int, trials: int) -> tuple[float, float]:
    """The Wilson interval of `count` in at least one trial, 0 to 1."""
    share, spread = count / trials, Z * Z / trials
    middle = (share + spread / 2) / (1 + spread)
    reach = Z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return (0.0 if count == 0 else middle - reach, 1.0 if count == trials else middle + reach)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The interval of the mean of values that are drawn independently; None for fewer than two."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    reach = Z * math.sqrt(variance / len(values))
    return mean - reach, mean + reach
