"""What a family is and what it makes. No I/O.

A family turns draws into a `Part`: something to do in one directory of the workspace, with the files it starts from,
a reference solution and the checks of its end. Parts compose: a part may be given the `Source` that the one before it
produces, instead of files of its own. Invariant: a part never changes or moves what it is given, so that the checks of
earlier parts go on to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from palaestra.suites.endless_terminals.checks.all_checks import Check
from palaestra.suites.endless_terminals.random_stream import Draw
from palaestra.suites.endless_terminals.tables import Table


class Kind(StrEnum):
    """What a file of text can be read as."""

    TABLE = "table"
    LINES = "lines"


@dataclass(frozen=True, slots=True)
class Source:
    """A text file that a part reads or produces: a table in some format, or lines."""

    path: str
    form: str
    table: Table | None = None
    lines: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        return Kind.LINES if self.table is None else Kind.TABLE


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to do. Paths are relative to the workspace.

    `ask` tells every detail that `final` checks. `files` and then the shell script `setup` make the state it starts
    from; `initial` looks at what the files do not show. `solution` is a shell script that starts in the workspace.
    `live` is for work that is a running process: it is checked in the agent's own slot.
    """

    ask: str
    solution: str
    final: tuple[Check, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    initial: tuple[Check, ...] = ()
    output: Source | None = None
    live: bool = False


Build: TypeAlias = Callable[[Draw, str, Source | None], Part]
"""From draws, a directory of the workspace that is the part's own, and perhaps what it is given, to a part."""


class UnfitInputError(ValueError):
    """A family cannot use what it is given: it gets files of its own instead."""


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of work. `needs` are programs besides bash, coreutils and python3; `takes` is what it can be given."""

    name: str
    build: Build
    takes: tuple[Kind, ...] = ()
    needs: tuple[str, ...] = ()


def python(code: str) -> str:
    """A shell command that runs this Python code, without site packages: so it starts in a fraction of the time."""
    return f"python3 -S - <<'END'\n{code.strip()}\nEND\n"
