"""A planted task: the files of one sound task, or of a copy of it with one fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

KINDS = (
    "unsolvable", "pays_for_nothing", "weak", "hackable", "false_zero", "flaky", "depends_on_the_world", "leaks",
    "duplicate", "costly",
)  # fmt: skip
SOUND = "sound"


@dataclass(frozen=True)
class PlantedTask:
    """`parts` maps the names of the task's texts (paths, or columns) to the texts. `base` names the sound task of a
    faulty copy, `why` is the fault in one sentence, and `number` is the place of the copy's set."""

    name: str
    parts: Mapping[str, str]
    base: str = ""
    kind: str = SOUND
    why: str = ""
    number: int = 0


Edit = tuple[str, str, str]
"""The name of a part, the text in it, and what replaces it. An empty text: the whole part."""


def fault(number: int, sound: Mapping[str, PlantedTask], base: str, kind: str, why: str, *edits: Edit) -> PlantedTask:
    """Return a copy of the sound task `base` with the edits. Raises `ValueError` if an edit finds not exactly one place
    in its part: a copy without its fault would be counted as missed."""
    parts = dict(sound[base].parts)
    for part, old, new in edits:
        if old and parts[part].count(old) != 1:
            raise ValueError(f"{base}, {kind}: {part} has {old!r} {parts[part].count(old)} times")
        parts[part] = parts[part].replace(old, new) if old else new
    # A duplicate stands next to its original, so it needs another name.
    name = f"{base}-again" if kind == "duplicate" else base
    return replace(sound[base], name=name, parts=parts, base=base, kind=kind, why=why, number=number)
