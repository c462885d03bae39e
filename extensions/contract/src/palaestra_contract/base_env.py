"""`BaseEnv`: the smallest base class of environments that are written as classes. A direct subclass collects its
rollouts itself and returns their rows.

All class forms share this module: settings, the model server, and the hooks of evaluation and metrics.
`HermesAgentBaseEnv` and `AgentEnv` add tools and slots; `class_environment.py` adapts instances to the runner. Modules
that only a run needs are imported on use, so that checking flags stays fast.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar

import msgspec

from palaestra.envs import discovery
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra_contract.scored_data import (
    ScoredDataGroup,
    ScoredDataItem,
    format_trajectory,
    grouped,
    row_and_backlog,
)
from palaestra_slots.core.errors import ConfigError, InfraError, PalaestraError
from palaestra_slots.core.exits import report_failure
from palaestra_slots.core.io.durable_files import replaced
from palaestra_slots.core.io.plugins import is_own
from palaestra_slots.core.sync_bridge import bridged
from palaestra_slots.core.types import JSON, Message
from palaestra_slots.core.user_code import called, is_loaded, place, settled, told
from palaestra_tokens.config import APIServerConfig, ServerBaseline
from palaestra_tokens.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from palaestra.envs.run.evaluate import EvaluatedEnvironment
    from palaestra.rollouts.records import Trajectory
    from palaestra.rollouts.spec import RecordedTools
    from palaestra.tools.mcp.run_servers import MCPServers
    from palaestra_contract.rollout_parts import Tools
    from palaestra_tokens.chat_server import ChatServer, SessionContext

T = TypeVar("T")

Item: TypeAlias = JSON
"""One row of the environment's data; the runner passes it on without reading it."""


class ItemRunner(Protocol):
    """Rolls out every item `samples` times and returns the trajectories in item order. If `plain`, the class's own
    `collect_` methods are not called."""

    async def __call__(self, items: Sequence[Item], samples: int, *, plain: bool = False) -> list[Trajectory]: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """A rollout for the base classes' `collect_trajectory` to play. By default, the conversation opens with the item's
    prompt, and the rollout has its group's tools.

    If `hooks` is False, the set-up and verification hooks are skipped, and `compute_reward` computes the score.
    """

    item: Item
    messages: list[Message] | None = None
    tools: Tools | None = None
    hooks: bool = True


class RolloutFailed(InfraError):
    """Raised if a rollout that `super().collect_trajectory` played has no score. The rollout's record has the
    reason."""


PLAYER: ContextVar[Callable[[Attempt], Awaitable[ScoredDataItem]] | None] = ContextVar("player", default=None)
"""The function that plays a rollout for the class that collects a rollout or group in this context."""

ATTEMPT: ContextVar[Attempt | None] = ContextVar("attempt", default=None)
"""The attempt that is played in this context."""

COLLECTED: ContextVar[SessionContext | None] = ContextVar("collected", default=None)
"""The group that a class collects in this context; a scripted policy plays the group's task."""

COLLECTING = frozenset({"collect_trajectory", "_collect_trajectory_local", "_collect_trajectory_sandbox"})
COLLECTING_GROUPS = frozenset({"collect_trajectories", "postprocess_histories"})
"""Methods that a class overrides to collect rollouts or groups itself."""

MANAGERS = {"process": "process_manager", "serve": "env_manager"}
"""For each command, the method in which a class can wrap the command's run."""


