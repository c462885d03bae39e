"""Generate tasks from a seed: draw families, build their parts, and join prompts, solutions and checks.

Task `i` of a seed depends only on the seed, `i` and the selected families and levels, so a file with fewer tasks is a
prefix of a file with more tasks. A task of level k has k parts, each in its own directory. A part that can read the
output of the previous part usually gets this output as input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.sandbox.slot import WORKSPACE
from palaestra_suites.endless_terminals.checks.all_checks import AnyCheck
from palaestra_suites.endless_terminals.checks.file_checks import Absent, Exists
from palaestra_suites.endless_terminals.families import (
    config_tasks,
    database_tasks,
    file_tasks,
    git_tasks,
    log_tasks,
    process_tasks,
    script_tasks,
    table_tasks,
    text_tasks,
)
from palaestra_suites.endless_terminals.family import DataFile, Family, TaskPart, UnfitInputError
from palaestra_suites.endless_terminals.generated_task import GeneratedTask, to_line
from palaestra_suites.endless_terminals.random_stream import Draw, Stream

AREAS: Mapping[str, tuple[Family, ...]] = {
    "files": file_tasks.FILES,
    "text": text_tasks.FAMILIES,
    "logs": log_tasks.FAMILIES,
    "tables": table_tasks.FAMILIES,
    "formats": config_tasks.FAMILIES,
    "archives": file_tasks.ARCHIVES,
    "processes": process_tasks.FAMILIES,
    "git": git_tasks.FAMILIES,
    "databases": database_tasks.FAMILIES,
    "scripts": script_tasks.FAMILIES,
}

FAMILIES: Mapping[str, Family] = {family.name: family for area in AREAS.values() for family in area}

HIGHEST_LEVEL = 5
_LEVEL_SHARES = (30, 30, 20, 12, 8)
"""The percentage of tasks of level 1, 2, …"""

_FEED_PERCENT = 75
"""The percentage of parts that are drawn from the families that can read the previous part's output."""

_TRIES = 50

_OPENINGS = (
    f"Your working directory is {WORKSPACE}; all paths below are relative to it. Make directories that are missing.",
    f"Work in {WORKSPACE}. Paths are meant relative to that directory; where a directory is not there yet, make it.",
    f"Everything happens in {WORKSPACE}, and every path here is relative to it. Directories may have to be made first.",
)

_TOGETHER = (
    "There are {count} things to do, in this order:",
    "Do these {count} steps, one after the other:",
    "The work has {count} parts:",
)

_CLOSINGS = (
    "Only what is in the working directory at the end counts.",
    "What counts is the state of the working directory when you have finished.",
    "You are done when the files are as described.",
)


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """The tasks to generate. The families are those in `families` and those of `areas`; if both are empty, all families
    are selected. If `levels` is empty, the levels are mixed."""

    seed: int = 0
    levels: tuple[int, ...] = ()
    families: tuple[str, ...] = ()
    areas: tuple[str, ...] = ()

    def chosen(self) -> tuple[Family, ...]:
        """Return the families to draw from, in order. Raises `ConfigError` for an unknown name or level."""
        for level in self.levels:
            if not 1 <= level <= HIGHEST_LEVEL:
                raise ConfigError(f"unknown level {level}: levels are 1 to {HIGHEST_LEVEL}")
        for name in self.families:
            if name not in FAMILIES:
                raise ConfigError(f"unknown family {name!r}.{nearest(name, FAMILIES)}")
        for area in self.areas:
            if area not in AREAS:
                raise ConfigError(f"unknown area {area!r}.{nearest(area, AREAS)} The areas are {', '.join(AREAS)}")
        of_areas = {family.name for area in self.areas for family in AREAS[area]}
        wanted = of_areas | {*self.families}
        return tuple(family for family in FAMILIES.values() if not wanted or family.name in wanted)

    def level(self, stream: Stream) -> int:
        """Return the level of one task."""
        if self.levels:
            return stream.pick(self.levels)
        ticket = stream.below(sum(_LEVEL_SHARES))
        return next(level for level in range(1, 6) if ticket < sum(_LEVEL_SHARES[:level]))


def generate(selection: TaskSelection, count: int, first: int = 0) -> Iterator[GeneratedTask]:
    """Yield tasks `first` to `first + count - 1` of a selection. Raises `ConfigError` for a bad selection."""
    families = selection.chosen()
    for number in range(first, first + count):
        yield _generate_task(selection, families, number)


