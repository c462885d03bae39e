"""`HermesAgentBaseEnv`: the class form of an environment, as existing scripts are written to it.

A subclass says where items come from and how a rollout is scored; five methods are required, the two workspace hooks
and the overridable steps are optional. The class holds no loop, no slots and no output of its own: `contract.py`
adapts it to the Environment protocol and the one runner does the rest.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from palaestra.agent.result import AgentResult
from palaestra.core.types import JSON, Message
from palaestra.envs.api.base_env import BaseEnv, Item, ScoredDataItem
from palaestra.envs.config.build import kit
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.inference.config import APIServerConfig
from palaestra.inference.server_group import ServerGroup
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.grading.exec_tool import ExecTool
from palaestra.rollouts.grading.tool_context import ToolContext
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import Kit
from palaestra.tools.tool import States, Tool


class HermesAgentBaseEnv(BaseEnv):
    """Subclass this, implement the abstract methods, and call `cli()`.

    `self.server` answers `chat_completion(messages=…)`; `self.config` holds the settings. Rollouts of one group run at
    the same time, and groups do too, so hooks must not keep a rollout's state on `self`.
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
        """Say that what `prepare_group` makes (with `share_setup`, `setup_trajectory_workspace` too) depends on nothing
        but the item, the class's own settings and file, and what this text names (a version). None: it may. See
        `Task.recipe`."""
        return None

    async def setup_trajectory_workspace(
        self, item: Item, *, trajectory_id: str, exec_tool: ExecTool
    ) -> dict[str, JSON]:
        """Prepare one rollout's workspace. What it returns reaches the verification as `workspace_meta`."""
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
        """Score a rollout in its sealed workspace: a reward and what is worth recording. Overriding it replaces
        `compute_reward`."""
        raise NotImplementedError

    def as_environment(self) -> Environment:
        """This instance as the runner sees it."""
        from palaestra.envs.adapters.collected_adapter import CollectedEnvironment, collects
        from palaestra.envs.adapters.hermes_adapter import ContractEnvironment

        return CollectedEnvironment(self) if collects(type(self)) else ContractEnvironment(self)

    def reference_solution(self, item: Item) -> JSON:
        """How the item is solved, for the scripted `oracle` policy: see `Task.solution`. None where nobody knows."""
        return item.get("solution") if isinstance(item, Mapping) else None

    def _resolve_tools_for_group(self) -> tuple[list[dict[str, JSON]], set[str]]:
        """The tools of one group: schemas and names. Resolved once and shared by its rollouts."""
        registry = self.tool_kit(random.Random(self.config.seed)).registry
        return registry.definitions(), set(registry.list_tools())

    def tool_kit(self, rng: random.Random) -> Kit:
        """The tools of one group as the runner takes them. `rng` is the group's own."""
        return kit(self.config, None, rng, self.own_tools(), self.mcp, self.shared)

    @cached_property
    def shared(self) -> States:
        """What the tools of all rollouts have together, such as a browser. Closed when the run ends."""
        return States()

    def own_tools(self) -> Sequence[Tool]:
        """Tools that the environment brings along, such as functions with `@tool`. Its agents always have them."""
        return ()

    def _use_managed_server(self) -> bool:
        """Whether rollouts are token-exact: yes where the servers give tokens (sglang, vllm, transformers).

        Override to chat without keeping tokens; rows then are placeholders and say so.
        """
        return isinstance(self._server, ServerGroup) and self._server.token_exact

    async def _run_agent_loop(self, rollout: Rollout, messages: list[Message]) -> AgentResult:
        """Run the agent. Override to change how; the default is the one loop."""
        return await rollout.run_agent(messages)

    def _build_scored_item(self, item: Item, result: AgentResult, reward: float) -> ScoredDataItem:
        """The training row of one rollout: `tokens`, `masks`, `scores`, `messages`.

        With a token-exact server these are the last row of its ledger, with `inference_logprobs`; as long as they are
        left as they are, all rows of the ledger are trained. A chat server gives no token ids, so the tokens are
        placeholders and every mask is -100: nothing is trained on them, and the line says `token_source: placeholder`.
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
