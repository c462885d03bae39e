"""Each loss of the Tinker API against a computation in plain Python, and its gradient against differences."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

N = 7
LOW, HIGH = 0.8, 1.2


def _numbers(seed: int) -> dict[str, list[float]]:
    rng = random.Random(seed)
    return {
        "p": [-3 * rng.random() - 0.01 for _ in range(N)],
        "logprobs": [-3 * rng.random() - 0.01 for _ in range(N)],
        "advantages": [rng.uniform(-2, 2) for _ in range(N)],
        "weights": [rng.choice([0.0, 1.0, 0.5]) for _ in range(N)],
        "sequence_ratio_mask": [0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0],
        "recorded_logprobs": [-3 * rng.random() - 0.01 for _ in range(N)],
    }


def _clip(ratio: float) -> float:
    return min(max(ratio, LOW), HIGH)


def _each(value: Callable[[float, float, float], float], x: Mapping[str, list[float]], q: str = "logprobs") -> float:
    return sum(value(p, before, a) for p, before, a in zip(x["p"], x[q], x["advantages"], strict=True))


def _gspo(x: Mapping[str, list[float]]) -> float:
    inside = [p - q for p, q, m in zip(x["p"], x["logprobs"], x["sequence_ratio_mask"], strict=True) if m]
    ratio = math.exp(sum(inside) / len(inside))
    return -sum(min(ratio * a, _clip(ratio) * a) for a in x["advantages"])


VALUES: dict[str, Callable[[Mapping[str, list[float]]], float]] = {
    "cross_entropy": lambda x: -sum(p * w for p, w in zip(x["p"], x["weights"], strict=True)),
    "importance_sampling": lambda x: _each(lambda p, q, a: -math.exp(p - q) * a, x),
    "ppo": lambda x: _each(lambda p, q, a: -min(math.exp(p - q) * a, _clip(math.exp(p - q)) * a), x),
    "cispo": lambda x: _each(lambda p, q, a: -_clip(math.exp(p - q)) * a * p, x),
    "dro": lambda x: _each(lambda p, q, a: -(p * a - 0.5 * 0.05 * (p - q) ** 2), x),
    "gspo": _gspo,
    "stable_reinforce": lambda x: _each(lambda p, q, a: -min(math.exp(p - q), 2.0) * a * p, x, "recorded_logprobs"),
}
CONSTANT = {
    # What the gradient treats as a constant: the ratio before log p. The derivative by p is then minus ratio times A.
    "cispo": lambda p, q, a: -_clip(math.exp(p - q)) * a,
    "stable_reinforce": lambda p, q, a: -min(math.exp(p - q), 2.0) * a,
}
INPUTS = {
    "cross_entropy": ["weights"],
    "gspo": ["logprobs", "advantages", "sequence_ratio_mask"],
    "stable_reinforce": ["advantages", "recorded_logprobs"],
}


def _total(name: str, x: Mapping[str, list[float]], config: Mapping[str, float] | None = None) -> tuple[Any, Any]:
    from palaestra_train.tinker.losses import total

    p = torch.tensor(x["p"], dtype=torch.float64, requires_grad=True)
    inputs = {key: torch.tensor(x[key], dtype=torch.float64) for key in INPUTS.get(name, ["logprobs", "advantages"])}
    return total(name, p, inputs, config or {}), p


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", VALUES)
def test_the_value(name: str, seed: int) -> None:
    x = _numbers(seed)
    assert float(_total(name, x)[0].detach()) == pytest.approx(VALUES[name](x), rel=1e-9)


@pytest.mark.parametrize("name", sorted(VALUES.keys() - {"gspo"}))
def test_the_gradient(name: str) -> None:
    x = _numbers(11)
    loss, p = _total(name, x)
    loss.backward()
    for index in range(N):
        if name in CONSTANT:
            q = x["recorded_logprobs" if name == "stable_reinforce" else "logprobs"][index]
            expected = CONSTANT[name](x["p"][index], q, x["advantages"][index])
        else:
            above, below = ({**x, "p": [v + d * (i == index) for i, v in enumerate(x["p"])]} for d in (1e-6, -1e-6))
            expected = (VALUES[name](above) - VALUES[name](below)) / 2e-6
        assert float(p.grad[index]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_each_token_of_gspo_has_the_gradient_of_its_own_log_probability() -> None:
    x = {**_numbers(3), "logprobs": [v + 0.01 for v in _numbers(3)["p"]]}
    loss, p = _total("gspo", x)
    loss.backward()
    ratio = math.exp(-0.01)  # inside the bounds, so nothing is clipped
    assert p.grad.tolist() == pytest.approx([-ratio * a for a in x["advantages"]], rel=1e-9)


def test_bounds_come_from_the_settings_or_per_token_from_the_datum() -> None:
    from palaestra_train.tinker.losses import total

    x = {**_numbers(5), "advantages": [1.0] * N, "p": [-1.0] * N, "logprobs": [-2.0] * N}
    assert float(_total("ppo", x, {"clip_high_threshold": 1.5})[0].detach()) == pytest.approx(-1.5 * N)
    inputs = {name: torch.tensor(x[name]) for name in ("logprobs", "advantages")}
    inputs["clip_high_threshold"] = torch.tensor([2.0, *[1.0] * (N - 1)])
    assert float(total("cispo", torch.tensor(x["p"]), inputs, {})) == pytest.approx(2.0 + N - 1)


def test_weights_multiply_the_losses_of_policies() -> None:
    from palaestra_train.tinker.losses import total

    x = _numbers(7)
    inputs = {name: torch.tensor(x[name]) for name in ("logprobs", "advantages", "weights")}
    expected = sum(
        -math.exp(p - q) * a * w
        for p, q, a, w in zip(x["p"], x["logprobs"], x["advantages"], x["weights"], strict=True)
    )
    assert float(total("importance_sampling", torch.tensor(x["p"]), inputs, {})) == pytest.approx(expected, rel=1e-5)
