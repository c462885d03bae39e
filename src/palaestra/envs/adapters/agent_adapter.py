"""The adapter between `AgentEnv` subclasses and the Environment protocol: what they do otherwise than other classes."""

from __future__ import annotations

import inspect

from palaestra.agent.atropos_agent import AgentConfig, AtroposAgent, CallResult
from palaestra.agent.hermes_text import observation, result_in, result_text
from palaestra.agent.result import AgentResult
from palaestra.core.errors import TaskError
from palaestra.core.types import JSON
from palaestra.core.user_code import settled
from palaestra.envs.adapters.hermes_adapter import ContractEnvironment
from palaestra.envs.api.agent_env import AgentEnv, AgentEnvConfig, AgentEnvConfigT
from palaestra.rollouts.attempt import blaming
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

        async def execute(call: ToolCall) -> CallResult:
            recall = rollout.recall
            recorded = recall.expected(call.name, call.arguments) if recall is not None else None
            with rollout.calling(call.name, call.arguments) as answered:
                reply = (await rollout.tools.call(call.name, call.arguments, by_agent=True)).reply
                answered(reply)
                result = result_of(reply)
            if recall is None or recorded is None:
                return result
            now = observation(result_text(result.success, result.output, result.error, result.metadata))
            return result_in(recall.observed(recorded, now))

        agent = AtroposAgent(
            rollout.served(rollout.server),
            rollout.kit.registry,
            await blaming(TaskError, self._config(rollout), f"configuring the agent of {rollout.rollout_id}"),
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
