"""Families of generated tasks and their parts. Does no I/O.

A family turns random draws into a `TaskPart`: work in one directory of the workspace, with its initial files, a
reference solution and checks of the final state. Instead of initial files, a part may read the `DataFile` that the
previous part produces. Invariant: a part never changes or moves its input, so the checks of earlier parts still hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from palaestra_suites.endless_terminals.checks.all_checks import AnyCheck
from palaestra_suites.endless_terminals.random_stream import Draw
from palaestra_suites.endless_terminals.tables import Table


class DataKind(StrEnum):
    """The kind of content of a text file."""

    TABLE = "table"
    LINES = "lines"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A text file that a part reads or produces: a table in the format `form`, or lines."""

    path: str
    form: str
    table: Table | None = None
    lines: tuple[str, ...] = ()

    @property
    def kind(self) -> DataKind:
        return DataKind.LINES if self.table is None else DataKind.TABLE


@dataclass(frozen=True, slots=True)
class TaskPart:
    """One piece of work. Paths are relative to the workspace.

    `ask` contains every detail that `final` checks. The initial state is made by writing `files` and then running the
    shell script `setup`. `initial` checks what `setup` does. `solution` is a shell script that starts in the workspace.
    `live` is true if the work is a running process, which is checked in the agent's own slot.
    """

    ask: str
    solution: str
    final: tuple[AnyCheck, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    initial: tuple[AnyCheck, ...] = ()
    output: DataFile | None = None
    live: bool = False


Build: TypeAlias = Callable[[Draw, str, DataFile | None], TaskPart]
"""Makes a part from random draws, its directory in the workspace, and an optional input."""


class UnfitInputError(ValueError):
    """Raised if a family cannot use its input. The part gets its own files instead."""


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of work. `needs` lists the required programs other than bash, coreutils and python3; `takes` lists the
    kinds of input."""

    name: str
    build: Build
    takes: tuple[DataKind, ...] = ()
    needs: tuple[str, ...] = ()


def python(code: str) -> str:
    """Return a shell command that runs this Python code, without site packages so that it starts faster."""
    return f"python3 -S - <<'END'\n{code.strip()}\nEND\n"
