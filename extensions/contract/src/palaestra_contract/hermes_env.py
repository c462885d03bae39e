"""`HermesAgentBaseEnv`: the class form of an environment that existing scripts subclass.

A subclass provides items and scores rollouts. Five methods are required; the workspace hooks and the overridable steps
are optional. `contract_environment.py` adapts the subclass to the runner. Modules that only a run needs are imported
when they are used.
"""

from __future__ import annotations

import logging
import random
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.tools.tool import States, Tool
from palaestra_contract.base_env import Attempt, BaseEnv, Item, adapted
from palaestra_contract.scored_data import PLACEHOLDER, ScoredDataItem, ScoredRow, placeholder_tokens
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON, Message
from palaestra_slots.core.user_code import called, score_of, settled
from palaestra_tokens.config import APIServerConfig

if TYPE_CHECKING:
    from palaestra.agent.result import AgentResult
    from palaestra.envs.run.evaluate import EvaluatedEnvironment
    from palaestra.rollouts.rollout import Rollout, RolloutTool
    from palaestra.tools.registry.registry import Kit
    from palaestra_contract.exec_tool import ExecTool
    from palaestra_contract.rollout_parts import Tools
    from palaestra_contract.tool_context import ToolContext
    from palaestra_slots.sandbox.pool import SlotPool

logger = logging.getLogger(__name__)

MOST_TOOL_ERRORS = 1000
"""The maximum number of failed tool calls kept between two logs."""

DRAW: ContextVar[random.Random | None] = ContextVar("draw", default=None)
"""The random generator of the group whose tools are chosen in this context."""

GROUP_TOOLS: ContextVar[Tools | None] = ContextVar("group_tools", default=None)
GRADING: ContextVar[ToolContext | None] = ContextVar("grading", default=None)
"""The `ToolContext` of the rollout that is scored in this context."""


