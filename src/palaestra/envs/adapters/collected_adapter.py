"""The adapter between classes that collect their rollouts themselves and the Environment protocol.

`collect_trajectory` is asked once per rollout, `collect_trajectories` once per group; the run is journalled at that
granularity. What the class does in there is its own affair: there is no slot, no tool and no sealed grading, and the
tokens are what the class says they are.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

from palaestra.agent.result import AgentResult
from palaestra.core.errors import TaskError
from palaestra.core.literals import number
from palaestra.core.types import JSON, Score, Task
from palaestra.core.user_code import run_hook, settled
from palaestra.envs.adapters.class_adapter import ROW_KEYS, ClassEnvironment
from palaestra.envs.api.base_env import BaseEnv, Item
from palaestra.inference.ledger.records import TokenRow
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.records import Group
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import Kit, Projection
from palaestra.tools.registry.registry import ToolRegistry

logger = logging.getLogger(__name__)

Row = Mapping[str, JSON]

PER_ROLLOUT = (
    *("advantages", "ref_logprobs", "inference_logprobs", "overrides", "messages", "images"),
    *("distill_token_ids", "distill_logprobs"),
)
"""Keys of a group that may hold one value for each rollout, besides tokens, masks and scores."""

T = TypeVar("T")


class CollectedEnvironment(ClassEnvironment):
    """Runs one instance of a class that collects. Items that it wants drawn next come before those of its data set."""

    def __init__(self, inner: BaseEnv) -> None:
        super().__init__(inner)
        self._backlog: deque[Item] = deque()
        self._groups: dict[str, list[Row]] = {}
        self._whole = collects_groups(type(inner))
        self._told = False

    async def next_item(self) -> Item:
        return self._backlog.popleft() if self._backlog else await super().next_item()

    def task(self, item: Item, number: int) -> Task:
        return Task(id=self.inner.item_id(item, number), prompt="", data=item)

    def kit(self, task: Task, rng: random.Random) -> Kit:
        return Kit(ToolRegistry())

    @property
    def collects_groups(self) -> bool:
        return self._whole

    async def collect(self, task: Task, group_id: str, wanted: int) -> int:
        if not self._whole:
            return wanted
        rows = _rows(await self._asked(self.inner.collect_trajectories(task.data), task), task.id)
        self._groups[group_id] = rows
        return len(rows)

    async def act(self, rollout: Rollout) -> AgentResult:
        if self._whole:
            row = self._groups[rollout.group_id][rollout.index]
        else:
            row = await self._asked(self.inner.collect_trajectory(rollout.task.data), rollout.task)
        rollout.meta["row"] = checked(row, rollout.task.id)
        return AgentResult(messages=list(row.get("messages") or ()), finished_naturally=True)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        return Score(rollout.meta["row"]["scores"])

    def project(self, rollout: Rollout, score: Score | None) -> Projection:
        row: Row | None = rollout.meta.get("row")
        if row is None:
            return Projection()
        tokens = TokenRow(
            tokens=list(row["tokens"]),
            masks=list(row["masks"]),
            logprobs=row.get("inference_logprobs") or None,
            source="environment",
        )
        return Projection(tokens, {key: value for key, value in row.items() if key not in ROW_KEYS and value})

    async def ended(self, task: Task, group: Group) -> None:
        self._groups.pop(group.group_id, None)
        await super().ended(task, group)

    async def _asked(self, call: Awaitable[tuple[T | None, list[Item]]], task: Task) -> T:
        """What the class collected; what it does wrong is the task's fault."""
        name = f"{type(self.inner).__name__}.{'collect_trajectories' if self._whole else 'collect_trajectory'}"

        async def unpacked() -> tuple[T | None, list[Item]]:
            got, backlog = await settled(call)
            return got, list(backlog or ())

        got, backlog = await run_hook(TaskError, unpacked(), f"{name} on {task.id}")
        if backlog and not self._told:
            self._told = True
            logger.warning("%s returns items to be drawn next: they are lost to a run that goes on with --resume", name)
        self._backlog.extend(backlog)
        if got is None:
            raise TaskError(f"{name} gave nothing for {task.id}")
        return got


def collects(cls: type[BaseEnv]) -> bool:
    """Whether a class has its own way of collecting rollouts, which the runner then calls."""
    return collects_groups(cls) or "collect_trajectory" in _own(cls)


def collects_groups(cls: type[BaseEnv]) -> bool:
    """Whether it collects whole groups in one go."""
    return "collect_trajectories" in _own(cls)


def _own(cls: type[BaseEnv]) -> set[str]:
    """The names that a user's class, or one it inherits from, defines; this package's own classes do not count."""
    return {name for each in cls.__mro__ if not each.__module__.startswith("palaestra.") for name in vars(each)}


def checked(row: object, task_id: str) -> Row:
    """A row that can be recorded. Raises `TaskError` that says what is wrong with it."""
    if not isinstance(row, Mapping):
        raise TaskError(f"{task_id}: a row is {type(row).__name__}, not a ScoredDataItem")
    for key in ("tokens", "masks", "scores"):
        if row.get(key) is None:
            raise TaskError(f"{task_id}: a row lacks {key}")
    if number(row["scores"]) is None:
        raise TaskError(f"{task_id}: scores of a row is {type(row['scores']).__name__}, not a number")
    lengths = {key: len(row[key]) for key in ("tokens", "masks", "inference_logprobs") if row.get(key)}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{count} {key}" for key, count in lengths.items())
        raise TaskError(f"{task_id}: a row has {told}; each token needs one of each")
    return row


def _rows(group: object, task_id: str) -> list[Row]:
    """The rows of a group, or of a list of rows. Raises `TaskError` for anything else."""
    if isinstance(group, Sequence) and not isinstance(group, (str, bytes)):
        return [checked(row, task_id) for row in group if row is not None]
    if not isinstance(group, Mapping) or not isinstance(group.get("tokens"), Sequence):
        raise TaskError(f"{task_id}: a group is {type(group).__name__}, not a ScoredDataGroup or a list of rows")
    count = len(group["tokens"])
    lists = {key: group[key] for key in ("tokens", "masks", "scores", *PER_ROLLOUT) if group.get(key)}
    for key, values in lists.items():
        if len(values) != count:
            raise TaskError(f"{task_id}: a group has {count} tokens and {len(values)} {key}")
    shared = {key: value for key, value in group.items() if key not in lists and value is not None}
    return [{**shared, **{key: values[index] for key, values in lists.items()}} for index in range(count)]
