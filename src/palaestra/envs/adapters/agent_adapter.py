"""The adapter between `AgentEnv` subclasses and the Environment protocol: what they do otherwise than other classes."""

from __future__ import annotations

import inspect

from palaestra.agent.atropos_agent import AgentConfig, AtroposAgent, CallResult
from palaestra.agent.hermes_text import observation, result_in, result_text
from palaestra.agent.result import AgentResult
from palaestra.core.errors import TaskError
from palaestra.core.types import JSON
from palaestra.core.user_code import run_hook, settled
from palaestra.envs.adapters.hermes_adapter import ContractEnvironment
from palaestra.envs.api.agent_env import AgentEnv, AgentEnvConfig, AgentEnvConfigT
from palaestra.rollouts.grading.exec_tool import ExecTool
from palaestra.rollouts.rollout import Rollout
from palaestra.tools.call_text import ToolCall, result_of


class AgentEnvironment(ContractEnvironment):
    """Runs one instance of an `AgentEnv`."""

    inner: AgentEnv[AgentEnvConfig]

    def __init__(self, inner: AgentEnv[AgentEnvConfigT]) -> None:
        super().__init__(inner)
        self._takes_meta = _accepts(inner.verify_and_score_trajectory, "workspace_meta")

    async def open(self) -> None:
        await super().open()
        if self.inner.config.mcp_servers:
            self.inner.tools = self.inner.build_tools()

    async def aclose(self) -> None:
        try:
            await self.inner.shutdown_tool_backend()
        finally:
            await super().aclose()

    async def act(self, rollout: Rollout) -> AgentResult:
        self._choose_server(rollout)
        rollout.matches_observations = False  # they are compared as the text that the model reads

        async def execute(call: ToolCall) -> CallResult:
            recorded = rollout.recorded
            expected = recorded.expected_observation(call.name, call.arguments) if recorded is not None else None
            result = result_of((await rollout.tools.call(call.name, call.arguments, by_agent=True)).reply)
            if recorded is None or expected is None:
                return result
            now = observation(result_text(result.success, result.output, result.error, result.metadata))
            return result_in(recorded.match_observation(expected, now))

        agent = AtroposAgent(
            rollout.conversation(),
            rollout.kit.registry,
            await run_hook(TaskError, self._config(rollout), f"configuring the agent of {rollout.rollout_id}"),
            execute_tool=execute,
            task_id=rollout.rollout_id,
            extra_body=rollout.settings.extra_body,
            budget=rollout.settings.budget,
            max_context_tokens=rollout.settings.max_context_tokens,
            on_turn=rollout.record,
            on_loop=rollout.attend,
        )
        opening = agent.opening(rollout.task.messages())
        rollout.record(None, opening)
        try:
            return await agent.converse(opening)
        finally:
            rollout.ended(agent.result)

    async def _config(self, rollout: Rollout) -> AgentConfig:
        return self.inner.build_agent_config(rollout.task.data)

    async def verify(self, rollout: Rollout, result: AgentResult, exec_tool: ExecTool) -> JSON:
        meta = {"workspace_meta": rollout.meta.get("workspace_meta")} if self._takes_meta else {}
        return await settled(
            self.inner.verify_and_score_trajectory(
                rollout.task.data,
                result.final_response,
                trajectory_id=rollout.rollout_id,
                exec_tool=exec_tool,
                agent_result=result,
                **meta,
            )
        )


def _accepts(hook: object, name: str) -> bool:
    """Whether a hook has a parameter of this name, or takes any."""
    assert callable(hook)
    parameters = inspect.signature(hook).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
