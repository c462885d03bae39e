"""`BaseEnv`: the smallest class form. A subclass collects its rollouts itself and returns their rows.

All class forms share this module: settings, the model server, the hooks of evaluation and metrics, and the adapter to
the runner. `HermesAgentBaseEnv` and `AgentEnv` add tools and slots.

`collect_trajectory` journals each rollout, `collect_trajectories` each group. Such a class has no slot, no tool and no
sealed grading, and its tokens come from its rows.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeAlias, TypeVar

import msgspec

from palaestra.agent.result import AgentResult, ended_loops
from palaestra.core.errors import ConfigError, InfraError, PalaestraError, TaskError
from palaestra.core.exits import report_failure
from palaestra.core.io.durable_files import replaced
from palaestra.core.sync_bridge import bridged
from palaestra.core.types import JSON, Blame, Message, Outcome, Score, Task, number, numbers
from palaestra.core.user_code import called, is_loaded, place, run_hook, settled, told
from palaestra.envs.api.scored_data import (
    ROW_KEYS,
    Row,
    ScoredDataGroup,
    ScoredDataItem,
    checked_row,
    format_trajectory,
    grouped,
    is_of,
    own_row,
    row_and_backlog,
    rows_of,
)
from palaestra.envs.config.build import mcp_servers
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.envs.run.evaluate import EvaluatedEnvironment, Evaluation, Logged
from palaestra.inference.chat_server import ChatServer, chat_server
from palaestra.inference.config import APIServerConfig, ServerBaseline
from palaestra.inference.engine import ChatCompletion, TextCompletion
from palaestra.inference.tokenizers import Tokenizer, load_tokenizer
from palaestra.rollouts.environment import GroupCollection
from palaestra.rollouts.export.atropos import group_line
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.limits import RunStopped
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.rollout import CURRENT, Rollout
from palaestra.rollouts.runner import Totals
from palaestra.rollouts.spec import Kit, Projection, RecordedTools
from palaestra.tools.mcp.run_servers import MCPServers
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import TASK_TOOLS, TaskTools

logger = logging.getLogger(__name__)

T = TypeVar("T")

Item: TypeAlias = JSON
"""One row of whatever the environment draws from; the runner only carries it."""


class ItemRunner(Protocol):
    """Rolls every item out `samples` times; trajectories are in item order. `plain`: without the class's own way of
    collecting."""

    async def __call__(self, items: Sequence[Item], samples: int, *, plain: bool = False) -> list[Trajectory]: ...


Tools: TypeAlias = tuple[list[dict[str, JSON]], set[str]]
"""The tools of a rollout as the contract passes them: the definitions for the model, and the valid names."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A rollout for the base classes' `collect_trajectory` to play. None: as the settings and the group say.

    With `hooks` False, neither set-up nor verification hook is called, and `compute_reward` scores.
    """

    item: Item
    messages: list[Message] | None = None
    tools: Tools | None = None
    hooks: bool = True


class RolloutFailed(InfraError):
    """A rollout that `super().collect_trajectory` played has no score. Its record has the reason."""


PLAYER: ContextVar[Callable[[Attempt], Awaitable[ScoredDataItem]] | None] = ContextVar("player", default=None)
"""Plays a rollout of the group or rollout that a class collects here."""

ATTEMPT: ContextVar[Attempt | None] = ContextVar("attempt", default=None)
"""What the rollout that is played here was asked for."""

COLLECTING = frozenset({"collect_trajectory", "_collect_trajectory_local", "_collect_trajectory_sandbox"})
COLLECTING_GROUPS = frozenset({"collect_trajectories", "postprocess_histories"})
"""Methods with which a class collects rollouts or groups itself."""

MANAGERS = {"process": "process_manager", "serve": "env_manager"}
"""The method of a class that surrounds a command's run."""


