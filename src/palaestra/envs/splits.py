"""Tasks that are kept for `evaluate`: which, and the setting that says how many.

A task is drawn by its id and the seed alone, so it stays on its side whatever the order of the data set, whatever else
is in it, and on whatever machine. Invariant: with a share above zero no task is both trained on and evaluated.
"""

from __future__ import annotations

import hashlib

from pydantic import Field

from palaestra.envs.config.fields import HermesAgentEnvConfig


class HeldOutConfig(HermesAgentEnvConfig):
    """Settings of environments that know their tasks by their ids."""

    held_out: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the tasks, drawn from the seed, that only `evaluate` has; 0: all serve both.",
    )


def is_held_out(task_id: str, config: HeldOutConfig) -> bool:
    """Whether the task is kept for `evaluate`."""
    digest = hashlib.sha256(f"{config.seed}:{task_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < config.held_out * 2**64


def serves(task_id: str, config: HeldOutConfig, *, evaluating: bool) -> bool:
    """Whether the task is one for this command."""
    return config.held_out == 0 or is_held_out(task_id, config) == evaluating
