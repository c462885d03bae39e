"""`AgentEnv`: the class form of an environment whose agent writes its tool calls as Hermes XML in its replies.

A subclass turns an item into a task and scores the last answer. `AgentEnvironment` adapts the subclass to the runner,
and `AtroposAgent` is its agent. Invariant: failed and over-long rollouts keep their record, and slots are always
returned.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import ClassVar, Generic, Self, TypeVar

from pydantic import model_validator

from palaestra.agent.loop import AgentLoop
from palaestra.agent.result import AgentResult
from palaestra.agent.subagents import Subagents
from palaestra.envs.config.build import system_prompt, tools_with
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.rollouts.resume.recorded_turns import described
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import RecordedTools
from palaestra.tools.call_text import ToolCall, result_of
from palaestra.tools.registry.registry import Kit, ToolRegistry
from palaestra_contract.atropos_agent import AgentConfig, AtroposAgent, CallResult
from palaestra_contract.base_env import PLAYER, Attempt, Item, own_names, scored_item
from palaestra_contract.class_environment import ClassEnvironment
from palaestra_contract.contract_environment import ContractEnvironment, accepts
from palaestra_contract.exec_tool import ExecTool
from palaestra_contract.hermes_env import HermesAgentBaseEnv
from palaestra_contract.hermes_text import observation, result_in, result_text
from palaestra_contract.own_tasks import policy
from palaestra_contract.scored_data import ScoredDataGroup, ScoredDataItem, grouped
from palaestra_contract.tool_context import ToolContext
from palaestra_contract.tools.executor import ToolExecutor
from palaestra_contract.tools.tool_server_client import ToolServerLink
from palaestra_slots.core.config import setting
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.sync_bridge import called_with_sync
from palaestra_slots.core.types import JSON, Message
from palaestra_slots.core.user_code import called, run_hook, settled
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_tokens.config import APIServerConfig

logger = logging.getLogger(__name__)

NEVER_CALLED = frozenset({"_run_agent_loop", "_collect_trajectory_local", "_collect_trajectory_sandbox"})
"""Methods of a `HermesAgentBaseEnv` that nothing calls in an `AgentEnv`."""


OF_NOMAD = ("nomad_address", "sandbox_job_id", "sandbox_image", "privileged", "purge_job_on_start")
"""Settings that only the backend Nomad reads."""


class AgentEnvConfig(HermesAgentEnvConfig):
    """The settings of an `AgentEnv`. Names and defaults are those that existing scripts expect."""

    agent_max_steps: int = setting(50, "Maximum model calls per rollout.", ge=1)
    agent_temperature: float = setting(0.7, "Sampling temperature of rollouts.", ge=0)
    agent_max_tokens: int | None = setting(None, "Maximum tokens of one reply; default: the server's limit.", ge=1)
    agent_tool_delay_s: float = setting(0.0, "Seconds to wait between tool calls.", ge=0)
    enabled_toolsets: list[str] | None = setting(["default"], "The agent's toolsets; `default` is terminal and file.")
    disabled_toolsets: list[str] | None = setting([], "Toolsets to withhold from the agent.")
    require_stateful_sandbox: bool = setting(False, "Refuse slots without process isolation, as require_sandbox does.")
    tool_server_url: str | None = setting(
        None, "The server of external tools: the address of a `palaestra serve tools` server, or inprocess."
    )
    tool_server_token: str | None = setting(None, "The bearer token of the tool server.")

    max_agent_turns: int = setting(50, "Model calls per rollout: an AgentEnv uses agent_max_steps instead.")
    max_token_length: int = setting(2048, "Tokens per model call: an AgentEnv uses agent_max_tokens instead.")
    sandbox_job_id: str = setting(
        "atropos-sandbox-agent-env", "Nomad: the job's name. If another live run has this name, the run adds a suffix."
    )

    @model_validator(mode="after")
    def _stateful_tools_are_isolated_too(self) -> Self:
        if self.require_stateful_sandbox:
            self.__dict__["require_sandbox"] = True  # an assignment would mark the field as set by a user
        for name, own in (("max_agent_turns", "agent_max_steps"), ("max_token_length", "agent_max_tokens")):
            if getattr(self, name) != type(self).model_fields[name].default:
                logger.warning("%s has no effect in an AgentEnv: set %s", name, own)
        return self


AgentEnvConfigT = TypeVar("AgentEnvConfigT", bound=AgentEnvConfig)


class AgentEnv(HermesAgentBaseEnv, Generic[AgentEnvConfigT]):
    """Subclass this, implement `build_task`, `score_trajectory`, `setup_agent_env` and `get_next_item`, and call
    `cli()`.

    Rollouts run concurrently, so hooks must not keep a rollout's state on `self`.
    """

    name: ClassVar[str | None] = None
    env_config_cls: ClassVar[type[HermesAgentEnvConfig]] = AgentEnvConfig
    config: AgentEnvConfigT

    def __init__(
        self,
        config: AgentEnvConfigT,
        server_configs: Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self._tool_server: ToolServerLink | None = None
        if config.tool_server_url is not None:
            self._tool_server = ToolServerLink(config.tool_server_url, config.tool_server_token)
        self.tools = self.build_tools()
        self._tool_server_inprocess = config.tool_server_url == "inprocess"
        self._executors: dict[RecordedTools | None, ToolExecutor] = {}
        self._agents = itertools.count()

    # Required methods, in addition to `get_next_item`

    @abstractmethod
    def build_task(self, item: Item) -> str:
        """Return the agent's prompt for an item."""

    @abstractmethod
    async def score_trajectory(self, item: Item, final_response: str) -> float:
        """Return the reward, from the agent's last answer."""

    @abstractmethod
    async def setup_agent_env(self) -> None:
        """Load the data set. Called once."""

    # Optional methods, in addition to `prepare_group` and `setup_trajectory_workspace`

    async def verify_and_score_trajectory(  # type: ignore[override]  # existing environments define two forms of it
        self,
        item: Item,
        final_response: str,
        *,
        trajectory_id: str,
        exec_tool: ExecTool,
        agent_result: AgentResult | None = None,
        workspace_meta: dict[str, JSON] | None = None,
    ) -> tuple[float, dict[str, JSON]]:
        """Score a rollout. Returns the reward, and metadata to record; `exec_tool` runs commands in the agent's own
        slot, or in a sealed copy of its files.

        The metadata, `verification_messages` included, is evidence and never part of the conversation. An override may
        omit the parameter `workspace_meta`, the result of `setup_trajectory_workspace`. The hook also runs for rollouts
        that ended at a limit; `agent_result.success` is then False.
        """
        return await called_with_sync(self.score_trajectory, item, final_response), {}

    def build_tools(self) -> ToolRegistry:
        """Return the tools of all rollouts, unless `distribution` is set. Raises `ConfigError` for unknown toolsets."""
        enabled = ["default"] if self.config.enabled_toolsets is None else self.config.enabled_toolsets
        return tools_with(self.mcp, enabled, self.config, self.own_tools(), self._tool_server, self.shared)

    def build_agent_config(self, item: Item) -> AgentConfig:
        """Return the sampling settings and limits of an item's agent."""
        return AgentConfig(
            temperature=self.config.agent_temperature,
            max_tokens=self.config.agent_max_tokens,
            max_steps=self.config.agent_max_steps,
            system_prompt=system_prompt(self.config),
            tool_delay_s=self.config.agent_tool_delay_s,
        )

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        """Evaluate the model. The default does nothing."""
        return {}

    # Methods for subclasses to call

    async def run_agent(self, task: str, *, trajectory_id: str | None = None) -> tuple[str, dict[str, JSON]]:
        """Run the agent on one task outside any rollout. Returns the last answer, and a dict with `success`, `error`
        and `tool_calls`.

        The agent's slot comes from the environment's own pool, which the first call creates. During a run, the setting
        `world` applies to the agent's tool calls.
        """
        executor = self._tool_executor
        name = trajectory_id or f"agent-{next(self._agents)}"

        async def execute(call: ToolCall) -> CallResult:  # as in a rollout, so that the model reads the same text
            tools = executor.trajectory(name).tools
            return result_of((await tools.call(call.name, call.arguments, by_agent=True)).reply)

        def delegate(loop: AgentLoop, agent: AtroposAgent) -> None:
            Subagents(loop, executor.trajectory(name).tools, agent=agent).offer()

        config = self.build_agent_config(None)
        async with self._by_hand.connected() if self._is_by_hand else nullcontext():
            agent = AtroposAgent(self.server, self.tools, config, execute_tool=execute, on_loop=delegate)
            try:
                result = await agent.run(task)
            finally:
                await asyncio.shield(executor.release_trajectory(name, reset_workspace=True))
        debug = {"success": result.success, "error": result.error, "tool_calls": result.total_tool_calls}
        return result.final_response, debug

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        return await self._play(Attempt(item, hooks=self._use_sandbox_backend())), []

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Roll out an item. Called by a subclass's method through `super()`, or by `evaluate`. Returns the scored rows,
        or None if there are none."""
        if PLAYER.get() is not None or self._run_items is None:
            return await super().collect_trajectories(item)
        done = await self._run_items([item], self.config.group_size, plain=True)
        return grouped([scored_item(trajectory) for trajectory in done if trajectory.scored]), []

    # Called by the runner

    async def setup(self) -> None:
        """Prepare the environment; called once, at the start of the run."""
        await settled(self.setup_agent_env())

    def format_prompt(self, item: Item) -> str:
        return self.build_task(item)

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        score: float = await called_with_sync(self.score_trajectory, item, result.final_response)
        return score

    def tool_kit(self, rng: random.Random) -> Kit:
        if self.config.distribution is not None:
            return super().tool_kit(rng)
        return Kit(self.tools, tuple(self.config.enabled_toolsets or ()))

    def as_environment(self) -> ClassEnvironment:
        return AgentEnvironment(self)

    @property
    def _tool_executor(self) -> ToolExecutor:
        """The executor for `run_agent` and for the class's own calls. It uses the slots of `_backend`; rollouts use the
        run's pool."""
        executor = self._executors.get(self.tool_world)
        if executor is None:
            executor = ToolExecutor(self._backend, self.tools, policy(self.config), world=self.tool_world)
            self._executors[self.tool_world] = executor
        return executor

    @_tool_executor.setter
    def _tool_executor(self, executor: ToolExecutor | None) -> None:
        if executor is None:
            self._executors.clear()
        else:
            self._executors[self.tool_world] = executor

    @property
    def _pool(self) -> SlotPool:
        return self._backend

    @_pool.setter
    def _pool(self, pool: SlotPool | None) -> None:
        if pool is None:
            self.__dict__.pop("_backend", None)
        else:
            self._backend = pool

    async def shutdown_tool_backend(self) -> None:
        """Close the pool and the tools of `run_agent`. Idempotent; called at the end of the run."""
        try:
            while self._executors:
                await self._executors.popitem()[1].close()
        finally:
            await self.shared.aclose()
            await self._close_backend()
            if self._tool_server is not None:
                await self._tool_server.aclose()


