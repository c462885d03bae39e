"""Statistics, advantages and selection, which Atropos environments import from `atroposlib.utils`. Functions that
return arrays need numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    import numpy as np


def get_std_min_max_avg(name: str, data: Sequence[float], metrics_dict: dict[str, JSON]) -> dict[str, JSON]:
    """Add `NAME_mean`, `NAME_std` (of the whole population), `NAME_max` and `NAME_min` to the metrics and return
    them."""
    mean = sum(data) / len(data)
    variance = sum((value - mean) ** 2 for value in data) / len(data)
    found = {"mean": mean, "std": variance**0.5, "max": max(data), "min": min(data)}
    metrics_dict.update({f"{name}_{key}": value for key, value in found.items()})
    return metrics_dict


def pass_at_k(m: int, c: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of `k` samples is correct, from `m` samples of which `c`
    are correct (Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1)."""
    if m - c < k:
        return 1.0
    missed = 1.0
    for count in range(m - c + 1, m + 1):
        missed *= 1.0 - k / count
    return 1.0 - missed


def select_best_index(
    primary_scores: Sequence[float],
    secondary_scores: Sequence[float],
    primary_higher_is_better: bool = True,
    secondary_lower_is_better: bool = True,
) -> int:
    """Return the index of the best item; secondary scores decide between equal primary scores, and then the first item
    wins. Raises `ValueError` for empty lists and for lists of different lengths."""
    if not primary_scores or not secondary_scores:
        raise ValueError("Input score lists cannot be empty.")
    if len(primary_scores) != len(secondary_scores):
        raise ValueError("Primary and secondary score lists must have the same length.")
    first, second = 1 if primary_higher_is_better else -1, -1 if secondary_lower_is_better else 1
    ranks = [(first * one, second * two) for one, two in zip(primary_scores, secondary_scores, strict=True)]
    return max(range(len(ranks)), key=ranks.__getitem__)


def allclose_to_first(
    values: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False, return_vector: bool = False
) -> Any:
    """Return whether all arrays are close to the first one; with `return_vector`, one answer per array."""
    import numpy as np

    arrays = np.asarray(values)
    close = np.isclose(arrays, arrays[0], rtol=rtol, atol=atol, equal_nan=equal_nan)
    each = close.reshape(len(arrays), -1).all(axis=1)
    return each if return_vector else bool(each.all())


def compute_stats(data: Sequence[Any]) -> dict[str, float]:
    """Return the `mean` and the `var` (of the whole population) of all numbers in nested lists. Raises `ValueError` if
    there is none, or if anything else is in the lists."""
    numbers = list(_flat(data))
    if not numbers:
        raise ValueError("No numerical elements found in the input data.")
    mean = sum(numbers) / len(numbers)
    return {"mean": mean, "var": sum(value * value for value in numbers) / len(numbers) - mean * mean}


def _flat(data: Any) -> Iterator[float]:
    if isinstance(data, int | float):
        yield data
    elif isinstance(data, list):
        for each in data:
            yield from _flat(each)
    else:
        raise ValueError(f"Invalid element type encountered: {type(data)}")


def compute_discounted_returns(rewards: Any, gamma: float) -> np.ndarray[Any, Any]:
    """Return, for each step, its reward and the later ones, discounted by `gamma` per step."""
    import numpy as np

    given = rewards if isinstance(rewards, np.ndarray) else np.array(rewards, dtype=np.float32)
    returns, following = np.empty_like(given), 0.0
    for step in range(len(given) - 1, -1, -1):
        following = given[step] + gamma * following
        returns[step] = following
    return returns


def compute_grpo_process_supervision_advantages(
    rewards: Sequence[Sequence[float]], gamma: float | None = None, std_tol: float = 1e-8
) -> list[np.ndarray[Any, Any]]:
    """Return the advantages of each step of each trajectory: the sum of its normalized reward and the later ones,
    discounted if `gamma` is set (Shao et al. 2024, DeepSeekMath, section 4.1.3). Raises `ValueError` if all rewards are
    equal up to `std_tol`."""
    import numpy as np

    found = compute_stats(rewards)
    std = found["var"] ** 0.5
    if std < std_tol:
        raise ValueError(f"`std` is smaller than tolerance of {std_tol}.")
    normalized = [(np.array(trajectory) - found["mean"]) / std for trajectory in rewards]
    if gamma is None:
        return [np.cumsum(steps[::-1])[::-1] for steps in normalized]
    return [compute_discounted_returns(steps, gamma) for steps in normalized]
