"""Which task is played next."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from palaestra import Task
from palaestra_train import TrainingConfig
from palaestra_train.task_memory import Memory, next_task, pass_rate, remember, reward_signal

TASKS = [Task(id=name, prompt="") for name in ("solved", "hard", "middling", "new")]


def drawn(memory: Memory, *, taken: tuple[str, ...] = (), draws: int = 0, **settings: float) -> Counter[str]:
    config, rng = TrainingConfig(**settings), random.Random(0)
    return Counter(next_task(TASKS, memory, config, taken=taken, size=8, drawn=draws, rng=rng).id for _ in range(400))


def played() -> Memory:
    memory: Memory = {}
    for name, right in (("solved", 8), ("hard", 0), ("middling", 4)):
        for _ in range(3):
            remember(memory, name, [1.0] * right + [0.0] * (8 - right), drawn=0)
    return memory


def test_tasks_that_are_always_or_never_solved_are_set_aside() -> None:
    found = drawn(played(), replay=0.1)
    assert found["middling"] + found["new"] > 0.9 * 400
    assert 0 < found["solved"] + found["hard"] < 0.1 * 400
    assert set(drawn(played(), replay=1.0).values()) <= set(range(70, 131))


def test_what_is_known_about_a_task_fades() -> None:
    memory = played()
    assert pass_rate(memory, "hard", 0, half_life=10) < 0.1
    assert 0.3 < pass_rate(memory, "hard", 60, half_life=10) < 0.5
    assert drawn(memory, draws=60, replay=0.0)["hard"] > 40


def test_a_task_of_this_step_is_drawn_again_only_if_there_is_no_other() -> None:
    assert drawn(played(), taken=("middling", "new", "solved"), replay=0.0) == {"hard": 400}
    assert drawn(played(), taken=tuple(task.id for task in TASKS), replay=0.0).total() == 400


def test_the_chance_of_a_signal() -> None:
    assert reward_signal(0.5, 2) == pytest.approx(0.5)
    assert reward_signal(1.0, 8) == reward_signal(0.0, 8) == 0.0
