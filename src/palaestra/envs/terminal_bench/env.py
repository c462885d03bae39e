"""`TerminalBench2EvalEnv`: work in a terminal, checked by the task's own verifier.

Which tasks there are, which of them are rolled out, and what an evaluation says. How one is prepared and graded is in
`environment.py`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from palaestra.agent.result import AgentResult
from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.envs.base_env import Item
from palaestra.envs.hermes_base_env import HermesAgentBaseEnv
from palaestra.envs.terminal_bench.config import TerminalBench2EvalConfig
from palaestra.envs.terminal_bench.environment import TerminalBenchEnvironment
from palaestra.envs.terminal_bench.evaluation import evaluation
from palaestra.envs.terminal_bench.sources import LeftOut, load_tasks
from palaestra.envs.terminal_bench.tasks import TerminalTask
from palaestra.inference.config import APIServerConfig
from palaestra.rollouts.context import ToolContext

logger = logging.getLogger(__name__)

MOST_SHOWN = 20
"""How many tasks that were left out are named one by one."""


class TerminalBench2EvalEnv(HermesAgentBaseEnv):
    """Work in a terminal, checked by each task's own verifier: Terminal-Bench 1 and 2, and any Harbor task."""

    name: ClassVar[str | None] = "terminalbench_2"
    env_config_cls: ClassVar[type[TerminalBench2EvalConfig]] = TerminalBench2EvalConfig

    def __init__(
        self,
        config: TerminalBench2EvalConfig,
        server_configs: Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        if not isinstance(config, TerminalBench2EvalConfig):
            raise ConfigError(f"{type(self).__name__} takes a TerminalBench2EvalConfig, not {type(config).__name__}")
        self.settings = config
        self.tasks: list[TerminalTask] = []
        self.left_out: tuple[LeftOut, ...] = ()
        self._given = 0

    def as_environment(self) -> TerminalBenchEnvironment:
        return TerminalBenchEnvironment(self, self.settings)

    async def setup(self) -> None:
        self.load()
        for each in self.left_out[:MOST_SHOWN]:
            logger.warning("left out: %s", each)
        if len(self.left_out) > MOST_SHOWN:
            logger.warning("left out: %d more tasks that cannot be used", len(self.left_out) - MOST_SHOWN)
        if not self.tasks:
            raise ConfigError(f"{self.settings.dataset_name} has no task that can be used and is chosen")

    def load(self) -> None:
        """Read the tasks of the data set; those that cannot be used are in `left_out`."""
        settings = self.settings
        cache = Path(settings.cache_dir).expanduser()
        loaded = load_tasks(settings.dataset_name or "", cache, split=settings.dataset_split)
        self.tasks, self.left_out = self._chosen(list(loaded.tasks)), loaded.left_out

    def _chosen(self, tasks: list[TerminalTask]) -> list[TerminalTask]:
        settings = self.settings
        kept = [task for task in tasks if settings.task_filter is None or task.is_named(settings.task_filter)]
        kept = [task for task in kept if not task.is_named(settings.skip_tasks)]
        if settings.shuffle:
            random.Random(settings.seed).shuffle(kept)
        return kept[: settings.max_items] if settings.max_items else kept

    async def get_next_item(self) -> Item:
        """The tasks in order, again and again; once only when `total_steps` is -1."""
        if self._given >= len(self.tasks) and self.settings.total_steps < 0:
            return None
        task = self.tasks[self._given % len(self.tasks)]
        self._given += 1
        return task

    def item_id(self, item: Item, number: int) -> str:
        return str(item.name)

    def format_prompt(self, item: Item) -> str:
        return str(item.instruction).strip()

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        raise NotImplementedError("rollouts of this environment are graded by TerminalBenchEnvironment.score")

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> Mapping[str, JSON]:
        """Attempt every task `group_size` times; log pass@k with intervals, overall and per category."""
        attempts = self.settings.group_size
        done = await self.evaluate_items(self.tasks, attempts)
        metrics, samples = evaluation(self.tasks, done, attempts)
        metrics["tasks_left_out"] = len(self.left_out)
        await self.evaluate_log(metrics, samples, task_name=self.name)
        return metrics
