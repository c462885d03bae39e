"""Lets rLLM roll out an environment, as an agent flow next to rLLM's trainer or as a remote runtime.

    AgentTrainer(agent_flow=EnvironmentFlow("my_env.py"), evaluator=evaluate, …)

A task is a row with `task_id`. rLLM's gateway gives every rollout an address and records the tokens; the agent's loop,
the slots and the sealed grading work as in a run, so the evaluator only reads the reward (`evaluate`).

A rollout without a reward raises `Dropped` in the flow, and rLLM plays the rollout again. If it fails again, rLLM
raises an error or, with `raise_on_error=False`, keeps an episode without a trajectory. The remote runtime returns
`finished=False` with the termination reason `ERROR`. rLLM's engine writes the reward 0.0 into such a result. It leaves
the result out of training only if both `rllm.compact_filtering.enable` and `mask_error` are set, so set both.

Needs the package `rllm`, which is not on PyPI. Source: `rllm/types.py`, `rllm/engine/remote_runtime/protocol.py` of
August 2026.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.engine.remote_runtime.protocol import RemoteTaskResult, TaskSubmission
from rllm.eval.types import EvalOutput
from rllm.types import AgentConfig, Episode, Trajectory
from rllm.workflows.workflow import TerminationReason

from palaestra import JSON, ConfigError, Outcome, RolloutFunction, Scored
from palaestra_integrations.blame import reward_of

_REASONS = {
    Outcome.MAX_TURNS: TerminationReason.MAX_TURNS_EXCEEDED,
    Outcome.LENGTH: TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
    Outcome.BUDGET: TerminationReason.TIMEOUT,
}


class EnvironmentFlow:
    """An `AgentFlow`. `settings` are those of `palaestra.RolloutFunction`; `aclose` ends the run."""

    name = "palaestra"

    def __init__(self, env: object, **settings: Any) -> None:
        self._rollout = RolloutFunction(env, **settings)

    async def arun(self, task: Any, config: AgentConfig) -> Episode:
        """Play one rollout and return it with its reward. Raises `Dropped` if the rollout has no reward."""
        row = getattr(task, "metadata", None) or task
        result = await self._rollout(_task_id(row), config.base_url, model=config.model)
        reward = reward_of(result)
        assert isinstance(result, Scored)
        played = result.trajectory
        metadata = {"rollout_id": played.rollout_id, **played.verdict}
        trajectory = Trajectory(name=self.name, reward=reward, metadata=metadata)
        return Episode(task=row, trajectories=[trajectory], termination_reason=_termination_reason(result))

    async def aclose(self) -> None:
        """End the run."""
        await self._rollout.aclose()


def evaluate(task: Any, episode: Episode) -> EvalOutput:
    """Return the environment's reward for an episode. Pass this function to rLLM as the evaluator."""
    reward = episode.trajectories[0].reward
    return EvalOutput(reward=reward, is_correct=reward >= 1.0)


class EnvironmentRuntime:
    """A `RemoteAgentRuntime` whose rollouts are played in this process. `settings` are those of
    `palaestra.RolloutFunction`."""

    def __init__(self, env: object, **settings: Any) -> None:
        self._rollout = RolloutFunction(env, **settings)

    def initialize(self) -> None:
        """Do nothing: the run starts with the first task."""

    async def execute_tasks(
        self, submissions: Sequence[TaskSubmission], timeout: float | None = None
    ) -> list[RemoteTaskResult]:
        """Play all tasks concurrently. Returns one result for each, in their order."""
        return await asyncio.gather(*(self._execute_task(each, timeout) for each in submissions))

    async def _execute_task(self, submission: TaskSubmission, timeout: float | None) -> RemoteTaskResult:
        began = time.monotonic()
        made = RemoteTaskResult(finished=False, session_id=submission.session_id, task_id=submission.task_id)
        try:
            async with asyncio.timeout(timeout):
                result = await self._rollout(_task_id(submission.task), submission.inference_url)
        except TimeoutError:
            made.error, made.termination_reason = f"no result after {timeout:g} s", TerminationReason.ERROR
        else:
            if isinstance(result, Scored):
                made.finished, made.reward, made.termination_reason = True, result.reward, _termination_reason(result)
                made.metadata = result.trajectory.verdict
            else:
                made.error, made.termination_reason = f"{result.kind}: {result.error}", TerminationReason.ERROR
                made.metadata = {"blame": str(result.blame)}
        made.elapsed = time.monotonic() - began
        return made

    def shutdown(self) -> None:
        """Do nothing; `aclose` ends the run."""

    async def aclose(self) -> None:
        """End the run."""
        await self._rollout.aclose()


def _task_id(row: Mapping[str, JSON]) -> str:
    task = row.get("task_id")
    if not isinstance(task, str):
        raise ConfigError(f"a task must be a row with task_id, not {row!r:.100}")
    return task


def _termination_reason(result: Scored) -> TerminationReason:
    return _REASONS.get(result.trajectory.outcome, TerminationReason.ENV_DONE)
