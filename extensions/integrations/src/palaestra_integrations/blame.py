"""Documents how each trainer learns that a rollout failed for a reason other than the policy, so that it drops the
sample.

An unscored rollout (`Unscored`) must not be trained on. The adapters in this folder follow the table `DROPPED`. For
other trainers, the table shows what your own adapter has to do.
"""

from __future__ import annotations

from collections.abc import Mapping

from palaestra import InfraError, Scored, Unscored

DROPPED: Mapping[str, str] = {
    "agent_lightning": "the rollout's state is `failed`, with the error as its message; no reward event is sent",
    "areal": "`run` raises, which rejects the sample",
    "atropos": "the rollout is not sent",
    "nemo_gym": "`mask_sample` is true, with `failure_kind` and `failure_reason`",
    "openenv": "`VerifyResult.env_reward` is None",
    "prime_rl": "the trace has an error",
    "rllm": "the flow raises; a remote result has `finished` False and the termination reason `ERROR` (`mask_error`)",
    "skyrl": "the loss mask is all zeros, and the stop reason is `error`",
    "slime": "`Sample.status` is `ABORTED`, `remove_sample` is set, and the reward is None",
    "tinker_cookbook": "the environment raises, which becomes a `RolloutError`",
    "trl": "the reward is None",
    "verifiers": "the trace has an error",
    "verl": "the response mask is all zeros, which `adv_estimator=grpo_scored` leaves out",
}
"""For each trainer, how it learns that a rollout failed for a reason other than the policy. A trainer that requires a
reward for such a rollout gets 0.0 and must leave the rollout out."""


class Dropped(InfraError):
    """A rollout without a reward, for trainers that drop a sample whose rollout raises. `kind` is the outcome and the
    blame, such as `api_error/engine`."""

    def __init__(self, unscored: Unscored) -> None:
        super().__init__(f"The rollout has no reward ({unscored.kind}): {unscored.error}")
        self.kind = unscored.kind


def reward_of(result: Scored | Unscored) -> float:
    """Return the reward of a rollout. Raises `Dropped` if the rollout has no reward."""
    if isinstance(result, Unscored):
        raise Dropped(result)
    return result.reward
