"""Computes the losses of the Tinker API from the log-probabilities of one sequence's targets.

All losses are sums over positions. p is the probability under the trained model, q the probability under the model that
sampled, A the advantage; sg stops the gradient. Sources: the loss pages of the Tinker documentation
(tinker-docs.thinkingmachines.ai/tinker/losses) and the papers that they cite. The formula of `stable_reinforce` is this
server's own, because Thinking Machines does not publish one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

LossConfig: TypeAlias = Mapping[str, float]
"""Settings of a loss, by name."""

Loss: TypeAlias = "Callable[[Tensor, Mapping[str, Tensor], LossConfig], Tensor]"
"""Per-position losses from the targets' log-probabilities, the loss's inputs and its settings."""

_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of the ratio p/q, with PPO's usual values. A datum may give bounds per position, as inputs of the same
names."""


@dataclass(frozen=True, slots=True)
class LossKind:
    """A loss: its per-position function, the inputs that a datum needs in addition to `target_tokens`, its optional
    inputs, and the settings with their defaults."""

    positions: Loss
    needs: frozenset[str] = frozenset({"logprobs", "advantages"})
    may_have: frozenset[str] = frozenset({"weights"})
    settings: Mapping[str, float] = field(default_factory=dict)


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    """Return -w log p. `logprobs` and the weights are [N], or [N, K] with K targets per position. Without weights, w is
    1."""
    return -logprobs * inputs["weights"] if "weights" in inputs else -logprobs


def importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    """Return -(p/q) A: the policy gradient with the off-policy correction (REINFORCE where p = q)."""
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    """Return -min((p/q) A, clip(p/q) A). Schulman et al. 2017, arXiv 1707.06347, equation 7."""
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -(ratio * advantages).minimum(_clipped(ratio, inputs, config) * advantages)


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    """Return -sg(clip(p/q)) A log p. MiniMax 2025, arXiv 2506.13585, equation 4."""
    return -_clipped(_ratio(logprobs, inputs), inputs, config).detach() * inputs["advantages"] * logprobs


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    """Return -(A log p - beta/2 (log p/q)^2). Richemond et al. 2024, arXiv 2405.19107."""
    penalty = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * config["beta"] * penalty)


def gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    """Return -min(s A, clip(s) A): s is the geometric mean of p/q over the positions of `sequence_ratio_mask`, with the
    gradient of each token's own log p (GSPO-token). Zheng et al. 2025, arXiv 2507.18071, equations 13 and 14."""
    advantages, inside = inputs["advantages"], inputs["sequence_ratio_mask"] != 0
    difference = (logprobs.detach() - inputs["logprobs"])[inside]
    mean = difference.mean() if difference.numel() else difference.sum()
    ratio = (mean + logprobs - logprobs.detach()).exp()
    return -(ratio * advantages).minimum(_clipped(ratio, inputs, config) * advantages)


def stable_reinforce(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    """Return -sg(min(p/q, c)) A log p, where q is the probability that this server recorded when it sampled: REINFORCE
    with truncated importance weights (Espeholt et al. 2018, arXiv 1802.01561, rho of equation 1). The input
    `recorded_logprobs` comes from the sequences that the datum's spans name."""
    ratio = (logprobs.detach() - inputs["recorded_logprobs"]).exp()
    return -ratio.clamp(max=config["clip_high_threshold"]) * inputs["advantages"] * logprobs


def _ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clipped(ratio: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    def bound(name: str) -> Tensor:
        return inputs[name] if name in inputs else ratio.new_tensor(config[name])

    return ratio.clamp(min=bound("clip_low_threshold"), max=bound("clip_high_threshold"))


_CLIP_INPUTS = frozenset({"weights", *_CLIPS})

LOSSES: dict[str, LossKind] = {
    "cross_entropy": LossKind(cross_entropy, needs=frozenset()),
    "importance_sampling": LossKind(importance_sampling),
    "ppo": LossKind(ppo, may_have=_CLIP_INPUTS, settings=_CLIPS),
    "cispo": LossKind(cispo, may_have=_CLIP_INPUTS, settings=_CLIPS),
    "dro": LossKind(dro, settings={"beta": 0.05}),
    "gspo": LossKind(
        gspo,
        needs=frozenset({"logprobs", "advantages", "sequence_ratio_mask"}),
        may_have=_CLIP_INPUTS,
        settings=_CLIPS,
    ),
    "stable_reinforce": LossKind(
        stable_reinforce,
        needs=frozenset({"advantages"}),
        may_have=frozenset({"weights", "logprobs"}),
        settings={"clip_high_threshold": 2.0},
    ),
}
"""The losses by the names of the API. `custom` is missing because the SDK computes custom losses itself, from `forward`
and a weighted `cross_entropy`."""


def has_gradient(name: str, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return `[N]`: the positions at which the loss of one datum may have a gradient. Without an advantage there is
    none, except in `dro`, and without a weight there is none in any loss."""
    live = inputs["target_tokens"].new_ones(inputs["target_tokens"].shape, dtype=bool)
    for factor in ("weights", "advantages"):
        if factor in inputs and (factor, name) != ("advantages", "dro"):
            live = live & (inputs[factor] != 0)
    return live if live.ndim == 1 else live.any(dim=1)


def total(name: str, logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    """Return the loss of one datum. For policy losses, each position's loss is multiplied by the datum's `weights`, if
    there are any."""
    kind = LOSSES[name]
    positions = kind.positions(logprobs, inputs, {**kind.settings, **config})
    if "weights" in inputs and name != "cross_entropy":
        positions = positions * inputs["weights"]
    return positions.sum()
