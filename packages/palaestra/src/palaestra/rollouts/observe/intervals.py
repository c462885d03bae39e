"""The 95% confidence interval of every score: mean rewards, pass@k, shares, differences.

Tasks are the sample: rollouts of one task correlate, so more of them add little certainty. Values without bounds have
the t interval m -+ t * sqrt(V). All other intervals are Wilson's, with the effective number of trials in place of their
number, and Student's t:

    m      the mean of all values, mapped to 0..1 by the values' bounds
    V      its variance, robust to clusters: G / (G - 1) * sum over tasks of (sum_i - n_i * m)^2 / N^2, and at least the
           variance that N independent values would have
    n      m * (1 - m) / V, the effective number of trials
    t      the 97.5% quantile of Student's distribution with G - 1 degrees of freedom
    bounds (m + t^2 / 2n -+ t * sqrt(m * (1 - m) / n + t^2 / 4n^2)) / (1 + t^2 / n)

with G tasks, n_i values in task i and N values. If nothing varies, or for one task, V is not measured. The bounds then
follow from Wilson's lower bound q = G / (G + z^2) for the share of tasks that are like those seen: q * m + (1 - q)
times each bound of a value. So 5 tasks without a pass give 0 to 0.434, and no interval has zero width.

Sources: E. B. Wilson (1927); N. Dean and M. Pagano (2015), Journal of Survey Statistics and Methodology 3(4), for the
effective number of trials in clustered samples; K.-Y. Liang and S. Zeger (1986) for V.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Z = 1.959964
"""The normal distribution's 97.5% quantile: 95% of all values lie between `-Z` and `Z`."""

_FEW = (12.706205, 4.302653, 3.182446, 2.776445)
"""The same quantile of Student's distribution with 1 to 4 degrees of freedom."""

Interval = tuple[float, float]


class Cluster(NamedTuple):
    """The values of one task: their sum and number."""

    total: float
    size: float


def clustered_interval(clusters: Iterable[Cluster], least_variance: float, bounds: Interval | None) -> Interval | None:
    """Return the interval of the mean of all values. `least_variance` is the variance of the mean of as many
    independent values; `bounds` are the bounds of one value. Without bounds, the result is the t interval, or None for
    one task or equal values. The result is also None if there are no values."""
    totals, sizes = _columns(clusters)
    tasks, count = len(sizes), math.fsum(sizes)
    if not tasks:
        return None
    mean = math.fsum(totals) / count
    variance = 0.0
    if tasks > 1:
        squares = math.fsum((total - size * mean) ** 2 for total, size in zip(totals, sizes, strict=True))
        variance = max(squares * tasks / (tasks - 1) / count**2, least_variance)
        if variance < 1e-24:  # rounding of equal values
            variance = 0.0
    if bounds is None:
        reach = student(tasks - 1) * math.sqrt(variance) if variance else 0.0
        return (mean - reach, mean + reach) if reach else None
    low, high = bounds
    width = high - low
    if not variance:
        like = tasks / (tasks + Z * Z)
        return like * mean + (1 - like) * low, like * mean + (1 - like) * high
    share, variance = (mean - low) / width, variance / width**2
    square = student(tasks - 1) ** 2
    per_trial = variance / (share * (1 - share))
    middle = share + square * per_trial / 2
    reach = math.sqrt(square * variance + (square * per_trial / 2) ** 2)
    shrunk = 1 + square * per_trial
    # Rounding may lead a little beyond the bounds of a value.
    return low + width * max(0.0, (middle - reach) / shrunk), low + width * min(1.0, (middle + reach) / shrunk)


def _columns(clusters: Iterable[Cluster]) -> tuple[array[float], array[float]]:
    """Return the sum and the number of values of each task that has values, in arrays because a run may have very many
    tasks."""
    totals, sizes = array("d"), array("d")
    for total, size in clusters:
        if size:
            totals.append(total)
            sizes.append(size)
    return totals, sizes


_LARGEST = 1e150  # squares of larger values are not numbers


def mean_interval(tasks: Iterable[Sequence[float]]) -> Interval | None:
    """Return the interval of the mean of all values, which are given by task. The bounds of a value are 0 and 1 if all
    values lie between them; otherwise values have no bounds."""
    values, totals, sizes = array("d"), array("d"), array("d")
    for each in tasks:
        values.extend(each)
        totals.append(math.fsum(each))
        sizes.append(len(each))
    if not values:
        return None
    if max(map(abs, values)) > _LARGEST:
        return None
    bounds = (0.0, 1.0) if min(values) >= 0 and max(values) <= 1 else None
    mean = math.fsum(values) / len(values)
    least = math.fsum((value - mean) ** 2 for value in values) / len(values) ** 2
    return clustered_interval(map(Cluster, totals, sizes), least, bounds)


def share_interval(tasks: Iterable[Cluster]) -> Interval | None:
    """Return the interval of a share of trials. Each cluster has the number of a task's trials that count and the
    number of all its trials."""
    totals, sizes = _columns(tasks)
    count, trials = math.fsum(totals), math.fsum(sizes)
    least = count / trials * (1 - count / trials) / trials if trials else 0.0
    return clustered_interval(map(Cluster, totals, sizes), least, (0.0, 1.0))


def pass_interval(rates: Sequence[float], draws: float) -> Interval | None:
    """Return the interval of the mean of the tasks' pass@k, estimated from a total of `draws` draws of k attempts."""
    mean = math.fsum(rates) / len(rates)
    return clustered_interval((Cluster(rate, 1) for rate in rates), mean * (1 - mean) / draws, (0.0, 1.0))


def with_interval(name: str, value: float, interval: Interval | None) -> dict[str, float]:
    """Return a metric, with `NAME/low` and `NAME/high` if there is an interval."""
    return {name: value} | ({} if interval is None else {f"{name}/low": interval[0], f"{name}/high": interval[1]})


def interval_of(figures: Mapping[str, float], name: str) -> Interval | None:
    """Return the interval of a metric that `with_interval` made; None if it has none."""
    return (figures[f"{name}/low"], figures[f"{name}/high"]) if f"{name}/low" in figures else None


def in_words(interval: Interval | None, form: str = ".3f") -> str:
    """Return the interval as the text ` (LOW to HIGH)`; empty if there is none."""
    return "" if interval is None else f" ({interval[0]:{form}} to {interval[1]:{form}})"


def student(freedom: int) -> float:
    """Return the 97.5% quantile of Student's distribution, to two parts in ten thousand. Source: Abramowitz and
    Stegun, 26.7.5."""
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
