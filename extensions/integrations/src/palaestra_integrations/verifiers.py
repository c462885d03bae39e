"""Lets verifiers play an environment: the environment's tasks are a taskset, and Palaestra's rollouts are a harness.

    # my_environment.py, then: eval my_environment --env.taskset.env my_env.py --env.agent.runtime.type subprocess
    from palaestra_integrations.verifiers import EnvironmentHarness, EnvironmentTaskset
    __all__ = ["EnvironmentHarness", "EnvironmentTaskset"]

The interception server of verifiers gives every rollout an address with a key and records the tokens. The agent's loop,
the slots and the sealed grading work as in a run; the runtime of verifiers is not used. A rollout without a reward
raises `Dropped`, which verifiers records as an error on the trace.

Needs the package `verifiers`. Source: `Harness.launch`, `Taskset` and `Task` of verifiers 0.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.runtimes import ProgramResult, Runtime

from palaestra import JSON, RolloutFunction, Session, Task
from palaestra_integrations.blame import reward_of

RECORD = "palaestra"
"""The entry of a trace's `info` with the rollout's id, reward, outcome and metrics and, if it has them, its `official`
verdict and `labels`."""


class EnvironmentData(vf.TaskData):  # type: ignore[misc]
    """A task of the environment `env`; `id` is the task's id."""

    env: str


class EnvironmentTask(vf.Task[EnvironmentData]):  # type: ignore[misc]
    """A task whose reward comes from the environment."""

    @property
    def key(self) -> str:
        """The environment and the task's id."""
        return f"{self.data.env}:{self.data.id}"

    @vf.reward  # type: ignore[untyped-decorator]
    async def environment(self, trace: vf.Trace) -> float:
        """Return the reward of the rollout."""
        return float(trace.info[RECORD]["reward"])


class EnvironmentTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """`env` is a file or a name, as for `palaestra run`. `settings` are those of `palaestra.Session`, except those that
    select a policy or a model."""

    env: str
    settings: dict[str, Any] = Field(default_factory=dict)


class EnvironmentTaskset(vf.Taskset[EnvironmentTask, EnvironmentTasksetConfig]):  # type: ignore[misc]
    """The tasks of an environment."""

    def load(self) -> Iterator[EnvironmentTask]:
        with Session(self.config.env, policy="noop", **self.config.settings) as session:
            tasks = session.tasks()
        for task in tasks:
            yield EnvironmentTask(_data(task, self.config.env), self.config.task)


def _data(task: Task, env: str) -> EnvironmentData:
    text = "\n\n".join(str(message["content"]) for message in task.messages() if message["role"] == "user")
    return EnvironmentData(id=task.id, name=task.id, prompt=text, env=env)


class EnvironmentHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """`agent` is a program in the slot (`--agent`); by default, Palaestra's own agent loop runs. `settings` are the
    other settings of `palaestra.RolloutFunction`."""

    agent: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)


class EnvironmentHarness(vf.Harness[EnvironmentHarnessConfig]):  # type: ignore[misc]
    """Plays the rollouts of `EnvironmentTaskset`. All rollouts of one environment are in one run."""

    NEEDS_CONTAINER = EXECUTES_CODE = False  # the model's commands run in a slot
    APPENDS_SYSTEM_PROMPT = True

    def __init__(self, config: EnvironmentHarnessConfig) -> None:
        super().__init__(config)
        self._rollouts: dict[str, RolloutFunction] = {}

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: EnvironmentData,
    ) -> ProgramResult:
        """Play one rollout. Raises `Dropped` if the rollout has no reward."""
        rollout = self._rollouts.get(data.env)
        if rollout is None:
            rollout = RolloutFunction(data.env, agent=self.config.agent, **self.config.settings)
            self._rollouts[data.env] = rollout
        result = await rollout(str(data.id), endpoint, secret, model=ctx.model)
        reward, record = reward_of(result), result.trajectory
        assert record is not None
        entry: JSON = {"rollout_id": record.rollout_id, "outcome": str(record.outcome), "metrics": dict(record.metrics)}
        trace.info[RECORD] = {**entry, "reward": reward, **record.verdict}
        return ProgramResult(0, "", "")

    async def aclose(self) -> None:
        """End the runs."""
        for rollout in self._rollouts.values():
            await rollout.aclose()