@contextmanager
def assigned(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class BaseEnv(ABC):
    """Subclass this, implement `setup`, `get_next_item`, `evaluate` and one of the `collect_` methods, call `cli()`.

    `self.server` answers `chat_completion(messages=…)` and `completion(prompt=…)`, and token-exactly through
    `managed_server()`; `self.config` holds the settings. Rollouts and groups run concurrently, so `collect_` methods
    must not keep a rollout's state on `self`.
    """

    name: ClassVar[str | None] = None
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    mcp: MCPServers | None = None
    """The run's MCP servers. Only there while a run is on."""
    _server: ChatServer | None = None
    _own_server: ChatServer | None = None
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
        self._manager: Callable[[], Awaitable[None]] | None = None
        self._tokenizer: Tokenizer | None = None
        self._run_items: ItemRunner | None = None
        self._logged: dict[str, JSON] = {}
        self.curr_step = 0
        self.max_token_len = -1
        """The most tokens that the trainer takes; -1 until a trainer has said it."""
        self.checkpoint_dir = ""
        self.rollouts_for_wandb: list[list[tuple[str, float]]] = []
        self._evaluation: dict[str, JSON] = {}

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        """The environment's own defaults; files, variables and flags override them."""
        return cls.env_config_cls(), [APIServerConfig()]

    @classmethod
    def cli(cls) -> None:
        """The command line of the environment's script. Ends the process with the run's exit code; does nothing if
        `palaestra run` loads the script."""
        script = sys._getframe(1).f_globals
        if is_loaded(script.get("__name__", "")):
            return
        from palaestra.envs.run.command import main  # here, because a script that is only imported does not need it

        try:
            form = ClassForm(cls, script_reference(script, cls))
        except ConfigError as error:
            raise SystemExit(report_failure(error)) from None
        raise SystemExit(main(form))

    # What a subclass must say

    @abstractmethod
    async def setup(self) -> None:
        """Load the data set. Called once."""

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next item, or None at the end."""

    @abstractmethod
    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        """Evaluate the model; `evaluate_log` saves the figures."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """One rollout of an item: its row, or None if there is nothing to train on, and items to draw next."""
        raise NotImplementedError(
            f"a {BaseEnv.__name__} has no agent of its own: {type(self).__name__}.collect_trajectory must collect the "
            f"rollout itself"
        )

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """All rollouts of an item. The default calls `collect_trajectory` concurrently and raises the first error
        after all have ended. It leaves out empty results, and failed rollouts if others came."""
        asked = [bridged(called(self.collect_trajectory, item)) for _ in range(self.config.group_size)]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        came = [each for each in ended if not isinstance(each, BaseException)]
        for failure in ended:
            if isinstance(failure, BaseException) and not (came and isinstance(failure, RolloutFailed)):
                raise failure
        pairs = [row_and_backlog(each) for each in came]
        return grouped([row for row, _ in pairs if row is not None]), [later for _, items in pairs for later in items]

    async def postprocess_histories(self, trajectories: JSON) -> JSON:
        """The group that `collect_trajectories` returned, as it is to be recorded. The default leaves it unchanged."""
        return trajectories

    async def process_manager(self) -> None:
        """Run the command `process`. An override may prepare before `super()` and clean up after it."""
        await self._roll_out()

    async def env_manager(self) -> None:
        """Run the command `serve`, as `process_manager` runs `process`."""
        await self._roll_out()

    async def _roll_out(self) -> None:
        if self._manager is None:
            raise ConfigError(f"{type(self).__name__} is not run by a command that its manager surrounds")
        await self._manager()

    # What a subclass may say

    def item_id(self, item: Item, number: int) -> str:
        """A readable id for item `number`: the item's own if it has one."""
        if isinstance(item, Mapping):
            for key in ("instance_id", "task_id", "task_name", "id"):
                if item.get(key) not in (None, ""):  # 0 is an id
                    return str(item[key])
        return f"item-{number}"

    def as_environment(self) -> ClassEnvironment:
        """This instance as the runner sees it."""
        return CollectedEnvironment(self)

    # What a subclass can use

    @property
    def server(self) -> ChatServer:
        """The model server, from `__init__` to the end of a run. A class may assign another one, which its rollouts
        then ask."""
        rollout = CURRENT.get()
        if (
            self._own_server is None
            and self._server is not None
            and rollout is not None
            and rollout.server.ledger is None
        ):
            return RolloutServer(self._server, rollout.server)
        found = self._own_server or self._server
        if found is None:
            raise ConfigError(f"{type(self).__name__}.server is only there while the environment runs")
        return found

    @server.setter
    def server(self, server: object) -> None:
        self._own_server = chat_server(server)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the token-exact servers, else the one that `tokenizer_name` names, loaded on first use, else
        None. Raises `ConfigError` if it cannot be loaded."""
        servers = getattr(self._own_server or self._server, "servers", ())
        own: Tokenizer | None = getattr(servers[0], "tokenizer", None) if servers else None
        if own is not None:
            return own
        if self._tokenizer is None and self.config.tokenizer_name not in ("", "none"):
            self._tokenizer = load_tokenizer(self.config.tokenizer_name)
        return self._tokenizer

    async def evaluate_items(self, items: Sequence[Item], samples: int = 1) -> list[Trajectory]:
        """Roll every item out `samples` times and score it, under the run's limits. Failed rollouts have no reward."""
        if self._run_items is None:
            raise ConfigError(
                f"{type(self).__name__}.evaluate_items is only there while the environment evaluates; a collect_ "
                f"method of its own calls super().collect_trajectory(item), or runs the agent itself"
            )
        return await self._run_items(items, samples)

    async def _play(self, attempt: Attempt) -> ScoredDataItem | None:
        """Play a rollout of what is being collected, or, from `evaluate`, a new one. Its row; None if it has no score.

        Raises `RolloutFailed` for a rollout without a score of what is being collected.
        """
        if (player := PLAYER.get()) is not None:
            return await player(attempt)
        if self._run_items is None:
            raise ConfigError(f"{type(self).__name__}.collect_trajectory is only there while the environment runs")
        (trajectory,) = await self._run_items([attempt.item], 1, plain=True)
        return scored_item(trajectory) if trajectory.scored else None

    async def add_rollouts_for_wandb(self, scored_data: Mapping[str, JSON], item: Item = None) -> None:
        """Keep a group's first rollouts to show: `rollouts_for_wandb` holds lists of (text, score) of the latest
        groups. Called once for each scored group; a subclass may keep other data."""
        config, scores = self.config, scored_data["scores"]
        count = config.num_rollouts_per_group_for_logging
        shown = [(self._shown(scored_data, index), score) for index, score in enumerate(scores)]
        self.rollouts_for_wandb.append(shown if count < 0 else shown[:count])
        del self.rollouts_for_wandb[: -config.num_rollouts_to_keep]

    def _shown(self, scored_data: Mapping[str, JSON], index: int) -> str:
        """One rollout as text: its messages, else its tokens."""
        messages = scored_data.get("messages") or []
        if index < len(messages):
            return self._format_trajectory_for_display(messages[index])
        tokens = scored_data["tokens"][index]
        return self.tokenizer.decode(tokens) if self.tokenizer is not None else f"({len(tokens)} tokens)"

    @staticmethod
    def _format_trajectory_for_display(messages: Sequence[Message]) -> str:
        """A conversation as text for the rollouts that trackers show."""
        return format_trajectory(messages)

    def save_checkpoint(self, step: int, data: Mapping[str, JSON] | None = None) -> None:
        """Write the environment's own state to `checkpoint_dir`; without data no file is written."""
        if data is not None:
            path = self._checkpoints() / f"step-{step}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced(path) as file:
                file.write(msgspec.json.encode(data))

    def load_checkpoint(self) -> None:
        """Set the attributes that were saved at `curr_step`. Raises `ConfigError` if that checkpoint is missing or
        broken."""
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
        """Add numbers and texts to the run's metrics. Called after every `min_items_sent_before_logging` groups and at
        the end; an override may add its own and call this one."""
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
        """Save an evaluation's metrics and samples; the run prints the path. `start_time` and `end_time` are in
        seconds. A later call replaces an earlier one."""
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


@contextmanager
def in_rollout(rollout: Rollout) -> Iterator[None]:
    """Run code of a class in the block that may run the agent itself: calls of tools under the rollout's name, or under
    none, are in its slot."""
    tools = TaskTools(rollout.rollout_id, lambda: rollout.tools, asyncio.get_running_loop())
    with assigned(CURRENT, rollout), assigned(TASK_TOOLS, tools):
        yield


class RolloutServer(ChatServer):
    """The model server as the code of one rollout sees it: chats are those of the rollout, which a scripted policy
    plays; everything else is the run's."""

    def __init__(self, group: ChatServer, session: ChatServer) -> None:
        self._group = group
        self._session = session

    async def chat_completion(self, **request: JSON) -> ChatCompletion:
        return await self._session.chat_completion(**request)

    async def completion(self, *, prompt: str, **request: JSON) -> TextCompletion:
        return await self._group.completion(prompt=prompt, **request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@dataclass(frozen=True, slots=True)
class _Unusable:
    """The data of a task whose item cannot be used."""

    reason: str


class ClassEnvironment(EvaluatedEnvironment):
    """Runs one instance of a class environment."""

    chooses_evaluation = True

    def __init__(self, inner: BaseEnv) -> None:
        self.inner = inner
        self._items: Sequence[Item] | None = None
        self._first = 0
        self._evaluated = 0
        self._awaits_setup = self._managed = False

    @property
    def name(self) -> str:
        return self.inner.name or type(self.inner).__name__

    @property
    def world(self) -> RecordedTools | None:
        """The class's own, which makes calls outside of rollouts too."""
        return self.inner.tool_world

    @world.setter
    def world(self, world: RecordedTools | None) -> None:
        self.inner.tool_world = world

    async def open(self) -> None:
        self.inner.mcp = mcp_servers(self.inner.config)
        if self.inner.mcp is not None:
            await self.inner.mcp.open()
        self._awaits_setup = True
        if own_names(type(self.inner)).isdisjoint(MANAGERS.values()):
            await self.set_up()

    async def set_up(self) -> None:
        """Call `setup` if that is left to do. A class that surrounds its run with a manager gets the call inside of it,
        with the first task."""
        if self._awaits_setup:
            self._awaits_setup = False
            await run_hook(ConfigError, called(self.inner.setup), f"{self.name} cannot begin: setup")

    def trainer_takes(self, most_tokens: int | None) -> None:
        self.inner.max_token_len = -1 if most_tokens is None else most_tokens

    async def managed(self, command: str, roll_out: Callable[[], Awaitable[Totals]]) -> Totals:
        method, totals, self._managed = MANAGERS[command], None, True
        if method not in own_names(type(self.inner)):
            return await roll_out()

        async def manage() -> None:
            nonlocal totals
            totals = await roll_out()

        self.inner._manager = manage
        try:
            await run_hook(ConfigError, called(getattr(self.inner, method)), f"{self.name}.{method}")
        except ConfigError as error:
            if totals is None:
                raise
            logger.warning("after the last group: %s", error)
        if totals is None:
            raise ConfigError(f"{self.name}.{method} did not call super().{method}(), which rolls out")
        return totals

    async def aclose(self) -> None:
        if self.inner.mcp is not None:
            await self.inner.mcp.aclose()

    async def tasks(self) -> AsyncIterator[Task]:
        if self._items is not None:
            for number, item in enumerate(self._items, self._first):
                yield self._task(item, number)
            return
        await self.set_up()
        number = 0
        while True:
            item = await run_hook(ConfigError, self.next_item(), f"{self.name} has no item {number}: get_next_item")
            if item is None:
                return
            yield self._task(item, number)
            number += 1

    async def next_item(self) -> Item:
        """The next item, or None at the end."""
        return await settled(self.inner.get_next_item())

    def _task(self, item: Item, number: int) -> Task:
        """The task of an item; for an unusable item, one that `resolve` refuses with the reason."""
        try:
            task = self.task(item, number)
            if not isinstance(task.prompt, str | Sequence):
                raise TaskError(f"format_prompt gave {task.prompt!r:.100}, which is neither a text nor messages")
        except Exception as error:
            logger.debug("item %d has no task", number, exc_info=True)
            return Task(
                id=f"item-{number}", prompt="", data=_Unusable(f"item {number} is no task: {told(error)}{place(error)}")
            )
        return task

    async def resolve(self, task: Task) -> Task:
        if isinstance(task.data, _Unusable):
            raise TaskError(task.data.reason)
        return task

    async def evaluate(self, evaluation: Evaluation) -> Logged:
        async def run_items(items: Sequence[Item], samples: int, *, plain: bool = False) -> list[Trajectory]:
            first = self._evaluated
            self._evaluated += len(items)
            done = await evaluation.roll_out(self.over(items, first, plain=plain), samples, first)
            trajectories = [trajectory for group in done for trajectory in group.trajectories]
            if len(done) < len(items) or any(each.outcome is Outcome.CANCELLED for each in trajectories):
                raise RunStopped("the evaluation was stopped: its metrics would be those of a part")
            return trajectories

        await self.set_up()
        self._evaluated = 0
        self.inner._run_items, self.inner._evaluation = run_items, {}
        await run_hook(ConfigError, called(self.inner.evaluate), f"{self.name} is not evaluated: evaluate")
        return self.inner._evaluation

    def over(self, items: Sequence[Item], first: int, *, plain: bool = False) -> Self:
        """The same environment over these items, numbered from `first`, instead of its data set. `plain`: without the
        class's own way of collecting."""
        other = copy(self)
        other._items, other._first = items, first
        return other

    @abstractmethod
    def task(self, item: Item, number: int) -> Task:
        """The task of an item. Items drawn again are tasks of their own, told apart by their number."""

    async def ended(self, task: Task, group: Group) -> None:
        if self._managed and self._items is not None:  # an evaluation while the run goes on
            return
        self.inner.curr_step += 1
        try:
            line = group_line(group, env=self.name, model="")
            if line is not None:
                await settled(self.inner.add_rollouts_for_wandb(line, task.data))
        except Exception as error:
            doing = f"{self.name}.add_rollouts_for_wandb on {group.group_id}"
            logger.warning("%s failed with %s%s", doing, told(error), place(error))

    async def figures(self) -> Mapping[str, float | str]:
        await settled(self.inner.wandb_log({}))
        logged, self.inner._logged = self.inner._logged, {}
        found = numbers(logged)
        self.inner._logged.update(found)  # a number counts until the next one of its name, a text once
        return {**found, **{name: value for name, value in logged.items() if isinstance(value, str) and value}}

    def shown(self) -> Sequence[tuple[str, float]]:
        """The kept rollouts that are a text and a score: a subclass may keep other data."""
        kept: Iterable[JSON] = (rollout for group in self.inner.rollouts_for_wandb for rollout in group)
        pairs = [each for each in kept if isinstance(each, (list, tuple)) and len(each) == 2]
        return [
            (text, found) for text, score in pairs if isinstance(text, str) and (found := number(score)) is not None
        ]


class CollectedEnvironment(ClassEnvironment):
    """Runs one instance of a class that collects. Items that it wants drawn next come before those of its data set."""

    def __init__(self, inner: BaseEnv) -> None:
        super().__init__(inner)
        self._backlog: deque[Item] = deque()
        self._groups: dict[str, tuple[int, list[Row]]] = {}
        self._collects = collects(type(inner))
        self._ended: dict[str, list[AgentResult]] = {}
        self._whole = collects_groups(type(inner))
        self._told = False

    @property
    def collects_rollouts(self) -> bool:
        """Whether the class has a way of its own, which a replay of the agent's turns would not follow."""
        return self._collects

    async def next_item(self) -> Item:
        return self._backlog.popleft() if self._backlog else await super().next_item()

    def task(self, item: Item, number: int) -> Task:
        return Task(id=self.inner.item_id(item, number), prompt="", data=item)

    def kit(self, task: Task, rng: random.Random) -> Kit:
        return Kit(ToolRegistry())

    @property
    def collects_groups(self) -> bool:
        return self._whole

    async def collect(self, task: Task, group: GroupCollection) -> int:
        if not self._whole:
            return group.wanted
        played: list[tuple[Rollout, Row]] = []
        plays = 0

        async def play(attempt: Attempt) -> ScoredDataItem:
            nonlocal plays
            plays += 1
            with assigned(ATTEMPT, attempt):
                rollout = await group.play()
            if rollout.score is None:
                raise RolloutFailed(rollout.error)
            row: ScoredDataItem = rollout.meta["row"]
            played.append((rollout, row))
            return row

        async def both() -> JSON:
            got, backlog = row_and_backlog(await called(self.inner.collect_trajectories, task.data))
            return (got if got is None else await settled(self.inner.postprocess_histories(got))), backlog

        rows: list[Row] = []
        try:
            with (
                assigned(PLAYER, play),
                self.group_tools(group.kit),
                ended_loops() as self._ended[group.group_id],
            ):
                rows = rows_of(await self._asked(both(), "collect_trajectories", task), task.id)
        except RolloutFailed:  # the records of the rollouts have the reasons
            if not plays:
                raise
        self._groups[group.group_id] = plays, self._assign(rows, sorted(played, key=lambda each: each[0].index), task)
        return plays + len(self._groups[group.group_id][1])

    def group_tools(self, kit: Kit) -> AbstractContextManager[None]:
        """Make the group's tools known to the class in the block."""
        return nullcontext()

    def _assign(self, rows: Sequence[Row], played: Sequence[tuple[Rollout, Row]], task: Task) -> list[Row]:
        """Give every played rollout its row of the collected group, and fail those that the class left out. Returns the
        rows that the class made itself."""
        left = list(rows)
        for position, (rollout, given) in enumerate(played):
            row = next((row for row in left if is_of(row, given)), None)
            if row is None and len(rows) == len(played):
                row = rows[position] if any(each is rows[position] for each in left) else None
            if row is None:
                rollout.fail(TaskError(f"{self.name}.collect_trajectories left {rollout.rollout_id} out"), Blame.TASK)
                continue
            left = [each for each in left if each is not row]
            assert rollout.score is not None
            rollout.score = replace(rollout.score, reward=float(row["scores"]))
            rollout.meta["row"] = row
            rollout.projection = self.project(rollout, rollout.score)
        return left

    async def act(self, rollout: Rollout) -> AgentResult:
        if self._whole:
            first, rows = self._groups[rollout.group_id]
            if rollout.index < first:
                raise TaskError(f"{self.name}.collect_trajectories did not wait for {rollout.rollout_id}")
            row: JSON = rows[rollout.index - first]
            ended = self._ended[rollout.group_id]
        else:
            failures: list[InfraError] = []
            ended = []

            async def play(attempt: Attempt) -> ScoredDataItem:
                if rollout.result is not None or failures:
                    raise TaskError("super().collect_trajectory can be called once per rollout")
                try:
                    return await self.play(rollout, attempt)
                except InfraError as error:
                    failures.append(error)
                    raise

            try:
                with (
                    assigned(PLAYER, play),
                    in_rollout(rollout),
                    self.group_tools(rollout.kit),
                    ended_loops() as ended,
                ):
                    collecting = called(self.inner.collect_trajectory, rollout.task.data)
                    row = await self._asked(collecting, "collect_trajectory", rollout.task)
            except PalaestraError:
                if not failures:
                    raise
            if failures and isinstance(failures[0], RolloutFailed):
                assert rollout.result is not None
                return rollout.result
            if failures:  # a class that catches the failure must not make a score of it
                raise failures[0]
        rollout.meta["row"] = checked_row(row, rollout.task.id)
        return _result_of(row, ended) if rollout.result is None else rollout.result

    async def play(self, rollout: Rollout, attempt: Attempt) -> ScoredDataItem:
        """Play the rollout as the class's base would. Raises `RolloutFailed` if it has no score."""
        raise TaskError(f"{self.name} has no agent of its own")

    async def grade(self, rollout: Rollout) -> Score:
        played: Score | None = rollout.meta.get("score")
        reward = float(rollout.meta["row"]["scores"])
        return Score(reward) if played is None else replace(played, reward=reward)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        return await self.grade(rollout)

    def project(self, rollout: Rollout, score: Score | None) -> Projection:
        row: Row | None = rollout.meta.get("row")
        if row is None or score is None:
            return Projection()
        kept = {key: value for key, value in row.items() if key not in ROW_KEYS and value}
        return Projection(own_row(row, rollout.result), kept)

    async def ended(self, task: Task, group: Group) -> None:
        self._groups.pop(group.group_id, None)
        self._ended.pop(group.group_id, None)
        await super().ended(task, group)

    def take_backlog(self, items: Iterable[Item], name: str) -> None:
        """Items to be drawn next. A resumed run does not have them."""
        wanted = list(items)
        if wanted and not self._told:
            self._told = True
            logger.warning("%s returns items to be drawn next: they are lost to a run that goes on with --resume", name)
        self._backlog.extend(wanted)

    async def _asked(self, collecting: Coroutine[object, object, JSON], method: str, task: Task) -> JSON:
        """The collected rows or row. Raises `TaskError` for errors of the class."""
        name = f"{type(self.inner).__name__}.{method}"

        async def unpacked() -> JSON:
            return row_and_backlog(await bridged(collecting))

        got, backlog = await run_hook(TaskError, unpacked(), f"{name} on {task.id}")
        self.take_backlog(backlog, name)
        if got is None:
            raise TaskError(f"{name} gave nothing for {task.id}")
        return got


def _result_of(row: Row, ended: Sequence[AgentResult]) -> AgentResult:
    """The result of a collected rollout. It ended as the agent loop that had its messages, or the only loop there was;
    without such a loop, naturally."""
    messages = list(row.get("messages") or ())
    loops = [each for each in ended if each.messages == messages] or (ended if len(ended) == 1 else [])
    if not loops:
        return AgentResult(messages=messages, finished_naturally=True)
    end = loops[-1]
    return AgentResult(
        messages=messages,
        finished_naturally=end.finished_naturally,
        outcome=end.outcome,
        error=end.error,
        blame=end.blame,
    )


def scored_item(trajectory: Trajectory) -> ScoredDataItem:
    """The latest row of a scored rollout; one whose history was rewritten, or that has sub-agents, has several."""
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
    """Whether a class has its own way of collecting rollouts, which the runner then calls."""
    return collects_groups(cls) or not COLLECTING.isdisjoint(own_names(cls))


def collects_groups(cls: type[BaseEnv]) -> bool:
    return not COLLECTING_GROUPS.isdisjoint(own_names(cls))


def own_names(cls: type[BaseEnv]) -> set[str]:
    """The names that a user's class, or one it inherits from, defines; this package's own classes do not count."""
    return {name for each in cls.__mro__ if not each.__module__.startswith("palaestra.") for name in vars(each)}


class ClassForm:
    """A subclass of `BaseEnv`, most often of `HermesAgentBaseEnv` or `AgentEnv`."""

    command: str | None = None

    def __init__(self, cls: type[BaseEnv], reference: str = "") -> None:
        """Raises `ConfigError` for a class that lacks methods."""
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if cls.as_environment is BaseEnv.as_environment and not collects(cls):
            missing.append("collect_trajectory or collect_trajectories")
        if missing:
            raise ConfigError(f"{cls.__name__} lacks {', '.join(missing)}")
        self.cls = cls
        self.reference = reference
        self.name = cls.name or cls.__name__
        self.about = inspect.getdoc(cls) or ""

    def config_type(self) -> type[BaseEnvConfig]:
        return self.cls.env_config_cls

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        """The result of `config_init`: a configuration, and a list of servers, one server, or settings shared by all
        servers."""
        name, wanted = self.cls.__name__, self.cls.env_config_cls
        with _asking(f"{name}.config_init"):
            given: JSON = self.cls.config_init()
        match given:
            case (BaseEnvConfig() as config, (ServerBaseline() | [*_]) as said):
                servers = [said] if isinstance(said, ServerBaseline) else list(said)
                if not issubclass(wanted, type(config)):
                    own = type(config).__name__
                    raise ConfigError(f"{name}.config_init gives {own}: say env_config_cls = {own} in the class")
                if all(isinstance(each, ServerBaseline) for each in servers):
                    return config, servers
        must = f"({wanted.__name__}, [APIServerConfig, …])"
        raise ConfigError(f"{name}.config_init must give {must}, and gave {given!r:.200}")

    def check_values(self) -> Mapping[str, JSON]:
        return self.cls.check_values

    def build(self, config: BaseEnvConfig, servers: Sequence[APIServerConfig], server: ChatServer) -> ClassEnvironment:
        with _asking(f"{self.cls.__name__}(config, servers)"):
            inner = self.cls.__new__(self.cls)
            inner._server = server  # before the constructor, which may use it
            inner.__init__(config, list(servers))  # type: ignore[misc]
        return inner.as_environment()


@contextmanager
def _asking(doing: str) -> Iterator[None]:
    """Turn any error of the class in the block into a `ConfigError` with its place."""
    try:
        yield
    except PalaestraError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{doing} failed with {told(error)}{place(error)}") from error


def script_reference(script: Mapping[str, object], environment: object) -> str:
    """A reference to an environment among the globals of its script; empty if it has none."""
    path = script.get("__file__")
    name = next((name for name, value in script.items() if value is environment), "")
    return f"{Path(str(path)).resolve()}:{name}" if path and name else ""
