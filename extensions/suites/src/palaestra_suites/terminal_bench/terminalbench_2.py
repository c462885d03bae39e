"""Work in a terminal, checked by each task's own verifier: Terminal-Bench 1 and 2, and any Harbor task.

This module selects the tasks and reports evaluations; `task_environment.py` prepares and grades them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from palaestra.envs.run import pass_at_k
from palaestra.rollouts.records import Trajectory
from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.types import JSON, Outcome
from palaestra_slots.images.task_root import HOST
from palaestra_suites.terminal_bench.find_tasks import load_tasks
from palaestra_suites.terminal_bench.named_tasks import PREFIX, named_folders
from palaestra_suites.terminal_bench.task_environment import TaskEnvironment
from palaestra_suites.terminal_bench.terminal_task import TerminalTask, is_named
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig

BUILT_IN = "built-in"
"""The name of the built-in dataset: two small tasks that need only a shell."""

BUILT_IN_TASKS = Path(__file__).parent / "builtin"


class TerminalBenchEnvironment(TaskEnvironment):
    """Work in a terminal, checked by each task's own verifier: Terminal-Bench 1 and 2, and any Harbor task."""

    name = "terminalbench_2"
    official_name = "reward"
    config_class = TerminalBench2EvalConfig
    check_values: ClassVar[Mapping[str, JSON]] = {"dataset_name": BUILT_IN, "base_image": HOST}

    async def load(self) -> Iterable[JSON | TaskError]:
        config = self.config
        cache = local_path(config.cache_dir)
        source = str(BUILT_IN_TASKS) if config.dataset_name == BUILT_IN else config.dataset_name or ""
        named = source.removeprefix(PREFIX) if source.startswith(PREFIX) else None
        folders = [] if named is None else await named_folders(named, config.registry, cache)
        loaded = load_tasks(
            source,
            cache,
            split=config.dataset_split,
            fields=config.dataset_fields,
            folders=folders,
            variables=config.task_env_vars,
        )
        chosen = self._chosen(list(loaded.tasks))
        left_out = [each for each in loaded.left_out if self._concerns(each.name)]
        if loaded.tasks and not chosen and not left_out:
            names = ", ".join(task.name for task in loaded.tasks[:5]) + (", …" if len(loaded.tasks) > 5 else "")
            raise ConfigError(
                f"task_filter {config.task_filter!r} and skip_tasks {config.skip_tasks!r} select none of the "
                f"{len(loaded.tasks)} tasks of {source}: {names}"
            )
        return [*chosen, *left_out]

    def _concerns(self, name: str) -> bool:
        """Return whether the settings may select a task that could not be read, so that its category is unknown."""
        wanted, skipped = self.config.task_filter, self.config.skip_tasks
        chosen = wanted is None or "category:" in wanted or is_named(wanted, name, "")
        return chosen and not is_named(skipped, name, "")

    def _chosen(self, tasks: list[TerminalTask]) -> list[TerminalTask]:
        config = self.config
        kept = [task for task in tasks if config.task_filter is None or task.is_named(config.task_filter)]
        kept = [task for task in kept if not task.is_named(config.skip_tasks)]
        if config.shuffle:
            random.Random(config.seed).shuffle(kept)
        return kept[: config.max_items] if config.max_items else kept

    def item_id(self, item: JSON) -> str:
        return str(item.name)

    def labels(self, item: JSON) -> Collection[str]:
        return (f"category/{item.metadata.category}",)

    def prompt(self, item: JSON) -> str:
        return str(item.instruction).strip()

    def sample(self, trajectory: Trajectory) -> Mapping[str, JSON]:
        """Return one attempt, with the field names that this environment's samples usually have."""
        categories = {task.name: task.metadata.category for task in self.items}
        return pass_at_k.sample(trajectory) | {
            "task_name": trajectory.task_id,
            "category": categories.get(trajectory.task_id, ""),
            "attempt": trajectory.index,
            "turns_used": len(trajectory.turns),
            "finished_naturally": trajectory.outcome is Outcome.NATURAL,
        }
