"""What the adapters of all class forms have in common: items become tasks, the class's own figures become the run's."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

from palaestra.core.errors import ConfigError, TaskError
from palaestra.core.literals import number
from palaestra.core.types import JSON, Task
from palaestra.core.user_code import place, run_hook, settled, told
from palaestra.envs.api.base_env import BaseEnv, Item
from palaestra.envs.config.build import mcp_servers
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.export.atropos import group_line
from palaestra.rollouts.records import Group
from palaestra.rollouts.spec import RecordedTools

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Unusable:
    """What stands for an item of which no task can be made."""

    reason: str


ROW_KEYS = frozenset({"tokens", "masks", "scores", "messages", "token_source", "inference_logprobs"})
"""The keys of a training row that a trajectory has fields for."""


class ClassEnvironment(Environment):
    """Runs one instance of a class environment."""

    def __init__(self, inner: BaseEnv) -> None:
        self.inner = inner
        self._items: Sequence[Item] | None = None
        self._first = 0

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
        await run_hook(ConfigError, self._begun(), f"{self.name} cannot begin: setup")

    async def _begun(self) -> None:
        await settled(self.inner.setup())

    async def aclose(self) -> None:
        if self.inner.mcp is not None:
            await self.inner.mcp.aclose()

    async def tasks(self) -> AsyncIterator[Task]:
        if self._items is not None:
            for number, item in enumerate(self._items, self._first):
                yield self._task(item, number)
            return
        number = 0
        while (item := await self._next_item(number)) is not None:
            yield self._task(item, number)
            number += 1

    async def _next_item(self, number: int) -> Item:
        return await run_hook(ConfigError, self.next_item(), f"{self.name} has no item {number}: get_next_item")

    async def next_item(self) -> Item:
        """The next item, or None when there are no more."""
        return await settled(self.inner.get_next_item())

    def _task(self, item: Item, number: int) -> Task:
        """The task of an item, or one that ends at its beginning with the reason why there is none."""
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

    def over(self, items: Sequence[Item], first: int) -> Self:
        """The same environment over these items, numbered from `first`, instead of its data set."""
        other = copy(self)
        other._items, other._first = items, first
        return other

    @abstractmethod
    def task(self, item: Item, number: int) -> Task:
        """The task of an item. Items drawn again are tasks of their own, told apart by their number."""

    async def ended(self, task: Task, group: Group) -> None:
        self.inner.curr_step += 1
        try:
            line = group_line(group, env=self.name, model="")
            if line is not None:
                await settled(self.inner.add_rollouts_for_wandb(line, task.data))
        except Exception:
            logger.warning("%s.add_rollouts_for_wandb failed on group %s", self.name, group.group_id, exc_info=True)

    async def figures(self) -> Mapping[str, float]:
        await settled(self.inner.wandb_log({}))
        return numbers(self.inner._logged)

    def shown(self) -> Sequence[tuple[str, float]]:
        """What the class kept, as far as it is a text and a score: a subclass may keep something else."""
        kept: Iterable[JSON] = (rollout for group in self.inner.rollouts_for_wandb for rollout in group)
        pairs = [each for each in kept if isinstance(each, (list, tuple)) and len(each) == 2]
        return [
            (text, found) for text, score in pairs if isinstance(text, str) and (found := number(score)) is not None
        ]


def numbers(detail: Mapping[str, JSON]) -> dict[str, float]:
    """What of a detail can be averaged."""
    return {key: found for key, value in detail.items() if (found := number(value)) is not None}
