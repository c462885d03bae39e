"""`HermesAgentBaseEnv`: the class form of an environment, as existing scripts are written to it.

A subclass provides items and scores rollouts; five methods are required, the workspace hooks and the overridable steps
are optional. `ContractEnvironment` adapts it to the runner.
"""

from __future__ import annotations

import functools
import logging
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from palaestra.agent.result import AgentResult
from palaestra.core.errors import TaskError
from palaestra.core.sync_bridge import bridged
from palaestra.core.types import JSON, Message, Score, Task, numbers
from palaestra.core.user_code import called, run_hook, score_of, settled
from palaestra.envs import cache_key
from palaestra.envs.api.base_env import BaseEnv, ClassEnvironment, CollectedEnvironment, Item, collects
from palaestra.envs.api.scored_data import ROW_KEYS, ScoredDataItem
from palaestra.envs.config.build import agent_settings, kit, network_policy
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.inference.config import APIServerConfig
from palaestra.inference.ledger import Ledger, TokenRow
from palaestra.inference.server_group import ServerGroup
from palaestra.rollouts.grading.exec_tool import ExecTool
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.grading.tool_context import ToolContext
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import AgentSettings, Kit, Projection
from palaestra.sandbox.slot import Slot
from palaestra.tools.registry.build import unrestricted
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import States, Tool

logger = logging.getLogger(__name__)


class HermesAgentBaseEnv(BaseEnv):
    """Subclass this, implement the abstract methods, and call `cli()`.

    `self.server` answers `chat_completion(messages=…)`; `self.config` holds the settings. Rollouts and groups run
    concurrently, so hooks must not keep a rollout's state on `self`.
    """

    name: ClassVar[str | None] = "hermes-agent"
    env_config_cls: ClassVar[type[HermesAgentEnvConfig]] = HermesAgentEnvConfig
    config: HermesAgentEnvConfig

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        return cls.env_config_cls(), [APIServerConfig()]

    # What a subclass must say

    @abstractmethod
    def format_prompt(self, item: Item) -> str:
        """The user's message for an item."""

    @abstractmethod
    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        """Score a rollout through `ctx`, which looks at the sealed workspace."""

    # What a subclass may say

    async def prepare_group(self, item: Item, exec_tool: ExecTool) -> None:
        """Prepare the workspace once per group; every rollout starts from a fork of it."""

    def group_recipe(self, item: Item) -> str | None:
        """A version text if the result of `prepare_group` (with `share_setup`, of `setup_trajectory_workspace` too)
        depends only on the item, the class's settings and file, and this text; else None. See `Task.recipe`."""
        return None

    async def setup_trajectory_workspace(
        self, item: Item, *, trajectory_id: str, exec_tool: ExecTool
    ) -> dict[str, JSON]:
        """Prepare one rollout's workspace. The result is passed to the verification as `workspace_meta`."""
        return {}

    async def verify_and_score_trajectory(
        self,
        item: Item,
        result: AgentResult,
        *,
        trajectory_id: str,
        exec_tool: ExecTool,
        workspace_meta: dict[str, JSON] | None = None,
    ) -> tuple[float, dict[str, JSON]]:
        """Score a rollout in its sealed workspace: a reward and metadata to record. An override replaces
        `compute_reward`."""
        raise NotImplementedError

    def as_environment(self) -> ClassEnvironment:
        return CollectedEnvironment(self) if collects(type(self)) else ContractEnvironment(self)

    def reference_solution(self, item: Item) -> JSON:
        """The solution of an item for the scripted `oracle` policy (see `Task.solution`), or None."""
        return item.get("solution") if isinstance(item, Mapping) else None

    def _resolve_tools_for_group(self) -> tuple[list[dict[str, JSON]], set[str]]:
        """The tools of one group: schemas and names. Resolved once and shared by its rollouts."""
        registry = self.tool_kit(random.Random(self.config.seed)).registry
        return registry.definitions(), set(registry.list_tools())

    def tool_kit(self, rng: random.Random) -> Kit:
        """The tools of one group. `rng` is the group's own."""
        return kit(self.config, None, rng, self.own_tools(), self.mcp, self.shared)

    @cached_property
    def shared(self) -> States:
        """State that the tools of all rollouts share, such as a browser. Closed when the run ends."""
        return States()

    def own_tools(self) -> Sequence[Tool]:
        """The environment's own tools, such as functions with `@tool`. Its agents always have them."""
        return ()

    def _use_managed_server(self) -> bool:
        """Whether rollouts are token-exact; by default, if the servers give tokens (sglang, vllm, transformers).
        Override it to chat without tokens; rows are then placeholders, with `token_source: placeholder`."""
        return isinstance(self._server, ServerGroup) and self._server.token_exact

    async def _run_agent_loop(self, rollout: Rollout, messages: list[Message]) -> AgentResult:
        """Run the agent. Override to change how; the default is the one loop."""
        return await rollout.run_agent(messages)

    def _build_scored_item(self, item: Item, result: AgentResult, reward: float) -> ScoredDataItem:
        """The training row of one rollout: `tokens`, `masks`, `scores`, `messages`.

        With a token-exact server it is the last row of the ledger, with `inference_logprobs`; if an override leaves it
        unchanged, all rows of the ledger are trained. A chat server gives no token ids: the tokens are placeholders
        with masks of -100.
        """
        if nodes := (result.managed_state or {}).get("nodes"):
            return {
                "tokens": nodes[-1].tokens,
                "masks": nodes[-1].masked_tokens,
                "inference_logprobs": nodes[-1].logprobs,
                "scores": reward,
                "messages": result.messages,
                "token_source": "engine",
            }
        length = sum(len(str(message.get("content") or "")) for message in result.messages)
        tokens = list(range(min(length // 4, 128)))
        return {
            "tokens": tokens,
            "masks": [-100] * len(tokens),
            "scores": reward,
            "messages": result.messages,
            "token_source": "placeholder",
        }


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
        """The class's declaration for the item, with the item, the class's own settings and its code."""
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
        """Use plain chat if the environment does not want the token-exact session."""
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
            answer = await bridged(called(self.inner.compute_reward, rollout.task.data, rollout.result, context))
            said = f"{self.name}.compute_reward"
        score = score_of(answer, said)
        if isinstance(answer, Score):
            return score
        return Score(score.reward, numbers(score.metrics), score.metrics)  # it may name more than numbers

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
    """The environment's own row; None if it is one of the ledger's. Only the latter counts as exact."""
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
    return getattr(type(inner), method) is not getattr(HermesAgentBaseEnv, method)
