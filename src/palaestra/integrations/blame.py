"""How each trainer is told that a rollout is not the policy's fault, so that it drops the sample.

An unscored rollout (`Unscored`) never becomes a reward. The adapters in this folder follow this table; for trainers
without one it says what an adapter of your own has to do.
"""

from __future__ import annotations

from collections.abc import Mapping

DROPPED: Mapping[str, str] = {
    "agent_lightning": "the rollout's state is `failed`, with the error as its message; no reward event is sent",
    "areal": "`run` raises, which rejects the sample",
    "atropos": "the rollout is not sent",
    "openenv": "`VerifyResult.env_reward` is None",
    "prime_rl": "the trace has an error",
    "rllm": "`finished` is False, and `termination_reason` names the outcome and the blame",
    "skyrl": "the loss mask is all zeros, and the stop reason is `error`",
    "slime": "`Sample.status` is `ABORTED`, and `remove_sample` is set",
    "tinker_cookbook": "the environment raises, which becomes a `RolloutError`",
    "trl": "the reward is None",
    "verifiers": "the state has an error",
    "verl": "the response mask is all zeros",
}
"""How each trainer is told that a rollout is not the policy's fault. None of them gets a reward for it."""