@contextmanager
def assigned(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable for the duration of the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class BaseEnv(ABC):
    """Subclass this, implement `setup`, `get_next_item`, `evaluate` and one of the `collect_` methods, and call
    `cli()`.

    `self.server` has the methods `chat_completion(messages=…)`, `completion(prompt=…)` and, for exact tokens,
    `managed_server()`; `self.config` holds the settings. Rollouts and groups run concurrently, so `collect_` methods
    must not keep a rollout's state on `self`.
    """

    name: ClassVar[str | None] = None
    official_name: ClassVar[str] = "official"
    """The benchmark's own name for its verdict (`Score.official`), such as `resolved`."""
    label_names: ClassVar[Sequence[str]] = ()
    """The names of labels that only the scores of this class have, for the setting `strict_labels`."""
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    mcp: MCPServers | None = None
    """The run's MCP servers; set only during a run."""
    _server: ChatServer | None = None
    _own_server: ChatServer | None = None
    _tokenizer: object = None
    tool_world: RecordedTools | None = None
    """The recorded replies of tools that reach outside this machine; set only during a run."""
    check_values: ClassVar[Mapping[str, JSON]] = {}
    """Settings that let `palaestra env check` run without further flags; ignored if the user sets one of them."""

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        if not isinstance(config, wanted := _needed_config(type(self))):
            raise ConfigError(f"{type(self).__name__} needs a {wanted.__name__}, not {type(config).__name__}")
        self.config = config
        self.server_configs = list(server_configs)
        self.slurm = slurm
        self.testing = testing
        self._manager: Callable[[], Awaitable[None]] | None = None
        self._run_items: ItemRunner | None = None
        self._logged: dict[str, JSON] = {}
        self.curr_step = 0
        self.max_token_len = -1
        """The maximum number of tokens per rollout that the trainer accepts; -1 until a trainer reports it."""
        self.most_evaluated: int | None = None
        """The maximum number of items that `evaluate` may roll out, if the user set one; `evaluate_items` leaves out
        the others."""
        self.checkpoint_dir = ""
        self.rollouts_for_wandb: list[list[tuple[str, float]]] = []
        self.completion_lengths: list[float] = []
        """The trained tokens of each rollout since the last `wandb_log`."""
        self._evaluation: dict[str, JSON] = {}

    def __init_subclass__(cls, **named: object) -> None:
        super().__init_subclass__(**named)
        if "env_config_cls" not in vars(cls) and isinstance(vars(cls).get("config_cls"), classmethod):
            # Eleven evaluations of the Atropos repository name their configuration so; atroposlib does not read it, and
            # they fail there with an AttributeError.
            cls.env_config_cls = cls.config_cls()  # type: ignore[attr-defined]

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        """Return the environment's own defaults; files, variables and flags override them."""
        return cls.env_config_cls(), [APIServerConfig()]

    @classmethod
    def cli(cls) -> None:
        """Run the command line of the environment's script, and end the process with the run's exit code. Does nothing
        if a `palaestra` command loads the script."""
        script = sys._getframe(1).f_globals
        if is_loaded(script.get("__name__", "")):
            return
        # imported here, because a script that is only imported does not need it
        from palaestra.envs.run.command import main

        try:
            form = ClassForm(cls, script_reference(script, cls))
        except ConfigError as error:
            raise SystemExit(report_failure(error)) from None
        raise SystemExit(main(form))

    # Required methods

    @abstractmethod
    async def setup(self) -> None:
        """Load the data set. Called once."""

    @abstractmethod
    async def get_next_item(self) -> Item:
        """Return the next item, or None at the end."""

    @abstractmethod
    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        """Evaluate the model; save the metrics with `evaluate_log`."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """Collect one rollout of an item. Returns a pair: the rollout's row (None if there is nothing to train on), and
        a list of items to draw next."""
        raise NotImplementedError(
            f"{BaseEnv.__name__} has no agent: {type(self).__name__}.collect_trajectory must collect the rollout itself"
        )

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Collect all rollouts of an item. The default calls `collect_trajectory` concurrently. After all calls have
        ended, the default raises their first error, except that it omits each `RolloutFailed` if any call succeeded. It
        also omits empty results."""
        asked = [bridged(called(self.collect_trajectory, item)) for _ in range(self.config.group_size)]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        came = [each for each in ended if not isinstance(each, BaseException)]
        for failure in ended:
            if isinstance(failure, BaseException) and not (came and isinstance(failure, RolloutFailed)):
                raise failure
        pairs = [row_and_backlog(each) for each in came]
        return grouped([row for row, _ in pairs if row is not None]), [later for _, items in pairs for later in items]

    async def postprocess_histories(self, trajectories: JSON) -> JSON:
        """Return the group of `collect_trajectories` in the form in which it is to be recorded. The default returns it
        unchanged."""
        return trajectories

    async def process_manager(self) -> None:
        """Run the command `process`. An override may do preparatory work before it calls `super()`, and clean up
        afterwards."""
        await self._roll_out("process")

    async def env_manager(self) -> None:
        """Run the command `serve`. An override may add work as in `process_manager`."""
        await self._roll_out("serve")

    async def _roll_out(self, command: str) -> None:
        """Do what the command does. If a program calls the manager of an instance that it made, run the instance."""
        if self._manager is not None:
            await self._manager()
            return
        await _lazy_module("by_hand").run_command(self, command)

    @cached_property
    def _by_hand(self) -> Any:
        """What plays rollouts for a program that calls the instance itself, outside any run."""
        return _lazy_module("by_hand").ByHand(self)

    # Optional methods

    def item_id(self, item: Item, number: int) -> str:
        """Return a readable id for item `number`: the item's own id if it has one, otherwise `item-NUMBER`."""
        if isinstance(item, Mapping):
            for key in ("instance_id", "task_id", "task_name", "id"):
                if item.get(key) not in (None, ""):  # an id of 0 counts
                    return str(item[key])
        return f"item-{number}"

    def as_environment(self) -> EvaluatedEnvironment:
        """Return this instance as the environment that the runner uses."""
        return adapted(self, "class_environment.CollectedEnvironment")

    # Methods for subclasses to call

    @property
    def server(self) -> ChatServer:
        """The model server. If a class assigns a different server, its rollouts use that server. Outside a run, it is
        one that does not check the servers first."""
        from palaestra.rollouts.rollout import CURRENT
        from palaestra_contract.rollout_parts import RolloutServer
        from palaestra_tokens.server_group import ServerGroup

        if self._own_server is None and self._server is not None:
            rollout, group, allowed = CURRENT.get(), COLLECTED.get(), self.config.allow_placeholder_tokens
            if rollout is not None and rollout.server.ledger is None:
                return RolloutServer(self._server, rollout.server, allowed)
            chats = self._server if isinstance(self._server, ServerGroup) and not self._server.token_exact else None
            if rollout is None and group is not None and chats is not None:
                return RolloutServer(chats, chats.session(group), allowed)
            if allowed and chats is not None:
                return RolloutServer(chats, chats, allowed)
        return self._own_server or self._server or self._unchecked_server

    @server.setter
    def server(self, server: object) -> None:
        from palaestra_tokens.chat_server import chat_server

        self._own_server = chat_server(server)

    @cached_property
    def _unchecked_server(self) -> ChatServer:
        group: ChatServer = _lazy_module("by_hand").servers_of(self)
        return group

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the token-exact servers. If they have none, the tokenizer that `tokenizer_name` names, or
        None if the setting is `none`. It has the methods and defaults of the tokenizers of `transformers`, and a class
        may assign a different one. It is loaded on first use. Raises `ConfigError` if it cannot be loaded; a failed
        load is not repeated."""
        if self._tokenizer is None:
            servers = getattr(self._own_server or self._server, "servers", ())
            found: Tokenizer | None = getattr(servers[0], "tokenizer", None) if servers else None
            if found is None and self.config.tokenizer_name not in ("", "none"):
                try:
                    found = load_tokenizer(self.config.tokenizer_name)
                except ConfigError as error:
                    hint = "With 'none', the environment has no tokenizer (self.tokenizer is None)."
                    self._tokenizer = ConfigError(f"env.tokenizer_name: {error} {hint}")
            if found is not None:
                from palaestra_contract.chat_tokenizer import chat_tokenizer

                self._tokenizer = chat_tokenizer(found)
        if isinstance(self._tokenizer, ConfigError):
            raise self._tokenizer
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: object) -> None:
        self._tokenizer = tokenizer

    async def evaluate_items(self, items: Sequence[Item], samples: int = 1) -> list[Trajectory]:
        """Roll out every item `samples` times under the run's limits, and score the rollouts. Failed rollouts have no
        reward. Items beyond `most_evaluated` are left out. Raises `RunStopped` if the run stops before all of them have
        ended."""
        if (run_items := self._item_runner()) is None:
            raise ConfigError(
                f"{type(self).__name__}.evaluate_items is available only while the environment evaluates; a collect_ "
                f"method must call super().collect_trajectory(item) or run the agent itself"
            )
        return await run_items(items, samples)

    def _item_runner(self) -> ItemRunner | None:
        """Return what rolls out items here: the evaluation of a run, or this process if there is no run. Return None in
        the other hooks of a run."""
        return self._by_hand.roll_out if self._run_items is None and self._is_by_hand else self._run_items

    @property
    def _is_by_hand(self) -> bool:
        """Whether a program calls the instance itself, outside any run."""
        return self._server is None or "_by_hand" in vars(self)

    async def _play(self, attempt: Attempt) -> ScoredDataItem | None:
        """Play a collected rollout or, when called from `evaluate`, a new one. Returns the rollout's row; None if it
        has no score.

        Raises `RolloutFailed` for a collected rollout without a score.
        """
        if (player := PLAYER.get()) is not None:
            return await player(attempt)
        if (run_items := self._item_runner()) is None:
            raise ConfigError(f"{type(self).__name__}.collect_trajectory cannot be called from this hook of a run")
        played = await run_items([attempt.item], 1, plain=True)  # empty beyond `most_evaluated`
        return scored_item(played[0]) if played and played[0].scored else None

    async def add_rollouts_for_wandb(self, scored_data: Mapping[str, JSON], item: Item = None) -> None:
        """Keep a group's first rollouts for trackers to show: `rollouts_for_wandb` holds lists of (text, score) of the
        latest groups. Called once for each scored group; a subclass may keep other data."""
        config, scores = self.config, scored_data["scores"]
        count = config.num_rollouts_per_group_for_logging
        shown = [(self._rollout_text(scored_data, index), score) for index, score in enumerate(scores)]
        self.rollouts_for_wandb.append(shown if count < 0 else shown[:count])
        del self.rollouts_for_wandb[: -config.num_rollouts_to_keep]

    def _rollout_text(self, scored_data: Mapping[str, JSON], index: int) -> str:
        """Return one rollout as text: its messages, or its tokens if it has no messages."""
        messages = scored_data.get("messages") or []
        if index < len(messages):
            return self._format_trajectory_for_display(messages[index])
        tokens = scored_data["tokens"][index]
        return self.tokenizer.decode(tokens) if self.tokenizer is not None else f"({len(tokens)} tokens)"

    @staticmethod
    def _format_trajectory_for_display(messages: Sequence[Message]) -> str:
        """Return a conversation as text for the rollouts that trackers show."""
        return format_trajectory(messages)

    def save_checkpoint(self, step: int, data: Mapping[str, JSON] | None = None) -> None:
        """Write the environment's own state, `data`, to `checkpoint_dir`. Without data, nothing is written."""
        if data is not None:
            path = self._checkpoints() / f"step-{step}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced(path) as file:
                file.write(msgspec.json.encode(data))

    def load_checkpoint(self) -> None:
        """Restore the attributes that were saved at `curr_step`. Raises `ConfigError` if that checkpoint is missing or
        broken."""
        path = self._checkpoints() / f"step-{self.curr_step}.json"
        try:
            data = msgspec.json.decode(path.read_bytes(), type=dict[str, JSON])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"the checkpoint of step {self.curr_step} cannot be read: {error}") from None
        for key, value in data.items():
            setattr(self, key, value)

    def _checkpoints(self) -> Path:
        return Path(self.checkpoint_dir, "env_checkpoints", self.config.wandb_name or self.name or type(self).__name__)

    async def wandb_log(self, wandb_metrics: dict[str, JSON] | None = None) -> None:
        """Add numbers and strings to the run's metrics. Called after every `min_items_sent_before_logging` groups and
        at the end; an override may add its own and call `super()`."""
        metrics = await settled(self.create_rollout_table(dict(wandb_metrics or {})))
        self.completion_lengths = []
        self._logged.update(metrics or {})

    async def create_rollout_table(self, wandb_metrics: dict[str, JSON]) -> dict[str, JSON]:
        """Return the metrics, to which an override may add its own. Called by `wandb_log`. The default adds nothing,
        because trackers show `rollouts_for_wandb`; a table that an override makes is shown in its place."""
        return wandb_metrics

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
        """Record an evaluation's metrics and samples. The run saves them when `evaluate` has returned, and prints the
        path. `start_time` and `end_time` are in seconds. Only the last call of an evaluation counts."""
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


