"""Lets verl roll out an environment with verl's own model servers; verl gets exact tokens and the environment's
rewards.

    # agent_loop_config_path                        # and in the data: agent_name "palaestra", and task_id
    - name: palaestra
      _target_: palaestra_integrations.verl.EnvironmentLoop
      env: my_env.py
      settings: {slots: 8}

The `reward_extra_info` of each sample has the `official` verdict and the names of the `labels`. verl cannot mark a
sample as dropped, so an unscored rollout has a response of one masked token and the reward 0.0. With
`adv_estimator=grpo_scored`, GRPO leaves such rows out: they are neither trained on nor part of their group's mean.
`VERL_USE_EXTERNAL_MODULES=palaestra_integrations.verl` registers this estimator. verl's other estimators count the
reward 0.0.

Needs the package `verl`. Source: `AgentLoopBase`, `LLMServerClient` and `compute_grpo_outcome_advantage` of verl 0.9.1.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

from palaestra import JSON, ConfigError, Group, Session, Trajectory, training_rows
from palaestra_slots import EngineReplyError
from palaestra_tokens import APIServerConfig, Sampled, TokenChat

_ASKED: ContextVar[tuple[Any, Mapping[str, Any], str]] = ContextVar("verl_asked")
"""The rollout's client of the model servers, its sampling settings, and the id that keeps the rollout on one server."""


class _ServerClient(TokenChat):
    """The engine of a run, which samples from verl's own model servers through verl's client."""

    async def start(self) -> None:
        """Do nothing: the servers are already running."""

    async def aclose(self) -> None:
        """Do nothing: the servers end with training."""

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        client, wanted, name = _ASKED.get()
        ours = {each: sampling[each] for each in ("max_tokens", "stop_token_ids") if sampling.get(each)}
        asked = {**wanted, **ours, "logprobs": True}
        output = await client.generate(request_id=name, prompt_ids=list(input_ids), sampling_params=asked)
        ids, logprobs = output.token_ids, output.log_probs
        if logprobs is None or len(logprobs) != len(ids):
            raise EngineReplyError(f"{name}: verl's server sent {len(ids)} tokens without a log-probability for each")
        ended = bool(ids) and ids[-1] in sampling.get("stop_token_ids", ())
        reason = "abort" if output.stop_reason == "aborted" else "stop" if ended else "length"
        version = output.extra_fields.get("global_steps")
        return Sampled(ids, logprobs, reason, "" if version is None else str(version))


class EnvironmentLoop(AgentLoopBase):  # type: ignore[misc]
    """verl's agent loop for one rollout. `settings` are those of `palaestra.Session`, except those that select a policy
    or a model. All rollouts of a worker with the same environment and settings belong to one run."""

    _sessions: ClassVar[dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Task[Session]]]] = {}

    def __init__(self, *args: Any, env: str, settings: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._env, self._settings = env, dict(settings or {})

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play one rollout of the row's task and return its output. Raises `ConfigError` for a row without `task_id`,
        and for a rollout of several segments (sub-agents, compaction), because verl accepts only one."""
        task = kwargs.get("task_id") or (kwargs.get("extra_info") or {}).get("task_id")
        if not task:
            raise ConfigError("neither the row nor its extra_info has a task_id; add it to the data set")
        _ASKED.set((self.server_manager, sampling_params, uuid.uuid4().hex))
        (group,) = await (await self._session()).roll_out(str(task), group_size=1)
        return self._output(group)

    async def _session(self) -> Session:
        """Return the worker's run for this environment and these settings. The first rollout starts the run."""
        key, loop = json.dumps([self._env, self._settings], sort_keys=True, default=str), asyncio.get_running_loop()
        known = self._sessions.get(key)
        if known is None or known[0] is not loop:
            known = self._sessions[key] = loop, asyncio.ensure_future(self._open_session())
        return await asyncio.shield(known[1])

    async def _open_session(self) -> Session:
        names = self._settings.keys() & APIServerConfig.model_fields.keys()
        config = APIServerConfig(model_name="verl", **{name: self._settings[name] for name in names})
        settings = {name: value for name, value in self._settings.items() if name not in names}
        longest = {"max_token_length": self.rollout_config.response_length, "max_infra_rate": 1.0}
        engine = _ServerClient(config, tokenizer=self.tokenizer)
        return await Session(self._env, server=engine, **{**longest, **settings}).__aenter__()

    def _output(self, group: Group) -> AgentLoopOutput:
        trajectory = group.trajectories[0] if group.trajectories else None
        rows = training_rows(trajectory) if trajectory is not None and trajectory.scored else []
        if len(rows) > 1:
            reasons = ", ".join(row.reason for row in rows)
            raise ConfigError(f"{rows[0].rollout_id} has {len(rows)} segments ({reasons}), but verl accepts only one")
        empty = [self.tokenizer.eos_token_id]
        name = group.group_id if trajectory is None else trajectory.rollout_id
        extra = {"rollout_id": name, "reward_extra_info": _judged(trajectory)}
        given: dict[str, Any] = {"metrics": AgentLoopMetrics(), "extra_fields": extra}
        if not rows or trajectory is None:
            lists = {"prompt_ids": empty, "response_ids": empty, "response_mask": [0], "response_logprobs": [0.0]}
            return AgentLoopOutput(**lists, reward_score=0.0, num_turns=0, **given)
        (row,) = rows
        most = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.completion_ids[:most],
            response_mask=row.mask[:most],
            response_logprobs=None if row.logprobs is None else row.logprobs[:most],
            reward_score=row.reward,
            num_turns=len(trajectory.turns),
            **given,
        )


def _judged(trajectory: Trajectory | None) -> dict[str, Any]:
    """Return the official verdict (the reward if there is no other, 0.0 if unscored) and the names of the labels. verl
    needs the same keys for every sample."""
    if trajectory is None:
        return {"official": 0.0, "labels": ""}
    return {"official": trajectory.official_reward or 0.0, "labels": ",".join(each.name for each in trajectory.labels)}


@register_adv_est("grpo_scored")  # type: ignore[untyped-decorator]
def grpo_scored(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return verl's GRPO advantages over the rows with a trained token; other rows have the advantage 0. Shapes are
    those of `compute_grpo_outcome_advantage`: rewards and mask `[B, T]`, index `[B]`."""
    scored = response_mask.bool().any(dim=1)
    if (config := settings.get("config")) is not None:
        settings["norm_adv_by_std_in_grpo"] = config.get("norm_adv_by_std_in_grpo", True)
    advantages = torch.zeros_like(token_level_rewards)
    if scored.any():
        rows = scored.cpu().numpy()
        kept, _ = compute_grpo_outcome_advantage(
            token_level_rewards[scored], response_mask[scored], index[rows], **settings
        )
        advantages[scored] = kept
    return advantages, advantages
