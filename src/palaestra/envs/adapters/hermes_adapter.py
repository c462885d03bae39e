"""The adapter between `HermesAgentBaseEnv` subclasses and the runner's Environment protocol."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Mapping

from palaestra.agent.result import AgentResult
from palaestra.core.errors import TaskError
from palaestra.core.sync_bridge import bridged
from palaestra.core.types import JSON, Score, Task
from palaestra.core.user_code import run_hook, settled
from palaestra.envs import cache_key
from palaestra.envs.adapters.class_adapter import ROW_KEYS, ClassEnvironment, numbers
from palaestra.envs.api.base_env import Item
from palaestra.envs.api.hermes_env import HermesAgentBaseEnv
from palaestra.envs.api.hooks import score_of
from palaestra.envs.config.build import agent_settings, network_policy
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.inference.ledger import Ledger, TokenRow
from palaestra.rollouts.grading.exec_tool import ExecTool
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.grading.tool_context import ToolContext
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import AgentSettings, Kit, Projection
from palaestra.sandbox.slot import Slot
from palaestra.tools.registry.build import unrestricted
from palaestra.tools.runtime.runtime import ToolRuntime

logger = logging.getLogger(__name__)


class ContractEnvironment(ClassEnvironment):
    """Runs one instance of a class environment. Item and metadata travel in the rollout, never on the instance."""

    inner: HermesAgentBaseEnv

    def __init__(self, inner: HermesAgentBaseEnv) -> None:
        super().__init__(inner)
        self.shared = inner.shared
        self._settings = agent_settings(inner.config)
        self._policy = network_policy(inner.config.allow_network)
        self._verifies = overrides(inner, "verify_and_score_trajectory")
        self._warned = False

    async def open(self) -> None:
        await super().open()
        self.inner.tool_kit(random.Random(0))  # a toolset that there is not is said before the run has a folder

    @property
    def agent(self) -> AgentSettings:
        return self._settings

    def task(self, item: Item, number: int) -> Task:
        return Task(
            id=self.inner.item_id(item, number),
            prompt=self.inner.format_prompt(item),
            network=self._policy,
            data=item,
            solution=self.inner.reference_solution(item),
        )

    def kit(self, task: Task, rng: random.Random) -> Kit:
        return self.inner.tool_kit(rng)

    def prepares(self, task: Task) -> bool:
        return self.inner.config.share_setup or overrides(self.inner, "prepare_group")

    def recipe(self, task: Task) -> JSON:
        """What the class declares for the item, with the item, the class's own settings and where its code is."""
        inner = self.inner
        declared = inner.group_recipe(task.data)
        if declared is None:
            return None
        return [
            declared,
            cache_key.of_code([cls for cls in type(inner).__mro__ if cls.__module__ != "builtins"], task.id),
            cache_key.of_settings(inner.config, HermesAgentEnvConfig),
            [inner.config.seed, inner.config.share_setup],
            cache_key.of_data(task.data, task.id),
        ]

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        async def slot() -> Slot:
            return sandbox

        @functools.cache  # one for all calls of the hook, whose shell goes on between them
        def tools() -> ToolRuntime:
            registry = unrestricted(self.inner.tool_kit(random.Random(0)).registry)
            middleware = [] if self.world is None else [self.world.rollout(f"{task.id}:prepare")]
            return ToolRuntime(registry, slot, task.id, timeout_s=self._settings.tool_timeout_s, middleware=middleware)

        exec_tool = ExecTool(slot, tools)
        try:
            await settled(self.inner.prepare_group(task.data, exec_tool))
            if self.inner.config.share_setup:
                await self._set_up(task, task.id, exec_tool)
        finally:
            if tools.cache_info().currsize:
                await tools().aclose()

    async def begin(self, rollout: Rollout) -> None:
        if self.inner.config.share_setup or not overrides(self.inner, "setup_trajectory_workspace"):
            return
        exec_tool = ExecTool(rollout.sandbox, lambda: rollout.tools)
        rollout.meta["workspace_meta"] = await self._set_up(rollout.task, rollout.rollout_id, exec_tool)

    async def _set_up(self, task: Task, name: str, exec_tool: ExecTool) -> Mapping[str, JSON]:
        hook = self.inner.setup_trajectory_workspace
        return await settled(hook(task.data, trajectory_id=name, exec_tool=exec_tool))

    async def act(self, rollout: Rollout) -> AgentResult:
        self._choose_server(rollout)
        loop = self.inner._run_agent_loop(rollout, rollout.opening())
        if not overrides(self.inner, "_run_agent_loop"):
            return await loop
        return await run_hook(TaskError, loop, f"{self.name}._run_agent_loop on {rollout.rollout_id}")

    def _choose_server(self, rollout: Rollout) -> None:
        """The session is token-exact where the servers are; the environment may want plain chat instead."""
        exact, wanted = rollout.server.ledger is not None, self.inner._use_managed_server()
        if exact and not wanted:
            rollout.server = self.inner.server
        elif wanted and not exact and not self._warned:
            self._warned = True
            logger.warning("%s wants a managed server, but these servers only chat: no tokens are kept", self.name)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        assert rollout.result is not None
        tools = grading.tools(self._settings.tool_timeout_s)
        if self._verifies:
            answer = await self.verify(rollout, rollout.result, ExecTool(grading.slot, lambda: tools))
            said = f"{self.name}.verify_and_score_trajectory"
        else:
            context = ToolContext(rollout.rollout_id, slot=grading.slot, tools=tools)
            answer = await bridged(self._reward(rollout.task.data, rollout.result, context))
            said = f"{self.name}.compute_reward"
        score = score_of(answer, said)
        if isinstance(answer, Score):
            return score
        return Score(score.reward, numbers(score.metrics), score.metrics)  # it may name more than numbers

    async def _reward(self, item: Item, result: AgentResult, context: ToolContext) -> object:
        """The reward of a hook that may be a plain function."""
        return await settled(self.inner.compute_reward(item, result, context))

    async def verify(self, rollout: Rollout, result: AgentResult, exec_tool: ExecTool) -> JSON:
        """Call the verification hook in the shape that this kind of class gives it."""
        return await settled(
            self.inner.verify_and_score_trajectory(
                rollout.task.data,
                result,
                trajectory_id=rollout.rollout_id,
                exec_tool=exec_tool,
                workspace_meta=rollout.meta.get("workspace_meta"),
            )
        )

    def project(self, rollout: Rollout, score: Score | None) -> Projection:
        if score is None or rollout.result is None:
            return Projection()
        item = self.inner._build_scored_item(rollout.task.data, rollout.result, score.reward)
        return Projection(_own_row(item, rollout.result), {k: value for k, value in item.items() if k not in ROW_KEYS})


def _own_row(item: Mapping[str, JSON], result: AgentResult) -> TokenRow | None:
    """The row that the environment made; None where it left the ledger's as it was. Only the latter counts as exact."""
    row = TokenRow(
        tokens=list(item["tokens"]),
        masks=list(item["masks"]),
        logprobs=item.get("inference_logprobs"),
        source=item.get("token_source", "placeholder"),
    )
    state = result.managed_state or {}
    if isinstance(state.get("ledger"), Ledger):
        if any(row.tokens == node.tokens and row.masks == node.masked_tokens for node in state["nodes"]):
            return None
        row.source = "environment" if state["nodes"] else row.source
    return row


def overrides(inner: HermesAgentBaseEnv, method: str) -> bool:
    """Whether the subclass has its own version of a method."""
    return getattr(type(inner), method) is not getattr(HermesAgentBaseEnv, method)
