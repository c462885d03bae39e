"""Runs instances of class environments: adapters of `BaseEnv` and its subclasses to the runner.

If a class collects its rollouts itself, the journal records each rollout of `collect_trajectory`, or each group of
`collect_trajectories`. Unless it calls `super().collect_trajectory`, such a class has no slots, tools or sealed
grading, and its tokens come from its rows.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import abstractmethod
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import Self

from palaestra.agent.result import AgentResult, ended_loops
from palaestra.envs.config.build import mcp_servers
from palaestra.envs.run.evaluate import EvaluatedEnvironment, Evaluation, Logged
from palaestra.rollouts.environment import GroupCollection
from palaestra.rollouts.export.atropos import group_line
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.limits import RunStopped
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.rollout import CURRENT, Rollout
from palaestra.rollouts.runner import Totals
from palaestra.rollouts.schedule import escaped
from palaestra.rollouts.spec import Projection, RecordedTools
from palaestra.tools.registry.registry import Kit, ToolRegistry
from palaestra.tools.runtime.runtime import REFUSED_SLOTS, TASK_TOOLS, TaskTools
from palaestra_contract.base_env import (
    ATTEMPT,
    COLLECTED,
    MANAGERS,
    PLAYER,
    Attempt,
    BaseEnv,
    Item,
    RolloutFailed,
    assigned,
    collects,
    collects_groups,
    own_names,
)
from palaestra_contract.scored_data import (
    PLACEHOLDER,
    ROW_KEYS,
    Row,
    ScoredDataItem,
    checked_row,
    is_of,
    row_and_backlog,
    rows_of,
)
from palaestra_slots.core.errors import ConfigError, InfraError, PalaestraError, TaskError
from palaestra_slots.core.sync_bridge import bridged
from palaestra_slots.core.types import JSON, Blame, Outcome, Score, Task, number, numeric_values
from palaestra_slots.core.user_code import called, place, run_hook, settled, told
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.ledger import Ledger
from palaestra_tokens.ledger.records import TokenRow

logger = logging.getLogger(__name__)


@contextmanager
def in_rollout(rollout: Rollout) -> Iterator[None]:
    """Make `rollout` the current rollout inside the block, so that an environment class can run the agent. Tool calls
    under the rollout's name, or without a name, run in the rollout's slot."""
    tools = TaskTools(rollout.rollout_id, lambda: rollout.tools, asyncio.get_running_loop())
    with assigned(CURRENT, rollout), assigned(TASK_TOOLS, tools):
        yield


@contextmanager
def slots_needed() -> Iterator[None]:
    """If a task in the block got no slot because of its image, raise that error at the end of the block, even if code
    in the block caught it."""
    refused: dict[str, TaskError] = {}
    try:
        with assigned(REFUSED_SLOTS, refused):
            yield
    except Exception as error:
        if refused:
            raise next(iter(refused.values())) from error
        raise
    if refused:
        raise next(iter(refused.values()))


@dataclass(frozen=True, slots=True)
class _Unusable:
    """Stands for the data of a task whose item cannot be used."""

    reason: str


class ClassEnvironment(EvaluatedEnvironment):
    """Runs one instance of a class environment."""

    chooses_evaluation = True
    is_set_up = False
    """Whether the program that made the instance has called `setup`."""
    is_managed = False
    """Whether the instance's manager runs already, because a program called it."""

    def __init__(self, inner: BaseEnv) -> None:
        self.inner = inner
        self._items: Sequence[Item] | None = None
        self._first = 0
        self._evaluated = 0
        self._awaits_setup = self._managed = False
        self._table: JSON = None

    @property
    def name(self) -> str:
        return self.inner.name or type(self.inner).__name__

    @property
    def official_name(self) -> str:
        return self.inner.official_name

    @property
    def label_names(self) -> Collection[str]:
        return self.inner.label_names

    @property
    def world(self) -> RecordedTools | None:
        """The recorded replies, which the class also needs because it may call tools outside rollouts."""
        return self.inner.tool_world

    @world.setter
    def world(self, world: RecordedTools | None) -> None:
        self.inner.tool_world = world

    async def open(self) -> None:
        self.inner.mcp = mcp_servers(self.inner.config)
        if self.inner.mcp is not None:
            await self.inner.mcp.open()
        self._awaits_setup = not self.is_set_up
        if own_names(type(self.inner)).isdisjoint(MANAGERS.values()):
            await self.set_up()

    async def set_up(self) -> None:
        """Call `setup` if it has not been called. If a class wraps its run in a manager, this happens inside the
        manager, before the first task."""
        if self._awaits_setup:
            self._awaits_setup = False
            await run_hook(ConfigError, called(self.inner.setup), f"{self.name} cannot begin: setup")

    def trainer_takes(self, most_tokens: int | None) -> None:
        self.inner.max_token_len = -1 if most_tokens is None else most_tokens

    async def managed(self, command: str, roll_out: Callable[[], Awaitable[Totals]]) -> Totals:
        method, totals, self._managed = MANAGERS[command], None, True
        if self.is_managed or method not in own_names(type(self.inner)):
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
            raise ConfigError(f"{self.name}.{method} did not call super().{method}(), which rolls out the tasks")
        return totals

    async def aclose(self) -> None:
        if self.inner.mcp is not None:
            await self.inner.mcp.aclose()

    async def tasks(self) -> AsyncIterator[Task]:
        if self._items is not None:
            for number, item in enumerate(self._items, self._first):
                yield await self._task(item, number)
            return
        await self.set_up()
        number = 0
        while True:
            item = await run_hook(ConfigError, self.next_item(), f"{self.name} has no item {number}: get_next_item")
            if item is None:
                return
            yield await self._task(item, number)
            number += 1

    async def next_item(self) -> Item:
        """Return the next item, or None at the end."""
        return await settled(self.inner.get_next_item())

    async def _task(self, item: Item, number: int) -> Task:
        """Return the task of an item. For an unusable item, return a task that `resolve` refuses with the reason."""
        try:
            task = self.task(item, number)
            if isawaitable(task.prompt):
                task = replace(task, prompt=await task.prompt)
            if not isinstance(task.prompt, str | Sequence):
                raise TaskError(f"format_prompt returned {task.prompt!r:.100}, which is neither text nor messages")
        except Exception as error:
            logger.debug("item %d has no task", number, exc_info=True)
            return Task(
                id=f"item-{number}",
                prompt="",
                data=_Unusable(f"item {number} cannot be a task: {told(error)}{place(error)}"),
            )
        return task

    async def resolve(self, task: Task) -> Task:
        if isinstance(task.data, _Unusable):
            raise TaskError(task.data.reason)
        return task

    async def evaluate(self, evaluation: Evaluation) -> Logged:
        async def run_items(items: Sequence[Item], samples: int, *, plain: bool = False) -> list[Trajectory]:
            first, left, expected = self._evaluated, evaluation.limit, len(items)
            if self.choice is not None:
                self._evaluated += len(items)
                ids = [(await self._task(item, number)).id for number, item in enumerate(items, first)]
                evaluated.update(dict.fromkeys(ids))
                choice = self.choice.among(ids)
                chosen = [each for each in dict.fromkeys(ids) if each in choice]
                expected = len(chosen) if left is None else min(len(chosen), left - len(played))
                played.extend(chosen[:expected])
            else:
                items = items if left is None else items[: left - first]
                self._evaluated += (expected := len(items))
                chosen = []
            if expected <= 0:
                return []
            over = self.over(items, first, plain=plain)
            over.choose([escaped(each) for each in chosen])
            done = await evaluation.roll_out(over, samples, first, expected)
            trajectories = [trajectory for group in done for trajectory in group.trajectories]
            if len(done) < expected or any(each.outcome is Outcome.CANCELLED for each in trajectories):
                raise RunStopped("the evaluation was stopped, so its metrics would cover only part of it")
            return trajectories

        await self.set_up()
        self._evaluated = 0
        self.inner.most_evaluated = evaluation.limit if self.choice is None else None
        self.inner._run_items, self.inner._evaluation = run_items, {}
        refused: dict[str, TaskError] = {}
        evaluated, played = dict[str, None](), list[str]()
        with assigned(REFUSED_SLOTS, refused):
            await run_hook(ConfigError, called(self.inner.evaluate), f"cannot evaluate {self.name}: evaluate")
        if self.choice is not None:  # only now, because each call of `run_items` has a part of the tasks
            self.choice.check(evaluated, self.name)
        if refused:  # `evaluate` may have caught the errors, but it cannot have measured these tasks
            logger.warning(
                "%d of the evaluation's tasks got no slot, and its metrics may count them as failed. First: %s",
                *(len(refused), next(iter(refused.values()))),
            )
            evaluation.totals.rollouts += len(refused)
        return self.inner._evaluation

    def over(self, items: Sequence[Item], first: int, *, plain: bool = False) -> Self:
        """Return the same environment over these items, numbered from `first`, in place of its data set. If `plain`,
        the class does not collect the rollouts itself."""
        other = copy(self)
        other._items, other._first = items, first
        return other

    @abstractmethod
    def task(self, item: Item, number: int) -> Task:
        """Return the task of an item. An item that is drawn again becomes a separate task with its own number."""

    async def ended(self, task: Task, group: Group) -> None:
        if self._managed and self._items is not None:  # an evaluation during the run
            return
        self.inner.curr_step += 1
        try:
            line = group_line(group, env=self.name, model="")
            if line is not None:
                self.inner.completion_lengths += [sum(mask != -100 for mask in masks) for masks in line["masks"]]
                await settled(self.inner.add_rollouts_for_wandb(line, task.data))
        except Exception as error:
            doing = f"{self.name}.add_rollouts_for_wandb on {group.group_id}"
            logger.warning("%s failed with %s%s", doing, told(error), place(error))

    async def figures(self) -> Mapping[str, float | str]:
        await settled(self.inner.wandb_log({}))
        logged, self.inner._logged = self.inner._logged, {}
        found = numeric_values(logged)
        self.inner._logged.update(found)  # numbers stay until they are replaced; strings are returned only once
        self._table = next((value for value in logged.values() if _is_table(value)), self._table)
        return {**found, **{name: value for name, value in logged.items() if isinstance(value, str) and value}}

    def shown(self) -> Sequence[tuple[str, float]]:
        """Return the kept rollouts that begin with a text and a score, because a subclass may keep other data. If there
        are none, return the rows of the latest table that the class made of them."""
        kept: Iterable[JSON] = (rollout for group in self.inner.rollouts_for_wandb for rollout in group)
        return _texts_and_scores(kept) or _texts_and_scores([] if self._table is None else self._table.data)


