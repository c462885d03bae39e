"""Count the lines of a file: the smallest complete environment."""

from __future__ import annotations

from collections.abc import Iterator

from palaestra.envs.api.function_form import environment
from palaestra_slots.core.types import Task
from palaestra_slots.sandbox.slot import Slot


@environment(toolsets=["terminal"])
def count_lines(n: int = 100) -> Iterator[Task]:
    """Count the lines of a file: the smallest complete environment."""
    for i in range(n):
        yield Task(
            id=f"lines-{i}",
            prompt="Write the number of lines of a.txt to answer.txt",
            files={"a.txt": "x\n" * (i + 2)},
            solution="wc -l < a.txt > answer.txt",
            answer=str(i + 2),  # at least 2, because 0 and 1 are easily guessed
        )


@count_lines.score
async def correct(task: Task, sandbox: Slot) -> bool:
    return (await sandbox.read_text("answer.txt", missing="")).strip() == str(task.answer)
