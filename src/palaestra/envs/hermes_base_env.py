"""`HermesAgentBaseEnv`: the class form of an environment, as existing scripts are written to it.

A subclass says where items come from and how a rollout is scored; five methods are required, the two workspace hooks
and the overridable steps are optional. The class holds no loop, no slots and no output of its own: `contract.py`
adapts it to the Environment protocol and the one runner does the rest.
"""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias, TypedDict

from palaestra.agent.result import AgentResult
from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message
from palaestra.envs.config import HermesAgentEnvConfig
from palaestra.envs.settings import kit
from palaestra.inference.base import ChatServer
from palaestra.inference.config import APIServerConfig
from palaestra.inference.tokens import Tokenizer
from palaestra.rollouts.base import Environment, Kit
from palaestra.rollouts.context import ToolContext
from palaestra.rollouts.exec_tool import ExecTool
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.trajectory import Trajectory

logger = logging.getLogger(__name__)

Item: TypeAlias = JSON
"""One row of whatever the environment draws from; the runner only carries it."""


class ScoredDataItem(TypedDict, total=False):
    """The training row of one rollout: `tokens[T]`, `masks[T]` (-100 where nothing is trained), its score, messages."""

    tokens: list[int]
    masks: list[int]
    scores: float
    messages: list[Message] | None
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    inference_logprobs: list[float] | None
    overrides: dict[str, JSON] | None
    images: JSON
    token_source: str


class ScoredDataGroup(TypedDict, total=False):
    """The rows of a group, each list in the order of its rollouts."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    messages: list[list[Message]] | None
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    inference_logprobs: list[list[float]] | None
    generation_params: dict[str, JSON] | None
    group_overrides: dict[str, JSON] | None
    overrides: list[dict[str, JSON]] | None
    images: JSON


ItemRunner: TypeAlias = Callable[[Sequence[Item], int], Awaitable[list[Trajectory]]]


class HermesAgentBaseEnv(ABC):
    """Subclass this, implement the abstract methods, and call `cli()`.

    `self.server` answers `chat_completion(messages=…)`; `self.config` holds the settings. Rollouts of one group run at
    the same time, and groups do too, so hooks must not keep a rollout's state on `self`.
    """

    name: ClassVar[str | None] = "hermes-agent"
    env_config_cls: ClassVar[type[HermesAgentEnvConfig]] = HermesAgentEnvConfig

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        self.config = config
        self.server_configs = list(server_configs)
        self.slurm = slurm
        self.testing = testing
        self._server: ChatServer | None = None
        self._run_items: ItemRunner | None = None
        self._logged: dict[str, JSON] = {}
        self._evaluation: dict[str, JSON] = {}

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        """The environment's own defaults. Files, variables and flags go on top."""
        return cls.env_config_cls(), [APIServerConfig()]

    @classmethod
    def cli(cls) -> None:
        """The command line of the environment's script. Ends the process with the run's exit code."""
        from palaestra.envs.running import main

        raise SystemExit(main(cls))

    # What a subclass must say

    @abstractmethod
    async def setup(self) -> None:
        """Load the data set. Called once."""

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next item, or None when there are no more."""

    @abstractmethod
    def format_prompt(self, item: Item) -> str:
        """The user's message for an item."""

    @abstractmethod
    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        """Score a rollout through `ctx`, which looks at the sealed workspace."""

    @abstractmethod
    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        """Evaluate the model: `evaluate_items` rolls items out, `evaluate_log` saves the figures."""

    # What a subclass may say

    async def prepare_group(self, item: Item, exec_tool: ExecTool) -> None:
        """Prepare the workspace once per group; every rollout starts from a fork of it."""

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

    def item_id(self, item: Item, number: int) -> str:
        """A readable id for the `number`th item drawn: its own where it has one."""
        if isinstance(item, Mapping):
            for key in ("instance_id", "task_id", "task_name", "id"):
                if item.get(key):
                    return str(item[key])
        return f"item-{number}"

    def as_environment(self) -> Environment:
        """This instance as the runner sees it."""
        from palaestra.envs.contract import ContractEnvironment

        return ContractEnvironment(self)

    def reference_solution(self, item: Item) -> JSON:
        """How the item is solved, for the scripted `oracle` policy: see `Task.solution`. None where nobody knows."""
        return item.get("solution") if isinstance(item, Mapping) else None

    def _resolve_tools_for_group(self) -> tuple[list[dict[str, JSON]], set[str]]:
        """The tools of one group: schemas and names. Resolved once and shared by its rollouts."""
        registry = self.tool_kit(random.Random(self.config.seed)).registry
        return registry.definitions(), set(registry.list_tools())

    def tool_kit(self, rng: random.Random) -> Kit:
        """The tools of one group as the runner takes them."""
        return kit(self.config, None, rng)

    def _use_managed_server(self) -> bool:
        """Whether rollouts are token-exact: yes where the servers give tokens (sglang, vllm, transformers).

        Override to chat without keeping tokens; rows then are placeholders and say so.
        """
        return bool(getattr(self._server, "token_exact", False))

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

    # What a subclass can use

    @property
    def server(self) -> ChatServer:
        """The model server. Only there while a run is on."""
        if self._server is None:
            raise ConfigError(f"{type(self).__name__}.server is only there while the environment runs")
        return self._server

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the token-exact servers; None for servers that only chat."""
        servers = getattr(self._server, "servers", ())
        return getattr(servers[0], "tokenizer", None) if servers else None

    async def evaluate_items(self, items: Sequence[Item], samples: int = 1) -> list[Trajectory]:
        """Roll out every item `samples` times and score it, under the run's limits. Failed ones have no reward."""
        if self._run_items is None:
            raise ConfigError(f"{type(self).__name__}.evaluate_items is only there while the environment evaluates")
        return await self._run_items(items, samples)

    async def wandb_log(self, wandb_metrics: dict[str, JSON] | None = None) -> None:
        """Add numbers to the run's metrics. Called once at the end of a run; a subclass may add its own and pass on."""
        self._logged.update(wandb_metrics or {})

    async def evaluate_log(
        self, metrics: Mapping[str, JSON], samples: Sequence[JSON] = (), task_name: str | None = None, **extra: JSON
    ) -> None:
        """Save an evaluation's figures and samples; the run prints where."""
        self._evaluation = {
            "task": task_name or self.name,
            "metrics": dict(metrics),
            "samples": list(samples),
            **extra,
        }
