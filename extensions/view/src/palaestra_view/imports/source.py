"""What a file of another program is read as: rollouts, one at a time, in the project's own records.

Invariant: what a file says is data. It chooses no path, program or option of the reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Protocol

import msgspec

from palaestra.rollouts.annotations import Annotation
from palaestra.rollouts.records import Trajectory
from palaestra.rollouts.regraded import Grade
from palaestra_slots.core.types import JSON, number

NEXT = -1
"""The index of a rollout whose file does not number it."""

_NAME_CHARS = 200


class LogFacts(msgspec.Struct, kw_only=True):
    """The facts about a whole file. `format` names the format; `group_size` is 0 if it is unknown; `provenance` is
    whatever else the file says about its origin."""

    format: str
    env: str = ""
    model: str = ""
    run_id: str = ""
    started_at: float = 0.0
    group_size: int = 0
    provenance: dict[str, JSON] = {}


class Imported(msgspec.Struct, kw_only=True):
    """One rollout of a file, with the schemas of its tools, what people have said about it (`said`) and its new reward
    (`grade`), both without the rollout's id. The trajectory's `rollout_id` is empty, because it follows
    from group and index; `group_id` is empty if the file names no groups, and `index` is then often `NEXT`."""

    trajectory: Trajectory
    tools: list[dict[str, JSON]] = []
    said: list[Annotation] = []
    grade: Grade | None = None


class Source(Protocol):
    """A file or folder that is read once, from its beginning. `place` and `size` are the bytes read and in all."""

    @property
    def place(self) -> int: ...

    @property
    def size(self) -> int: ...

    def facts(self) -> LogFacts:
        """Return the facts about the whole file. Raises `ConfigError` if it has an unknown format, and `OSError`."""
        ...

    def rollouts(self) -> Iterator[Imported | str]:
        """Yield each rollout, or the reason why one cannot be read. Raises `ConfigError` and `OSError`."""
        ...


def name_of(value: JSON) -> str:
    """Return a name that a file gives as text or number, cut to a reasonable length; empty if there is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return str(value)[:_NAME_CHARS]


def text_of(value: JSON) -> str:
    """Return the value if it is a text, otherwise an empty text."""
    return value if isinstance(value, str) else ""


def mapping_of(value: JSON) -> Mapping[str, JSON]:
    """Return the value if it is an object, otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}


def objects_of(value: JSON) -> list[dict[str, JSON]]:
    """Return the objects in a list; empty if the value is no list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def count_of(value: JSON) -> int:
    """Return the value if it is a whole number from 0, otherwise 0."""
    return max(0, index_of(value, 0))


def index_of(value: JSON, otherwise: int = NEXT) -> int:
    """Return the value if it is a whole number, which `true` is not."""
    return value if type(value) is int else otherwise


def finite(value: JSON) -> float | None:
    """Return a finite number, or None for anything else."""
    found = number(value) if isinstance(value, bool | int | float) else None
    return found if found is not None and math.isfinite(found) else None


def numbers_of(value: JSON) -> dict[str, float]:
    """Return the finite numbers of an object, by name."""
    found = {str(name): finite(each) for name, each in mapping_of(value).items()}
    return {name: each for name, each in found.items() if each is not None}


def seconds_of(value: JSON) -> float:
    """Return a time in ISO 8601 as seconds since the epoch; 0 if there is none."""
    try:
        return max(0.0, datetime.fromisoformat(text_of(value)).timestamp())
    except (ValueError, OverflowError, OSError):
        return 0.0