class AgentEnvironment(ContractEnvironment):
    """Runs one instance of an `AgentEnv`."""

    inner: AgentEnv[AgentEnvConfig]

    def __init__(self, inner: AgentEnv[AgentEnvConfigT]) -> None:
        super().__init__(inner)
        self._takes_meta = accepts(inner.verify_and_score_trajectory, "workspace_meta")

    @property
    def has_nothing_to_evaluate(self) -> bool:
        return type(self.inner).evaluate is AgentEnv.evaluate

    async def open(self) -> None:
        if unused := own_names(type(self.inner)) & NEVER_CALLED:
            raise ConfigError(
                f"{type(self.inner).__name__} overrides {', '.join(sorted(unused))}, which AgentEnv never calls; "
                "remove the override, or subclass HermesAgentBaseEnv instead"
            )
        config = self.inner.config
        said = [name for name in OF_NOMAD if name in config.model_fields_set]
        if said and config.model_fields_set.isdisjoint({"tool_pool_mode", "terminal_backend"}):
            logger.warning(
                "%s sets %s, which only Nomad reads, but its sandboxes are on this machine: set tool_pool_mode to "
                "`nomad` for Nomad, or to `local` if this is intended",
                *(type(self.inner).__name__, ", ".join(said)),
            )
        await super().open()
        if config.mcp_servers:
            self.inner.tools = self.inner.build_tools()

    async def aclose(self) -> None:
        try:
            await self.inner.shutdown_tool_backend()
        finally:
            await super().aclose()

    async def _converse(self, rollout: Rollout, messages: list[Message]) -> AgentResult:
        rollout.calls.leave_matching()  # compared below, as the text that the model reads

        async def execute(call: ToolCall) -> CallResult:
            recorded = rollout.log.recorded
            expected = recorded.expected_observation(call.name, call.arguments) if recorded is not None else None
            tool = rollout.tools.registry.get(call.name)
            outside = tool is not None and tool.touches_world and not tool.world_session
            if recorded is not None and expected is not None and recorded.answers(outside):
                return result_in(expected)
            result = result_of((await rollout.tools.call(call.name, call.arguments, by_agent=True)).reply)
            if recorded is None or expected is None:
                return result
            now = observation(result_text(result.success, result.output, result.error, result.metadata))
            if result_in(expected).to_xml() == now:  # older recordings show the fields of some results twice
                now = expected
            return result_in(recorded.match_observation(expected, now, described(call.name, call.arguments)))

        doing = f"configuring the agent of {rollout.rollout_id}"
        config = await run_hook(TaskError, called(self.inner.build_agent_config, rollout.task.data), doing)
        agent = AtroposAgent(
            rollout.conversation(),
            rollout.seat.kit.registry,
            config,
            execute_tool=execute,
            limits=rollout.settings.loop,
            on_turn=rollout.log.record,
            on_loop=rollout.attend,
        )
        opening = agent.opening(rollout.task.messages())  # the agent takes its system prompt from its own configuration
        rollout.log.record(None, opening)
        try:
            return await agent.converse(opening)
        finally:
            rollout.ended(agent.result)

    async def verify(self, rollout: Rollout, result: AgentResult, exec_tool: ExecTool, meta: JSON) -> JSON:
        named = {"workspace_meta": meta} if self._takes_meta else {}
        return await called_with_sync(
            self.inner.verify_and_score_trajectory,
            rollout.task.data,
            result.final_response,
            trajectory_id=rollout.rollout_id,
            exec_tool=exec_tool,
            agent_result=result,
            **named,
        )
