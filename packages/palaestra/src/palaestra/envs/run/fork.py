"""Continues a recorded rollout in a new run (`palaestra fork`): the settings of that run, and its only task."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from palaestra.envs.run.evaluate import EvaluatedEnvironment
from palaestra.rollouts.counterfactual import Counterfactual
from palaestra.rollouts.schedule import Numbered
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Task

_OF_THE_RUN = frozenset({
    "group_size", "total_steps", "only_tasks", "short_groups", "steps_per_eval", "data_path_to_save_groups",
    "data_dir_to_save_evals", "ensure_scores_are_not_same", "timings_from", "metrics_port",
})  # fmt: skip
"""Settings of the earlier run that do not concern a single rollout."""

_MOST_TASKS = 100_000
"""How many tasks are read to find the one of the rollout, because an environment may have tasks without end."""


def settings_for(recorded: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the recorded settings that apply to a run that continues one of the rollouts."""
    env = {name: value for name, value in dict(recorded.get("env") or {}).items() if name not in _OF_THE_RUN}
    return {**recorded, "env": env}


async def forked_task(environment: EvaluatedEnvironment, begins: Counterfactual) -> AsyncIterator[Numbered]:
    """Yield the task of the rollout, with its number. Raises `ConfigError` if the environment no longer has it."""
    for tasks in (environment.chosen_tasks(), await environment.evaluated_tasks()):
        found = None if tasks is None else await _find_task(tasks, begins.task_id)
        if found is not None:
            yield begins.number, found
            return
    raise ConfigError(f"{environment.name} no longer has the task {begins.task_id!r}, so it cannot be continued")


async def _find_task(tasks: AsyncIterator[Task], task_id: str) -> Task | None:
    read = 0
    async for task in tasks:
        if task.id == task_id:
            return task
        read += 1
        if read == _MOST_TASKS:
            break
    return None
