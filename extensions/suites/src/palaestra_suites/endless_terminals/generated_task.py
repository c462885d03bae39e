"""Define generated tasks, and read and write their rows in a file.

A row is the whole task: prompt, files, set-up, reference solution, and the checks of the initial and final state. Only
the prompt, files and set-up reach the agent and its slot. Invariant: equal tasks are written as identical bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from palaestra.envs.datasets import Row, read_rows
from palaestra_slots.core.errors import TaskError
from palaestra_suites.endless_terminals.checks.all_checks import AnyCheck

SCHEMA = "palaestra.terminal-task/1"


class GeneratedTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `families` has the names of its parts' families in order, `level` is the number of parts, and `needs`
    lists the required programs."""

    schema: str = SCHEMA
    id: str
    level: int
    families: list[str]
    prompt: str
    files: dict[str, str]
    setup: str
    solution: str
    initial: list[AnyCheck]
    final: list[AnyCheck]
    grading: str = "sealed"
    needs: list[str] = []

    @property
    def live(self) -> bool:
        """Whether the work is a running process, checked in the agent's own slot."""
        return self.grading == "live"


_ENCODER = msgspec.json.Encoder()


def to_line(task: GeneratedTask) -> bytes:
    """Return the row of a task as a line of JSON that ends with a newline."""
    return _ENCODER.encode(task) + b"\n"


def from_row(row: Row) -> GeneratedTask:
    """Return the task of a row. Raises `TaskError`."""
    try:
        task = msgspec.convert(row, GeneratedTask)
    except msgspec.ValidationError as error:
        raise TaskError(f"not a terminal task: {error}") from None
    if task.schema != SCHEMA:
        raise TaskError(f"task {task.id} has the schema {task.schema}; this version reads {SCHEMA}")
    return task


def read_tasks(
    source: str, *, split: str = "train", fields: Mapping[str, str] | None = None
) -> Iterator[GeneratedTask | TaskError]:
    """Yield the tasks of a dataset, with an error in place of each bad row; see `datasets.read_rows`."""
    for number, row in read_rows(source, split=split, fields=fields):
        try:
            if isinstance(row, TaskError):
                raise row
            yield from_row(row)
        except TaskError as error:
            yield TaskError(f"row {number}: {error}")
