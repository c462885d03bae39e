"""Lets OpenEnv drive rollouts of an environment: provides sessions with tools and a reward, and traces of exact tokens.

    factory = SessionFactory(env)
    session = factory.create(task_id)          # initial_messages, list_tools, call_tool, verify, close

The harness owns the agent's loop; the tools, the slots and the sealed grading work as in a run. `env_reward` is None
for an unscored rollout, which OpenEnv leaves out. `training_trace` returns the tokens of a rollout, if they were
recorded.

Needs the package `openenv`. Source: `openenv.core.harness` of OpenEnv 0.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, VerifyResult
from openenv.core.harness.training import TrainingTrace, TrainingTurn

from palaestra import JSON, ConfigError, InfraError, Message, Session, SyncPlay, Trajectory
from palaestra_integrations.turns import sampled_turns
from palaestra_slots import Blame


class SessionFactory(ResourceSessionFactory["PlayedSession"]):  # type: ignore[misc]
    """Creates the sessions of one run. `settings` are those of `palaestra.Session`, except those that select a policy
    or a model. A context manager; `close` ends the run."""

    def __init__(self, env: object, **settings: JSON) -> None:
        self._opened = ExitStack()
        self._session = self._opened.enter_context(Session(env, policy="caller", **settings))

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._session.path

    def create(self, task: JSON, seed: int | None = None, episode_id: str | None = None) -> PlayedSession:
        """Begin a rollout of a task, which is given by its id or by a row with `task_id`. `seed` is ignored, because
        the run has its own seed. Raises `ConfigError` for an unknown task."""
        task_id = task.get("task_id") if isinstance(task, Mapping) else task
        if not isinstance(task_id, str):
            raise ConfigError(f"a task must be an id or a row with task_id, not {task!r:.100}")
        tools = [
            Tool(
                name=each["function"]["name"],
                description=each["function"].get("description", ""),
                input_schema=each["function"].get("parameters", {}),
            )
            for each in self._session.tools(task_id)
        ]
        try:
            return PlayedSession(self._session.play(task_id), tools)
        except InfraError as error:
            return PlayedSession(None, tools, error)

    def close(self) -> None:
        """End the run. Rollouts that have not been verified are cancelled."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PlayedSession(ResourceSession):  # type: ignore[misc]
    """One rollout. `failure` is the reason why the rollout could not begin; such a rollout has neither tool results nor
    a reward."""

    def __init__(self, play: SyncPlay | None, tools: list[Tool], failure: InfraError | None = None) -> None:
        self._play, self._tools, self._failure = play, tools, failure
        self.trajectory: Trajectory | None = None

    def initial_messages(self) -> list[Message]:
        return [] if self._play is None else [dict(message) for message in self._play.messages]

    def list_tools(self) -> list[Tool]:
        return list(self._tools)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. Returns the text that a model would read, including errors of the call; `error` is set only if
        the rollout has ended or could not begin."""
        if self._play is None:
            return ToolResult(error=str(self._failure), done=True)
        try:
            return ToolResult(data=self._play.call(name, arguments))
        except InfraError as error:
            return ToolResult(error=str(error), done=True)

    def verify(self, transcript: list[Message], final_state: JSON = None) -> VerifyResult:
        """Seal and grade the rollout. The transcript's last assistant message becomes the rollout's last message."""
        said = [message.get("content") for message in transcript if message.get("role") == "assistant"]
        last = said[-1] if said and isinstance(said[-1], str) else ""
        if self._play is not None:
            try:
                self.trajectory = self._play.finish(last)
            except InfraError as error:
                self._failure = error
        done = self.trajectory
        if done is None:
            artifacts = {"blame": getattr(self._failure, "blame", Blame.RUN), "error": str(self._failure)}
            return VerifyResult(env_reward=None, done=True, artifacts=artifacts)
        return verify_result(done)

    def close(self) -> None:
        """End the session. A rollout that has not been verified is graded first, with an empty last message."""
        if self.trajectory is None and self._failure is None:
            self.verify([])


def verify_result(trajectory: Trajectory) -> VerifyResult:
    """Return the result of a graded rollout. `env_reward` is None for an unscored rollout, which OpenEnv leaves out.
    The artifacts contain the `official` verdict and the `labels` if the rollout has them."""
    return VerifyResult(
        env_reward=trajectory.reward if trajectory.scored else None,
        done=True,
        metrics=dict(trajectory.metrics),
        artifacts={
            "rollout_id": trajectory.rollout_id,
            "outcome": str(trajectory.outcome),
            "blame": None if trajectory.blame is None else str(trajectory.blame),
            "error": trajectory.error,
            **trajectory.verdict,
        },
    )


def training_trace(trajectory: Trajectory) -> TrainingTrace:
    """Return the model calls of a rollout with their tokens. Each sampled token occurs once, with the engine's
    log-probability.

    Raises `ConfigError` for a rollout without recorded tokens.
    """
    return TrainingTrace(
        turns=[
            TrainingTurn(
                node_id=f"{trajectory.rollout_id}:{turn.number}",
                prompt_token_ids=turn.prompt_ids,
                completion_token_ids=turn.completion_ids,
                per_token_logps=turn.logprobs,
                loss_mask=[0] * len(turn.prompt_ids) + [1] * len(turn.completion_ids),
                metadata={"segment": turn.segment, "reason": turn.reason, "finish_reason": turn.finish_reason},
            )
            for turn in sampled_turns(trajectory)
        ]
    )
