"""Chooses the next task to train on by the rewards that the model earned on each task before.

A group of equal rewards teaches nothing, so tasks that the model solves always or never are set aside. Which tasks
those are changes as the model learns, so a few draws play a task that was set aside. No I/O.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Sequence
from typing import TypeAlias

from palaestra_slots.core.types import Task
from palaestra_train.config import TrainingConfig

Memory: TypeAlias = dict[str, tuple[float, float, int]]
"""For each task id the discounted sum and number of its rewards, and the number of draws before the latest one; under
the key `RECENT` the same for all tasks."""

RECENT = "*"

KEPT = 0.5
"""How much an earlier group of a task counts, compared with its latest one."""

PRIOR = 2.0
"""The number of rollouts as which the recent mean reward of all tasks counts in the estimate of one task."""


def remember(memory: Memory, task: str, rewards: Sequence[float], drawn: int) -> None:
    """Add a group's rewards to `memory` after `drawn` draws. Rewards below 0 count as 0, and rewards above 1 as 1."""
    found = [min(1.0, max(0.0, each)) for each in rewards]
    if found:
        earned, count, _ = memory.get(task, (0.0, 0.0, 0))
        memory[task] = KEPT * earned + sum(found), KEPT * count + len(found), drawn
        earned, count, _ = memory.get(RECENT, (0.0, 0.0, 0))
        memory[RECENT] = 0.9 * earned + statistics.fmean(found), 0.9 * count + 1, drawn


def pass_rate(memory: Memory, task: str, drawn: int, half_life: float) -> float:
    """Return the estimated mean reward of a task; 0.5 if nothing is known about any task. What is known about a task
    counts half as much after `half_life` draws, because the model learns from other tasks meanwhile."""
    earned, count, _ = memory.get(RECENT, (0.0, 0.0, 0))
    general = earned / count if count else 0.5
    earned, count, at = memory.get(task, (0.0, 0.0, drawn))
    kept = math.pow(0.5, max(0, drawn - at) / half_life)
    return (kept * earned + PRIOR * general) / (kept * count + PRIOR)


def reward_signal(rate: float, size: int) -> float:
    """Return the chance that the rewards of a group of `size` rollouts differ, if each rollout earns 1 with the chance
    `rate`, and otherwise 0."""
    return 1.0 - math.pow(rate, size) - math.pow(1 - rate, size)


def next_task(
    tasks: Sequence[Task],
    memory: Memory,
    config: TrainingConfig,
    *,
    taken: Collection[str],
    size: int,
    drawn: int,
    rng: random.Random,
) -> Task:
    """Return the next task after `drawn` draws. The share `replay` of draws chooses among all tasks; the others choose
    among those with a pass rate between `least_rate` and `most_rate`, or among the tasks closest to that if there are
    none, and prefer tasks whose groups of `size` rollouts will probably differ. Tasks in `taken` are chosen only if
    there are no others."""
    free = [task for task in tasks if task.id not in taken] or list(tasks)
    if rng.random() < config.replay:
        return rng.choice(free)
    rates = [pass_rate(memory, task.id, drawn, len(tasks) / 2) for task in free]
    apart = [max(0.0, config.least_rate - rate, rate - config.most_rate) for rate in rates]
    nearest = min(apart)
    chosen = [number for number, far in enumerate(apart) if far <= nearest + 1e-9]
    weights = [reward_signal(rates[number], size) ** 4 + 1e-6 for number in chosen]
    return free[rng.choices(chosen, weights)[0]]