def _generate_task(selection: TaskSelection, families: Sequence[Family], number: int) -> GeneratedTask:
    name = (selection.seed, "task", number)
    stream = Stream(*name, "shape")
    level = min(selection.level(stream), len(families))
    chain = _Chain(name, stream)
    # In each round of len(families) tasks, every family provides the first part of one task.
    around, place = divmod(number, len(families))
    chain.add(Stream(selection.seed, "round", around).shuffled(families)[place])
    while len(chain.parts) < level:
        chain.add(_next_family(stream, families, chain))
    return chain.task(f"terminal-{selection.seed}-{number:06}", level)


def _next_family(stream: Stream, families: Sequence[Family], chain: _Chain) -> Family:
    """Return the family of the next part. It is a family that the task does not have yet, and usually one that can read
    the last part's output."""
    left = [family for family in families if family.name not in chain.names]
    source = chain.source
    if source is not None and stream.chance(_FEED_PERCENT):
        fitting = [family for family in left if source.kind in family.takes]
        return stream.pick(fitting or left)
    return stream.pick(left)


@dataclass(slots=True)
class _Chain:
    """The parts of one unfinished task."""

    name: tuple[str | int, ...]
    stream: Stream
    parts: list[TaskPart] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    @property
    def source(self) -> DataFile | None:
        """The output of the last part."""
        return self.parts[-1].output if self.parts else None

    def add(self, family: Family) -> None:
        """Add a part. Its input is the last part's output if the family can use that output."""
        given = self.source if self.source is not None and self.source.kind in family.takes else None
        for attempt in range(_TRIES):
            draw = Draw(*self.name, len(self.parts), family.name, attempt)
            place = next(word for word in iter(draw.fresh, "") if word not in self.places)
            try:
                part = family.build(draw, place, given if attempt == 0 else None)
            except UnfitInputError:
                continue
            self.parts.append(part)
            self.names.append(family.name)
            self.needs += [need for need in family.needs if need not in self.needs]
            self.places.append(place)
            return
        raise AssertionError(f"family {family.name} makes no part in {_TRIES} tries")

    def task(self, name: str, level: int) -> GeneratedTask:
        """Return the task. Its id ends in a digest, so that different selections of one seed have different ids."""
        task = GeneratedTask(
            id="",
            level=level,
            families=self.names,
            prompt=self._prompt(),
            files={path: text for part in self.parts for path, text in part.files.items()},
            setup=_script([*map(_guard, self.needs), *(part.setup for part in self.parts)]),
            solution=_script(
                [f"mkdir -p {place}\n{p.solution}" for place, p in zip(self.places, self.parts, strict=True)]
            ),
            initial=[check for part in self.parts for check in _initial(part)],
            final=[check for part in self.parts for check in part.final],
            grading="live" if any(part.live for part in self.parts) else "sealed",
            needs=self.needs,
        )
        digest = hashlib.sha256(to_line(task)).hexdigest()[:8]
        return msgspec.structs.replace(task, id=f"{name}-{digest}")

    def _prompt(self) -> str:
        wording = self.stream.child("wording")
        opening, closing = wording.pick(_OPENINGS), wording.pick(_CLOSINGS)
        if len(self.parts) == 1:
            return f"{opening}\n\n{self.parts[0].ask}\n\n{closing}"
        steps = "\n".join(f"{number}. {part.ask}" for number, part in enumerate(self.parts, 1))
        together = wording.pick(_TOGETHER).format(count=len(self.parts))
        return f"{opening} {together}\n\n{steps}\n\n{closing}"


def _guard(need: str) -> str:
    complaint = f"this task needs {need}, which the slot does not have"
    return f"command -v {need} >/dev/null || {{ echo '{complaint}' >&2; exit 1; }}\n"


def _script(pieces: Sequence[str]) -> str:
    """Return a shell script that runs each piece in a subshell in the workspace and stops at the first failure."""
    return "".join(f"( set -e\ncd {WORKSPACE}\n{piece.rstrip()}\n) || exit 1\n" for piece in pieces if piece)


def _initial(part: TaskPart) -> Iterator[AnyCheck]:
    """Yield the checks of the initial state. The part's files exist, unless its `setup` may move them; the checks in
    `initial` hold; and no output exists yet."""
    if not part.setup:
        yield from (Exists(path) for path in part.files)
    yield from part.initial
    known = {*part.files, *(check.path for check in part.initial)}
    made = dict.fromkeys(path for check in part.final for path in check.made())
    yield from (Absent(path) for path in made if path not in known)
