"""`BaseEnv`: the class form with the least in it. A subclass collects its rollouts itself and hands over the rows.

What every class form shares lies here: settings, the model server, the hooks of evaluation and metrics. Not for tools
and slots: `HermesAgentBaseEnv` and `AgentEnv` have them. The class holds no loop and no output; `collected.py` adapts
it to the Environment protocol and the one runner does the rest.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeAlias, TypedDict

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.inference.chat_server import ChatServer
from palaestra.inference.config import APIServerConfig
from palaestra.inference.tokenizers import Tokenizer, load_tokenizer
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.export.messages import chat_messages
from palaestra.rollouts.records import Trajectory
from palaestra.rollouts.spec import RecordedTools
from palaestra.tools.mcp.run_servers import MCPServers

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


def grouped(rows: Sequence[ScoredDataItem]) -> ScoredDataGroup | None:
    """One group of these rows, None of none. What not every row has is an empty list, log-probabilities included."""
    names = [name for name in ScoredDataItem.__annotations__ if name in ScoredDataGroup.__annotations__]
    lists = {name: [row.get(name) for row in rows] for name in names}
    group: JSON = {name: [] if any(value is None for value in values) else values for name, values in lists.items()}
    return group if rows else None


ItemRunner: TypeAlias = Callable[[Sequence[Item], int], Awaitable[list[Trajectory]]]


class BaseEnv(ABC):
    """Subclass this, implement `setup`, `get_next_item`, `evaluate` and one of the `collect_` methods, call `cli()`.

    `self.server` answers `chat_completion(messages=…)` and `completion(prompt=…)`, and token-exactly through
    `managed_server()`; `self.config` holds the settings. Rollouts of one group run at the same time, and groups do too,
    so `collect_` methods must not keep a rollout's state on `self`.
    """

    name: ClassVar[str | None] = None
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    mcp: MCPServers | None = None
    """The run's MCP servers. Only there while a run is on."""
    tool_world: RecordedTools | None = None
    """What the run's tools are told that touch the world. Only there while a run is on."""
    check_values: ClassVar[Mapping[str, JSON]] = {}
    """Settings with which `palaestra env check` needs nothing else; left aside where a user says one of them."""

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        if not isinstance(config, type(self).env_config_cls):
            wanted = type(self).env_config_cls.__name__
            raise ConfigError(f"{type(self).__name__} takes a {wanted}, not {type(config).__name__}")
        self.config = config
        self.server_configs = list(server_configs)
        self.slurm = slurm
        self.testing = testing
        self._server: ChatServer | None = None
        self._tokenizer: Tokenizer | None = None
        self._run_items: ItemRunner | None = None
        self._logged: dict[str, JSON] = {}
        self.curr_step = 0
        self.checkpoint_dir = ""
        self.rollouts_for_wandb: list[list[tuple[str, float]]] = []
        self._evaluation: dict[str, JSON] = {}

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        """The environment's own defaults. Files, variables and flags go on top."""
        return cls.env_config_cls(), [APIServerConfig()]

    @classmethod
    def cli(cls) -> None:
        """The command line of the environment's script. Ends the process with the run's exit code.

        Nothing where the script is only loaded, as `palaestra run` does, which has a command line already.
        """
        from palaestra.envs.python_file import is_loaded
        from palaestra.envs.run.run import main

        if is_loaded(sys._getframe(1).f_globals.get("__name__", "")):
            return
        raise SystemExit(main(cls))

    # What a subclass must say

    @abstractmethod
    async def setup(self) -> None:
        """Load the data set. Called once."""

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next item, or None when there are no more."""

    @abstractmethod
    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        """Evaluate the model; `evaluate_log` saves the figures."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """One rollout of an item: its row, or None where there is none to train on, and items to be drawn next."""
        raise NotImplementedError(f"{type(self).__name__} has neither collect_trajectory nor collect_trajectories")

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """All rollouts of an item in one go. Where a subclass does not say how, `collect_trajectory` runs for each.

        They run at the same time. One of which nothing came is left out; what one raised is raised when all have ended.
        """
        asked = [self.collect_trajectory(item) for _ in range(self.config.group_size)]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        for failure in ended:
            if isinstance(failure, BaseException):
                raise failure
        came = [each for each in ended if not isinstance(each, BaseException)]
        return grouped([row for row, _ in came if row is not None]), [later for _, items in came for later in items]

    # What a subclass may say

    def item_id(self, item: Item, number: int) -> str:
        """A readable id for the `number`th item drawn: its own where it has one."""
        if isinstance(item, Mapping):
            for key in ("instance_id", "task_id", "task_name", "id"):
                if item.get(key) not in (None, ""):  # 0 is an id
                    return str(item[key])
        return f"item-{number}"

    def as_environment(self) -> Environment:
        """This instance as the runner sees it."""
        from palaestra.envs.adapters.collected_adapter import CollectedEnvironment

        return CollectedEnvironment(self)

    # What a subclass can use

    @property
    def server(self) -> ChatServer:
        """The model server. Only there while a run is on."""
        if self._server is None:
            raise ConfigError(f"{type(self).__name__}.server is only there while the environment runs")
        return self._server

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the token-exact servers, else the one that `tokenizer_name` names, loaded when first asked
        for; None where none is named. Raises `ConfigError` for one that cannot be loaded.
        """
        servers = getattr(self._server, "servers", ())
        own: Tokenizer | None = getattr(servers[0], "tokenizer", None) if servers else None
        if own is not None:
            return own
        if self._tokenizer is None and self.config.tokenizer_name not in ("", "none"):
            self._tokenizer = load_tokenizer(self.config.tokenizer_name)
        return self._tokenizer

    async def evaluate_items(self, items: Sequence[Item], samples: int = 1) -> list[Trajectory]:
        """Roll every item out `samples` times and score it, under the run's limits. Failed ones have no reward."""
        if self._run_items is None:
            raise ConfigError(
                f"{type(self).__name__}.evaluate_items is only there while the environment evaluates; "
                f"a collect_ method of its own that wants the agent runs it itself (self.run_agent, HermesAgentLoop)"
            )
        return await self._run_items(items, samples)

    async def add_rollouts_for_wandb(self, scored_data: Mapping[str, JSON], item: Item = None) -> None:
        """Keep a group's first rollouts to show: `rollouts_for_wandb` holds lists of (text, score), the latest groups.

        Called once for each group that has a score. A subclass may keep something else of it.
        """
        config, scores = self.config, scored_data["scores"]
        count = config.num_rollouts_per_group_for_logging
        shown = [(self._shown(scored_data, index), score) for index, score in enumerate(scores)]
        self.rollouts_for_wandb.append(shown if count < 0 else shown[:count])
        del self.rollouts_for_wandb[: -config.num_rollouts_to_keep]

    def _shown(self, scored_data: Mapping[str, JSON], index: int) -> str:
        """One rollout as text: its messages where there are any, else its tokens."""
        messages = scored_data.get("messages") or []
        if index < len(messages):
            return format_trajectory(messages[index])
        tokens = scored_data["tokens"][index]
        return self.tokenizer.decode(tokens) if self.tokenizer is not None else f"({len(tokens)} tokens)"

    def save_checkpoint(self, step: int, data: Mapping[str, JSON] | None = None) -> None:
        """Write what the environment itself must remember; no data, no file. In `checkpoint_dir`, per environment."""
        if data is not None:
            path = self._checkpoints() / f"step-{step}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(data))

    def load_checkpoint(self) -> None:
        """Set the attributes that were saved at `curr_step`. Raises `ConfigError` when nothing was, or it is broken."""
        path = self._checkpoints() / f"step-{self.curr_step}.json"
        try:
            data = msgspec.json.decode(path.read_bytes(), type=dict[str, JSON])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"no checkpoint of step {self.curr_step} can be read: {error}") from None
        for key, value in data.items():
            setattr(self, key, value)

    def _checkpoints(self) -> Path:
        return Path(self.checkpoint_dir, "env_checkpoints", self.config.wandb_name or self.name or type(self).__name__)

    async def wandb_log(self, wandb_metrics: dict[str, JSON] | None = None) -> None:
        """Add numbers to the run's metrics. Called while a run goes on, each time that there are new ones
        (`min_items_sent_before_logging`), and at its end; a subclass may add its own and pass on."""
        self._logged.update(wandb_metrics or {})

    async def evaluate_log(
        self,
        metrics: Mapping[str, JSON],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: Mapping[str, JSON] | None = None,
        samples: Iterable[JSON] | None = None,
        verbose: bool = True,
    ) -> None:
        """Save an evaluation's figures and samples; the run prints where, whether `verbose` or not.

        `start_time` and `end_time` are in seconds. What is logged later takes the place of what was logged before.
        """
        general: dict[str, JSON] = {"model_name": model_name} if model_name is not None else {}
        if start_time is not None and end_time is not None:
            general["total_evaluation_time_seconds"] = str(end_time - start_time)
        if generation_parameters is not None:
            general["generation_parameters"] = dict(generation_parameters)
        self._evaluation = {
            "task": task_name or self.name,
            "metrics": {str(name): value for name, value in metrics.items()},
            "samples": list(samples or ()),
            "general": general,
        }


MOST_RESULT = 500
"""Characters of a tool's result that a shown rollout has."""


def format_trajectory(messages: Sequence[Message]) -> str:
    """A conversation as a person reads it: who said what, the calls and the beginnings of their results."""
    parts = []
    for said in chat_messages(messages):
        if said.role == "tool":
            parts.append(f"[TOOL RESULT] {said.text[:MOST_RESULT]}{'...' if len(said.text) > MOST_RESULT else ''}")
            continue
        parts += [f"[REASONING] {said.reasoning}"] if said.reasoning else []
        parts += [f"[{said.role.upper()}]\n{said.text}"] if said.text else []
        parts += [f"[TOOL CALL] {call.name}({call.arguments})" for call in said.calls]
    return "\n\n".join(parts)
