"""A generated task as a row of a file, and as the `Task` that is rolled out.

A row is all there is to a task: prompt, files, set-up, reference solution, and the checks of its first and last state,
which hold the truth. Only prompt, files and set-up ever reach a slot that an agent has. Invariant: equal tasks are
equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from palaestra.core.errors import TaskError
from palaestra.envs.datasets import Row, read_rows
from palaestra.suites.endless_terminals.checks.all_checks import Check

SCHEMA = "palaestra.terminal-task/1"


class TerminalTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `families` names its parts in order, `level` how many they are; `needs` are programs of the slot."""

    schema: str = SCHEMA
    id: str
    level: int
    families: list[str]
    prompt: str
    files: dict[str, str]
    setup: str
    solution: str
    initial: list[Check]
    final: list[Check]
    grading: str = "sealed"
    needs: list[str] = []

    @property
    def live(self) -> bool:
        """Whether the work is a running process, looked at in the agent's own slot."""
        return self.grading == "live"


_ENCODER = msgspec.json.Encoder()


def to_line(task: TerminalTask) -> bytes:
    """The row of a task, ended by a newline."""
    return _ENCODER.encode(task) + b"\n"


def from_row(row: Row) -> TerminalTask:
    """The task of a row. Raises `TaskError` for what is none."""
    try:
        task = msgspec.convert(row, TerminalTask)
    except msgspec.ValidationError as error:
        raise TaskError(f"not a terminal task: {error}") from None
    if task.schema != SCHEMA:
        raise TaskError(f"task {task.id} has the schema {task.schema}; this version reads {SCHEMA}")
    return task


def read_tasks(
    source: str, *, split: str = "train", fields: Mapping[str, str] | None = None
) -> Iterator[TerminalTask | TaskError]:
    """The tasks of a data set, and an error in place of each row that is none; see `datasets.read_rows`."""
    for number, row in read_rows(source, split=split, fields=fields):
        try:
            if isinstance(row, TaskError):
                raise row
            yield from_row(row)
        except TaskError as error:
            yield TaskError(f"row {number}: {error}")