def _is_table(value: object) -> bool:
    """Return whether a metric is a table, such as `wandb.Table`."""
    return isinstance(getattr(value, "columns", None), list) and isinstance(getattr(value, "data", None), list)


def _texts_and_scores(rows: Iterable[JSON]) -> list[tuple[str, float]]:
    lists = [each for each in rows if isinstance(each, (list, tuple)) and len(each) >= 2]
    return [
        (text, found) for text, score, *_ in lists if isinstance(text, str) and (found := number(score)) is not None
    ]


class CollectedEnvironment(ClassEnvironment):
    """Runs one instance of a class that may collect rollouts itself. Items that the class queues are played before
    those of its data set."""

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
                raise RolloutFailed(rollout.ending.error)
            row: ScoredDataItem = rollout.meta["row"]
            played.append((rollout, row))
            return row

        async def both() -> JSON:
            got, backlog = row_and_backlog(await called(self.inner.collect_trajectories, task.data))
            return (got if got is None else await settled(self.inner.postprocess_histories(got))), backlog

        rows: list[Row] = []
        try:
            with (
                slots_needed(),
                assigned(PLAYER, play),
                assigned(COLLECTED, SessionContext(group.group_id, task, tools=group.kit.names)),
                self.group_tools(group.kit),
                ended_loops() as self._ended[group.group_id],
            ):
                rows = rows_of(await self._asked(both(), "collect_trajectories", task), task.id)
        except RolloutFailed:  # the rollouts' records have the reasons
            if not plays:
                raise
        self._groups[group.group_id] = plays, self._assign(rows, sorted(played, key=lambda each: each[0].index), task)
        return plays + len(self._groups[group.group_id][1])

    def group_tools(self, kit: Kit) -> AbstractContextManager[None]:
        """Make the group's tools known to the class while the block runs."""
        return nullcontext()

    def _assign(self, rows: Sequence[Row], played: Sequence[tuple[Rollout, Row]], task: Task) -> list[Row]:
        """Assign to every played rollout its row of the collected group, and fail the rollouts that the class left out.
        Returns the rows that the class made itself."""
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
            rollout.meta["row"] = row
            score = replace(rollout.score, reward=float(row["scores"]))
            rollout.take_score(score, self.project(rollout, score))
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
                    raise TaskError("super().collect_trajectory can be called only once per rollout")
                try:
                    return await self.play(rollout, attempt)
                except InfraError as error:
                    failures.append(error)
                    raise

            try:
                with (
                    slots_needed(),
                    assigned(PLAYER, play),
                    in_rollout(rollout),
                    self.group_tools(rollout.seat.kit),
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
            if failures:  # a class that catches the failure must not turn it into a score
                raise failures[0]
        row = rollout.meta["row"] = checked_row(row, rollout.task.id)
        return _result_of(row, ended) if rollout.result is None else rollout.result

    async def play(self, rollout: Rollout, attempt: Attempt) -> ScoredDataItem:
        """Play the rollout as the class's base class would, and return its row. Raises `RolloutFailed` if the rollout
        has no score."""
        raise TaskError(f"{self.name} has no agent")

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
        """Queue items to be drawn next. A resumed run loses these items."""
        wanted = list(items)
        if wanted and not self._told:
            self._told = True
            logger.warning("%s returns items to be drawn next: a run that continues with --resume loses them", name)
        self._backlog.extend(wanted)

    async def _asked(self, collecting: Coroutine[object, object, JSON], method: str, task: Task) -> JSON:
        """Await the collected row or rows, queue the backlog, and return the row or rows. Raises `TaskError` for errors
        of the class."""
        name = f"{type(self.inner).__name__}.{method}"

        async def unpacked() -> JSON:
            return row_and_backlog(await bridged(collecting))

        got, backlog = await run_hook(TaskError, unpacked(), f"{name} on {task.id}")
        self.take_backlog(backlog, name)
        if got is None:
            raise TaskError(f"{name} gave nothing for {task.id}")
        return got


def _result_of(row: Row, ended: Sequence[AgentResult]) -> AgentResult:
    """Return the result of a collected rollout. Its outcome comes from the agent loop with the same messages, or from
    the only loop that ran. If neither exists, the rollout counts as ended naturally."""
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


def own_row(item: Mapping[str, JSON], result: AgentResult | None) -> TokenRow | None:
    """Return the row that the environment made; None if the row comes from the ledger. Only rows of the ledger count as
    exact."""
    state = (result.managed_state if result is not None else None) or {}
    row = TokenRow(
        tokens=list(item["tokens"]),
        masks=list(item["masks"]),
        logprobs=item.get("inference_logprobs") or None,
        source=item.get("token_source") or "environment",
    )
    if isinstance(state.get("ledger"), Ledger):
        if any(row.tokens == node.tokens and row.masks == node.masked_tokens for node in state["nodes"]):
            return None
        row.source = "environment" if state["nodes"] else row.source
    if row.source == PLACEHOLDER and (result is None or any(mask != -100 for mask in row.masks)):
        row.source = "environment"
    return row
