"""Writes the planted sets, and says which audit sees which of them.

Each form has three sets: `sound` has its 12 sound tasks, and `1` and `2` have a copy with one fault of each. No set has
a task and its faulty copy, except for duplicates, whose original stands in the same set.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from planted import function_set, harbor_set, inspect_set, swe_set, verifiers_set
from planted.planted_task import SOUND, PlantedTask

FORMS = {
    "function": function_set, "harbor": harbor_set, "swe": swe_set, "verifiers": verifiers_set, "inspect": inspect_set,
}  # fmt: skip
SETS = (SOUND, "1", "2")


@dataclass(frozen=True)
class Truth:
    """What is wrong with a task. `task` is its name in the audit, and `original` that of which it is a duplicate."""

    form: str
    set: str
    task: str
    kind: str
    why: str = ""
    original: str = ""


@dataclass(frozen=True)
class PlannedAudit:
    """The words after `palaestra audit run` for a set, or for a part of it. `package` is a package that it needs."""

    form: str
    set: str
    name: str
    words: Sequence[str]
    package: str = "palaestra"


def tasks_of(form: str, name: str) -> list[PlantedTask]:
    """Return the tasks of a set."""
    source = FORMS[form]
    if name == SOUND:
        return list(source.SOUND.values())
    found = []
    for task in source.FAULTS:
        if str(task.number) == name:
            found += [source.SOUND[task.base], task] if task.kind == "duplicate" else [task]
    return found


def write_sets(folder: Path) -> None:
    """Write all sets into a new folder, with `truth.json`, a list of `Truth`."""
    truths = []
    for form, source in FORMS.items():
        for name in SETS:
            tasks = tasks_of(form, name)
            source.write(folder / form / name, tasks)
            truths += [
                Truth(form, name, _audited(form, task.name), task.kind, task.why,
                      _audited(form, task.base) if task.kind == "duplicate" else "")
                for task in tasks
            ]  # fmt: skip
    (folder / "truth.json").write_text(json.dumps([asdict(each) for each in truths], indent=1) + "\n")


def planned(place: Path, form: str, name: str, tasks: Sequence[PlantedTask]) -> list[PlannedAudit]:
    """Return the audits of a set at a place."""
    match form:
        case "function":
            return [PlannedAudit(form, name, name, [str(place / "office_env.py")])]
        case "harbor":
            return [PlannedAudit(form, name, name, [str(place), "--env.base_image", "host"])]
        case "swe":
            return [PlannedAudit(form, name, name, [str(place / "rows.jsonl")])]
        case "verifiers":
            return [PlannedAudit(form, name, name, [f"verifiers:{place / 'desk.py'}"], "verifiers")]
    names = map(inspect_set.name_of, inspect_set.groups(tasks))
    return [
        PlannedAudit(form, name, f"{name}-{each}", [f"inspect:{place / 'desk.py'}@{each}"], "inspect_ai")
        for each in names
    ]


def _audited(form: str, name: str) -> str:
    return f"small__{name}-1" if form == "swe" else name
