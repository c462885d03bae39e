"""`ListedEnv`: a class environment whose items are known before the run, such as those of a data set.

A subclass loads the items. Unusable items are left out with a warning; the others are drawn in order, repeatedly, or
only once if `total_steps` is -1. `evaluate` rolls out each held-out item `group_size` times (each item, if none are
held out), and logs pass rates and their intervals.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from palaestra.agent.result import AgentResult
from palaestra.contract.base_env import Item
from palaestra.contract.hermes_env import HermesAgentBaseEnv
from palaestra.contract.tool_context import ToolContext
from palaestra.core.errors import ConfigError, TaskError
from palaestra.core.types import JSON
from palaestra.envs.config.fields import ListedEnvConfig
from palaestra.envs.run import pass_at_k
from palaestra.inference.config import APIServerConfig
from palaestra.rollouts.records import Trajectory

logger = logging.getLogger(__name__)

MOST_SHOWN = 20
"""The maximum number of left-out items that are named individually."""


class ListedEnv(HermesAgentBaseEnv):
    """Subclass this, and implement `load`, `item_id`, `format_prompt` and `as_environment`, which scores, or
    `compute_reward`."""

    env_config_cls: ClassVar[type[ListedEnvConfig]] = ListedEnvConfig
    config: ListedEnvConfig

    def __init__(
        self,
        config: ListedEnvConfig,
        server_configs: Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.items: list[Item] = []
        self.left_out: list[TaskError] = []
        self._training: list[Item] = []
        self._given = 0

    @abstractmethod
    async def load(self) -> Iterable[Item | TaskError]:
        """Return the items that the settings select, in order, with an error in place of each unusable item. Raises
        `ConfigError`."""

    @abstractmethod
    def item_id(self, item: Item, number: int) -> str:
        """Return the id of an item, which is the same each time the item is drawn."""

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        raise NotImplementedError(f"rollouts of {self.name} are scored by {type(self.as_environment()).__name__}.score")

    def labels(self, item: Item) -> Collection[str]:
        """Return labels that group an evaluation's metrics, such as `category/NAME`."""
        return ()

    async def sort_out(self) -> None:
        """Load the usable items into `items` and the errors into `left_out`."""
        known: set[str] = set()
        for item in await self.load():
            if isinstance(item, TaskError):
                self.left_out.append(item)
            elif (name := self.item_id(item, 0)) in known:
                self.left_out.append(TaskError(f"{name}: another task has this name"))
            else:
                known.add(name)
                self.items.append(item)

    async def setup(self) -> None:
        await self.sort_out()
        for error in self.left_out[:MOST_SHOWN]:
            logger.warning("left out: %s", error)
        if len(self.left_out) > MOST_SHOWN:
            logger.warning("left out: %d more unusable items", len(self.left_out) - MOST_SHOWN)
        if not self.items:
            said = f"; {len(self.left_out)} left out, for the reasons above" if self.left_out else ""
            raise ConfigError(f"{self.source} has no usable task among the chosen ones{said}")

    @property
    def source(self) -> str:
        return self.config.dataset_name or str(self.name)

    def chosen(self, *, evaluating: bool) -> list[Item]:
        """Return the items for `evaluate` or, if not `evaluating`, for the other commands. Raises `ConfigError` if
        there are none."""
        items = [item for item in self.items if self.config.serves(self.item_id(item, 0), evaluating=evaluating)]
        if not items:
            raise ConfigError(
                f"held_out {self.config.held_out:g} leaves none of {len(self.items)} tasks to "
                f"{'evaluate' if evaluating else 'train on'}; set a different share or a different seed"
            )
        return items

    async def get_next_item(self) -> Item:
        """Return the next item. Items come in order and repeat; if `total_steps` is -1, each comes only once."""
        if not self._given:
            self._training = self.chosen(evaluating=False)
        if self._given >= len(self._training) and self.config.total_steps < 0:
            return None
        item = self._training[self._given % len(self._training)]
        self._given += 1
        return item

    def evaluated_items(self) -> Sequence[Item] | None:
        return self.chosen(evaluating=True) if type(self).evaluate is ListedEnv.evaluate else None

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> Mapping[str, JSON]:
        """Roll out every held-out item (every item, if none are held out) `group_size` times, and log the metrics."""
        items, attempts = self.chosen(evaluating=True)[: self.most_evaluated], self.config.group_size
        done = await self.evaluate_items(items, attempts)
        labels = {self.item_id(item, 0): self.labels(item) for item in items}
        metrics = pass_at_k.figures(done, attempts, tasks=len(items), labels=labels)
        metrics |= {"tasks_left_out": len(self.left_out), **self.own_figures(metrics)}
        await self.evaluate_log(metrics, samples=map(self.sample, done))
        return metrics

    def own_figures(self, metrics: Mapping[str, JSON]) -> Mapping[str, JSON]:
        return {}

    def sample(self, trajectory: Trajectory) -> Mapping[str, JSON]:
        return pass_at_k.sample(trajectory)