def _lazy_module(module: str) -> Any:
    """Return a module of this folder that builds on this one. It is imported only when it is used."""
    return import_module(f"palaestra_contract.{module}")


def adapted(inner: BaseEnv, adapter: str) -> EvaluatedEnvironment:
    """Adapt an instance to the runner. The adapter is given by its name, so that its module, which loads the agent and
    the sandbox, is imported only for a run."""
    module, _, name = adapter.partition(".")
    environment: EvaluatedEnvironment = getattr(_lazy_module(module), name)(inner)
    return environment


def scored_item(trajectory: Trajectory) -> ScoredDataItem:
    """Return the last row of a scored rollout. Only rollouts with a rewritten history or sub-agents have several
    rows."""
    row = trajectory.latest_row
    assert row is not None
    return ScoredDataItem(
        tokens=row.tokens,
        masks=row.masks,
        inference_logprobs=row.logprobs,
        scores=trajectory.reward or 0.0,
        messages=trajectory.messages,
        token_source=row.source,
    )


def collects(cls: type[BaseEnv]) -> bool:
    """Return whether a class has its own method for collecting rollouts, which the runner then calls."""
    return collects_groups(cls) or not COLLECTING.isdisjoint(own_names(cls))


def collects_groups(cls: type[BaseEnv]) -> bool:
    return not COLLECTING_GROUPS.isdisjoint(own_names(cls))