class HermesAgentBaseEnv(BaseEnv):
    """Subclass this, implement the abstract methods, and call `cli()`.

    `self.server` has the method `chat_completion(messages=…)`; `self.config` holds the settings. Rollouts and groups
    run concurrently, so hooks must not keep a rollout's state on `self`.
    """

    name: ClassVar[str | None] = "hermes-agent"
    env_config_cls: ClassVar[type[HermesAgentEnvConfig]] = HermesAgentEnvConfig
    config: HermesAgentEnvConfig

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self._tool_error_buffer: list[dict[str, JSON]] = []
        """Failed tool calls since the last `wandb_log`, with turn, tool, args, error and result."""

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        return cls.env_config_cls(), [APIServerConfig()]

    # Required methods

    @abstractmethod
    def format_prompt(self, item: Item) -> str:
        """Return the user's message for an item."""

    @abstractmethod
    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        """Score a rollout through `ctx`, which works in the agent's own slot, or in a sealed copy of its files."""

    # Optional methods

    async def prepare_group(self, item: Item, exec_tool: ExecTool) -> None:
        """Prepare the workspace once per group; every rollout starts from a fork of it."""

    def group_recipe(self, item: Item) -> str | None:
        """Return a version string if the prepared workspace depends only on the item, the class's settings and file,
        and this string; otherwise None. If `share_setup` is set, the same must hold for the result of
        `setup_trajectory_workspace`. See `Task.recipe`."""
        return None

    async def setup_trajectory_workspace(
        self, item: Item, *, trajectory_id: str, exec_tool: ExecTool
    ) -> dict[str, JSON]:
        """Prepare one rollout's workspace or, if `share_setup` is set, the group's. The verification hook gets the
        result as `workspace_meta`, unless the set-up was shared."""
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
        """Score a rollout in the agent's own slot, or in a sealed copy of its files. Returns the reward, and
        metadata to record. The default implementation calls `compute_reward`; an override scores the rollout itself."""
        grading = GRADING.get()
        if grading is None:
            raise ConfigError(
                f"{type(self).__name__}.verify_and_score_trajectory can be called only while a rollout is scored"
            )
        answer = score_of(await called(self.compute_reward, item, result, grading), "compute_reward")
        return answer.reward, dict(answer.metrics)

    def as_environment(self) -> EvaluatedEnvironment:
        return adapted(self, "contract_environment.ContractEnvironment")

    def reference_solution(self, item: Item) -> JSON:
        """Return the solution of an item for the scripted `oracle` policy (see `Task.solution`), or None."""
        return item.get("solution") if isinstance(item, Mapping) else None

    def _resolve_tools_for_group(self) -> Tools:
        """Choose the tools of one group. Returns definitions and names. An override is called once per group and can
        choose different tools."""
        registry = self.tool_kit(DRAW.get() or random.Random(self.config.seed)).registry
        return registry.definitions(), set(registry.list_tools())

    @property
    def _current_group_tools(self) -> Tools | None:
        """The tools of the group in this context, or those that the class assigned; None outside a group."""
        from palaestra.rollouts.rollout import CURRENT
        from palaestra_contract.rollout_parts import tools_of

        chosen, rollout = GROUP_TOOLS.get(), CURRENT.get()
        if chosen is None and rollout is not None:
            return tools_of(rollout.seat.kit)
        return chosen

    @_current_group_tools.setter
    def _current_group_tools(self, tools: Tools | None) -> None:
        GROUP_TOOLS.set(tools)

    def tool_kit(self, rng: random.Random) -> Kit:
        """Return the tools of one group. `rng` is the group's random generator."""
        from palaestra.envs.config.build import kit

        return kit(self.config, None, rng, self.own_tools(), self.mcp, self.shared)

    @cached_property
    def shared(self) -> States:
        """State that the tools of all rollouts share, such as a browser. Closed when the run ends."""
        return States()

    @cached_property
    def _backend(self) -> SlotPool:
        """Slots for the class's own use, outside rollouts. The pool starts with the first lease and ends with the run.
        An image that the set-up of a rollout registers here is also that of the rollout's slot."""
        from palaestra.envs.config.build import make_pool

        return make_pool(self.config, start_when_used=True)

    async def _start_tool_backend(self) -> None:
        """Called before `setup`. The default does nothing, because a pool starts with its first lease."""

    async def _stop_tool_backend(self) -> None:
        """Called at the end of the run. The default does nothing, because the run closes `_backend`."""

    async def _close_backend(self) -> None:
        if (pool := self.__dict__.pop("_backend", None)) is not None:
            await pool.aclose()

    def own_tools(self) -> Sequence[Tool]:
        """Return the environment's own tools, such as functions with `@tool`. The environment's agents always have
        these tools."""
        return ()

    def _use_managed_server(self) -> bool:
        """Return whether rollouts are token-exact. By default, they are if the servers return tokens (sglang, vllm,
        transformers). Override this method to chat without tokens; rows are then placeholders, with `token_source:
        placeholder`."""
        from palaestra_tokens.server_group import ServerGroup

        return isinstance(self._server, ServerGroup) and self._server.token_exact

    def _use_sandbox_backend(self) -> bool:
        """Return whether a rollout's set-up and verification hooks are called. If False, rollouts have no set-up of
        their own, and `compute_reward` scores them. Either way, the agent works in a slot."""
        return True

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """Roll out an item and score it. Returns the row of the rollout, and items to draw next. A class that collects
        calls this method through `super()`, and `evaluate` may call it.

        Raises `RolloutFailed` if a collected rollout has no score. In `evaluate`, the row of such a rollout is None.
        """
        from palaestra.envs.config.build import system_prompt
        from palaestra.rollouts.rollout import CURRENT

        tools, names = self._current_group_tools or self._resolve_tools_for_group()
        messages: list[Message] = []
        if prompt := system_prompt(self.config):
            messages.append({"role": "system", "content": prompt})
        messages.append({"role": "user", "content": await settled(self.format_prompt(item))})
        rollout = CURRENT.get()
        task_id = str(uuid.uuid4()) if rollout is None else rollout.rollout_id
        path = self._collect_trajectory_sandbox if self._use_sandbox_backend() else self._collect_trajectory_local
        return await path(item, task_id, tools, names, messages)

    async def _collect_trajectory_local(
        self, item: Item, task_id: str, tools: list[dict[str, JSON]], valid_names: set[str], messages: list[Message]
    ) -> tuple[ScoredDataItem | None, list[Item]]:
        """Play `collect_trajectory` without the workspace hooks."""
        return await self._play(Attempt(item, messages, (tools, valid_names), hooks=False)), []

    async def _collect_trajectory_sandbox(
        self, item: Item, task_id: str, tools: list[dict[str, JSON]], valid_names: set[str], messages: list[Message]
    ) -> tuple[ScoredDataItem | None, list[Item]]:
        """Play `collect_trajectory` with the workspace hooks."""
        return await self._play(Attempt(item, messages, (tools, valid_names))), []

    async def _run_agent_loop(
        self,
        task_id: str | Rollout,
        tools: list[Any],
        valid_names: set[str] | None = None,
        messages: list[Message] | None = None,
        tool_handler: RolloutTool | None = None,
    ) -> AgentResult:
        """Run the agent. An override accepts either these parameters or `(self, rollout, messages)`; the default
        accepts both.

        `tool_handler(name, arguments, task_id)` runs the calls; by default they run in the rollout's slot.
        """
        from palaestra_contract.rollout_parts import run_agent_loop

        return await run_agent_loop(
            lambda: self.server, self.config, task_id, tools, valid_names, messages, tool_handler
        )

    def _build_scored_item(self, item: Item, result: AgentResult, reward: float) -> ScoredDataItem:
        """Build the training row of one rollout: `tokens`, `masks`, `scores` and `messages`. The row also unpacks into
        `(row, [])`, and an override may return either form. The row's `scores` is the reward.

        With a token-exact server, the row is the last one of the ledger, with `inference_logprobs`. If an override
        returns it unchanged, all rows of the ledger are trained on. A chat server returns no token ids; the tokens are
        then those that `tokenizer` gives the text, or placeholders without one, with masks of -100.
        """
        self._keep_tool_errors(result)
        row: JSON = ScoredRow(scores=reward, messages=result.messages)
        if nodes := (result.managed_state or {}).get("nodes"):
            row["tokens"], row["masks"] = nodes[-1].tokens, nodes[-1].masked_tokens
            row["inference_logprobs"], row["token_source"] = nodes[-1].logprobs, "engine"
        else:
            tokens = placeholder_tokens(result.messages, self._row_tokenizer)
            row["tokens"], row["masks"], row["token_source"] = tokens, [-100] * len(tokens), PLACEHOLDER
        scored: ScoredDataItem = row
        return scored

    @cached_property
    def _row_tokenizer(self) -> Any:
        """The tokenizer for rows of servers without tokens; None if there is none, or if it cannot be loaded."""
        try:
            return self.tokenizer
        except ConfigError as error:
            logger.warning("rows have no tokens of their conversations: %s", error)
            return None

    def _keep_tool_errors(self, result: AgentResult) -> None:
        self._tool_error_buffer.extend(
            {
                "turn": error.turn,
                "tool": error.tool_name,
                "args": error.arguments[:150],
                "error": without_middle(error.error, 300),
                "result": without_middle(error.tool_result, 300),
            }
            for error in result.tool_errors
        )
        del self._tool_error_buffer[:-MOST_TOOL_ERRORS]

    async def wandb_log(self, wandb_metrics: dict[str, JSON] | None = None) -> None:
        """Add the tool errors since the last call, and `wandb_metrics`, to the run's metrics."""
        errors, self._tool_error_buffer = self._tool_error_buffer, []
        found: dict[str, JSON] = {"train/tool_errors_count": len(errors)}
        if errors:
            found["train/tool_error_details"] = "\n".join(
                f"[turn {each['turn']}] {each['tool']}({each['args'][:80]}) -> {without_middle(each['error'], 150)}"
                for each in errors
            )
        await super().wandb_log({**found, **(wandb_metrics or {})})
