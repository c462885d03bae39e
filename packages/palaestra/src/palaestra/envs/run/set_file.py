"""`set.json`, which lists the runs of an evaluation set, and `not_run.json`, which has the reasons why some of them did
not begin. Both are in the set's folder, next to the folders of its runs.

Invariant: `set.json` never changes, because its maker's copy alone is resumed (`journal/origin.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from palaestra.rollouts.journal.reader import (
    JOURNAL_NAME,
    LAST,
    RUNS,
    SET_NAME,
    Recording,
    began,
    find_run,
    list_runs,
    run_name,
)
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import UNREADABLE, read_regular, replaced, writing
from palaestra_slots.core.types import JSON

SET_SCHEMA = "palaestra.evaluation-set/1"
SETS = "set--"
"""The beginning of the names of sets' folders, before the time at which the set began."""

_NOT_RUN = "not_run.json"


class Member(msgspec.Struct, omit_defaults=True):
    """One run of the set: its environment, its settings as words of a command line, and its folder in the set.

    `left_out` names the settings whose flags contained secrets. `set.json` does not have these flags. `name` and
    `model` are the names of the environment and the model, which a run that has not begun cannot tell."""

    environment: str
    words: list[str]
    folder: str
    left_out: list[str] = []
    name: str = ""
    model: str = ""


class EvaluationSet(msgspec.Struct):
    """What `set.json` has. `place` is the folder in which the set was started."""

    schema: str
    place: str
    members: list[Member]

    def facts(self) -> dict[str, JSON]:
        plain: dict[str, JSON] = msgspec.to_builtins(self)
        return plain


def is_set(folder: Path) -> bool:
    return (folder / SET_NAME).is_file()


def find_set(name: str | Path) -> Path | None:
    """Return the folder of the set that a name means, as in `find_run`; None if it means a run. `last` means the set of
    the last run, if it is in one, or a later set without a run. Raises `ConfigError`."""
    if Path(name).exists() or str(name).partition(":")[0] != LAST:
        folder = find_run(name)
        return folder if is_set(folder) else None
    found = [path.parent for path in sorted(RUNS.glob(f"{SETS}*/{SET_NAME}"))]
    runs = list_runs() if str(name) == LAST else [find_run(name)]
    if found and str(name) == LAST and not runs_of(found[-1]):
        second = found[-1].name.removeprefix(SETS)[:16]
        if not runs or second >= began(runs[0]):
            return found[-1]
    folder = find_run(name).parent
    return folder if is_set(folder) else None


def read_set(folder: Path) -> EvaluationSet:
    """Return what a set's `set.json` has. Raises `ConfigError`."""
    try:
        found = msgspec.json.decode(read_regular(folder / SET_NAME), type=EvaluationSet)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{folder / SET_NAME} cannot be read: {error}") from None
    if found.schema != SET_SCHEMA:
        raise ConfigError(f"{folder / SET_NAME} has the schema {found.schema!r}; this version reads {SET_SCHEMA!r}")
    for member in found.members:
        if Path(member.folder).name != member.folder or member.folder in ("", "..", "."):
            raise ConfigError(f"{folder / SET_NAME} names the folder {member.folder!r}, which is not in the set")
    return found


def write_set(folder: Path, found: EvaluationSet) -> None:
    """Write a new set's folder with its `set.json`. Raises `DiskError`."""
    with writing(folder):
        folder.mkdir(parents=True, mode=0o700)
        with replaced(folder / SET_NAME) as file:
            file.write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


class RunPlace(NamedTuple):
    """The folder of a run. `member` is what the run's evaluation set says about it; None if it is in none. If a run of
    a set has not begun, `reason` is why, which may be empty."""

    folder: Path
    member: Member | None = None
    reason: str = ""

    @property
    def has_begun(self) -> bool:
        return (self.folder / JOURNAL_NAME).is_file()


def run_places(names: Iterable[str | Path]) -> list[RunPlace]:
    """Return the runs that the names mean, each once: a run, as in `find_run`, all runs of a set, as in `find_set`, or
    those below a folder, in the order of their paths. Raises `ConfigError`."""
    found: dict[Path, RunPlace] = {}
    for name in names:
        for place in _places_in(find_set(name) or find_run(name)):
            found.setdefault(place.folder.resolve(), place)
    return [*found.values()]


def _places_in(path: Path) -> list[RunPlace]:
    if path.is_file():  # a journal
        return [RunPlace(path.parent)]
    if (path / JOURNAL_NAME).is_file():
        return [RunPlace(path)]
    if is_set(path):
        return set_places(path)
    sets = [each.parent for depth in ("*", "*/*") for each in path.glob(f"{depth}/{SET_NAME}")]
    journals = (each.parent for depth in ("*", "*/*") for each in path.glob(f"{depth}/{JOURNAL_NAME}"))
    below = [*sets, *(each for each in journals if each.parent not in sets)]
    if not below:
        raise ConfigError(f"{path} has no runs: neither it nor a folder below it has a {JOURNAL_NAME}")
    return [place for each in sorted(below) for place in _places_in(each)]


def set_places(folder: Path) -> list[RunPlace]:
    """Return the places of all runs of a set, in its order. Raises `ConfigError`."""
    why = reasons(folder)
    return [RunPlace(folder / each.folder, each, why.get(each.folder, "")) for each in read_set(folder).members]


def runs_of(folder: Path) -> list[Path]:
    """Return the folders of the runs of a set that have begun, in the order of the set."""
    return [each.folder for each in set_places(folder) if each.has_begun]


def runs_by_model(folder: Path) -> dict[tuple[str, str], list[Path]]:
    """Return the runs of a set that have begun by environment and model. There are several if these have different
    settings."""
    found: dict[tuple[str, str], list[Path]] = {}
    for path in runs_of(folder):
        meta = Recording(path / JOURNAL_NAME).meta
        found.setdefault((meta.env, meta.model), []).append(path)
    return found


def not_one(name: str | Path, env: str, model: str, found: Iterable[Path]) -> ConfigError:
    """Return the error about runs of a set of which the caller needs one."""
    return ConfigError(f"{name} has several runs of {env} with {model}: name one of {', '.join(map(run_name, found))}")


def find_runs(names: Iterable[str | Path]) -> list[Path]:
    """Return the folders of the runs that the names mean, as in `run_places`. Raises `ConfigError`, also if none of
    them has begun."""
    places = run_places(names)
    found = [place.folder for place in places if place.has_begun]
    if not found:
        raise ConfigError(f"no run of the evaluation set {places[0].folder.parent} has begun")
    return found


def not_run(folder: Path) -> dict[str, str]:
    """Return the folders of the runs of a set that have not begun, each with the reason, which may be empty."""
    return {each.folder.name: each.reason for each in set_places(folder) if not each.has_begun}


def reasons(folder: Path) -> Mapping[str, str]:
    """Return the reasons why runs of a set did not begin, by their folders."""
    try:
        return msgspec.json.decode(read_regular(folder / _NOT_RUN), type=dict[str, str])
    except (OSError, *UNREADABLE):
        return {}


def keep_reason(folder: Path, member: str, reason: str) -> None:
    """Record why a run of a set did not begin. Raises `DiskError`."""
    known = {**reasons(folder), member: reason}
    with writing(folder), replaced(folder / _NOT_RUN) as file:
        file.write(msgspec.json.format(msgspec.json.encode(known), indent=2) + b"\n")