def _needed_config(cls: type[BaseEnv]) -> type[BaseEnvConfig]:
    """Return the configuration class whose settings this package's code reads. A class need not name its own in
    `env_config_cls`."""
    ours = next(each for each in cls.__mro__ if is_own(each.__module__))
    needed: type[BaseEnvConfig] = ours.env_config_cls  # type: ignore[attr-defined]  # a class of this module
    return needed


def own_names(cls: type[BaseEnv]) -> set[str]:
    """Return the names that a user's class and its bases define, without the names that this package's classes
    define."""
    return {name for each in cls.__mro__ if not is_own(each.__module__) for name in vars(each)}


class ClassForm:
    """A subclass of `BaseEnv`, most often of `HermesAgentBaseEnv` or `AgentEnv`."""

    command: str | None = None
    bound: BaseEnvConfig | None = None

    def __init__(self, cls: type[BaseEnv], reference: str = "") -> None:
        """Check the class. Raises `ConfigError` if it lacks a required method."""
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if cls.as_environment is BaseEnv.as_environment and not collects(cls):
            missing.append("collect_trajectory or collect_trajectories")
        if missing:
            raise ConfigError(f"{cls.__name__} lacks {', '.join(missing)}")
        self.cls = cls
        self.kind = cls.__name__
        self.reference = reference
        self.name = cls.name or cls.__name__
        self.about = inspect.getdoc(cls) or ""
        self._config_type: type[BaseEnvConfig] | None = None

    def config_type(self) -> type[BaseEnvConfig]:
        """Return the class of the settings: `env_config_cls`, or the class that `config_init` returns if that has
        further settings."""
        if self._config_type is None:
            try:
                self.defaults()
            except ConfigError:  # raised again where the defaults are used
                return self.cls.env_config_cls
        return self._config_type or self.cls.env_config_cls

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        """Return the configuration and the list of servers that `config_init` returns. In place of the list,
        `config_init` may return one server, or settings shared by all servers."""
        name, wanted = self.cls.__name__, self.cls.env_config_cls
        with _asking(f"{name}.config_init"):
            given: JSON = self.cls.config_init()
        match given:
            case (BaseEnvConfig() as config, (ServerBaseline() | [*_]) as said):
                servers = [said] if isinstance(said, ServerBaseline) else list(said)
                if not isinstance(config, needed := _needed_config(self.cls)):
                    own = type(config).__name__
                    raise ConfigError(f"{name}.config_init returns {own}, which is not a {needed.__name__}")
                self._config_type = wanted if issubclass(wanted, type(config)) else type(config)
                if all(isinstance(each, ServerBaseline) for each in servers):
                    return config, servers
        must = f"({wanted.__name__}, [APIServerConfig, …])"
        raise ConfigError(f"{name}.config_init must return {must}, but returned {given!r:.200}")

    def check_values(self) -> Mapping[str, JSON]:
        return self.cls.check_values

    def build(
        self, config: BaseEnvConfig, servers: Sequence[APIServerConfig], server: ChatServer
    ) -> EvaluatedEnvironment:
        with _asking(f"{self.cls.__name__}(config, servers)"):
            inner = self.cls.__new__(self.cls)
            inner._server = server  # set before the constructor runs, which may use it
            inner.__init__(config, list(servers))  # type: ignore[misc]
        return inner.as_environment()


@contextmanager
def _asking(doing: str) -> Iterator[None]:
    """Convert any error that the class raises in the block, except a `PalaestraError`, into a `ConfigError` that names
    the line of code."""
    try:
        yield
    except PalaestraError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{doing} failed with {told(error)}{place(error)}") from error


def script_reference(script: Mapping[str, object], environment: object) -> str:
    """Return the reference to an environment that is a global of its script; empty if no global is the environment."""
    path = script.get("__file__")
    name = next((name for name, value in script.items() if value is environment), "")
    return f"{Path(str(path)).resolve()}:{name}" if path and name else ""


discovery.register_class(BaseEnv, ClassForm)
