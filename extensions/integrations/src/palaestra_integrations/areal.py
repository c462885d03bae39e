"""Lets AReaL roll out an environment as an agent.

    trainer.train(workflow=Agent("my_env.py", agent="codex"))

Each row of AReaL's data set has a `task_id`. AReaL's proxy gives every rollout an address with a key, and records the
tokens; the agent's loop, the slots and the sealed grading work as in a run. A rollout without a reward raises
`Dropped`, which rejects the sample. Only the proxy mode `inline` works, because the run uses the worker's event loop.

Source: `OpenAIProxyWorkflow` of AReaL 1.0.4. This module does not import AReaL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palaestra import JSON, ConfigError, RolloutFunction
from palaestra_integrations.blame import reward_of


class Agent:
    """The workflow to pass to AReaL. `settings` are those of `palaestra.RolloutFunction`; `aclose` ends the run."""

    def __init__(self, env: object, **settings: Any) -> None:
        self._rollout = RolloutFunction(env, **settings)

    async def run(self, data: Mapping[str, JSON], **extra_kwargs: Any) -> float:
        """Play one rollout of the task `data["task_id"]` and return its reward. Raises `Dropped` if the rollout has no
        reward, and `ConfigError` for an unknown task or if AReaL passed no address."""
        base_url = extra_kwargs.get("base_url")
        if not base_url:
            raise ConfigError("AReaL passed no base_url for the rollout: use the proxy mode 'inline'")
        # The proxy serves chat completions at its root, without /v1.
        address = f"{base_url.rstrip('/')}/chat/completions"
        result = await self._rollout(data["task_id"], address, extra_kwargs.get("api_key") or "", model="default")
        return float(reward_of(result))

    async def aclose(self) -> None:
        """End the run."""
        await self._rollout.aclose()
