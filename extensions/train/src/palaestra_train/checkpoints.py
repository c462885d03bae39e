"""Reads and writes the files of a training run, in `training/` of the run's folder: `steps.jsonl`, and the checkpoints.

A checkpoint is a folder `step-000010` with the trainer's files and `state.json`. It is written under a temporary name
and renamed once it is on the disk, so every checkpoint that exists is complete.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from palaestra.rollouts.journal.reader import LAST, list_runs
from palaestra.rollouts.observe.training_steps import FOLDER, STEPS, read_steps
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import UNREADABLE, not_written, read_lines, read_regular, replaced, writing
from palaestra_slots.core.types import JSON

SETTINGS, STEP_GROUPS = "settings.json", "groups.jsonl"
STATE_SCHEMA = "palaestra.training-state/1"
STEP_SCHEMA = "palaestra.training-step/1"
STEP_GROUPS_SCHEMA = "palaestra.training-groups/1"

_NAME = re.compile(r"step-(\d{6,})")


class TrainingState(msgspec.Struct, kw_only=True):
    """The state of a training run after `step`. `number` is the number of the next group; `drawn` counts the training
    tasks drawn so far.

    `rates` is the memory of the tasks' rewards (`task_memory`). `pending` has the number and the task's id of the
    groups that were drawn and not trained, if rollouts are ahead of the steps.

    `best` is the mean reward of the best evaluation, at `best_step`; `worse` counts the evaluations since then.
    """

    schema: str = STATE_SCHEMA
    trainer: str
    model: str
    step: int = 0
    number: int = 0
    drawn: int = 0
    best: float | None = None
    best_step: int = 0
    worse: int = 0
    rates: dict[str, tuple[float, float, int]] = msgspec.field(default_factory=dict)
    pending: list[tuple[int, str]] = msgspec.field(default_factory=list)

    def check(self, trainer: str, model: str) -> None:
        """Raise `ConfigError` if the checkpoint belongs to a different trainer or model."""
        for name, saved, now in (("trainer", self.trainer, trainer), ("model", self.model, model)):
            if saved != now:
                raise ConfigError(
                    f"the checkpoint of step {self.step} belongs to the {name} {saved!r}, not {now!r}: resume with "
                    f"that {name}, or start a new training run"
                )


class _Settings(msgspec.Struct):
    trainer: Literal["trl", "tinker"]
    training: dict[str, Any]


class StepGroups(msgspec.Struct, kw_only=True):
    """What one step trains on: the numbers of the groups `taken`, in order, and of those that are `trained`; the others
    taught nothing, or were more than needed. `version` is the version of the weights before the step, and
    `most_behind` by how many versions the weights that sampled a token may be older."""

    schema: str = STEP_GROUPS_SCHEMA
    step: int
    version: int
    most_behind: int
    taken: list[int]
    trained: list[int]

    def needed(self, groups: int) -> int:
        """Return how many groups had to be drawn to train on this many: those up to the last one that is trained, or
        all if even they were too few."""
        if len(self.trained) < groups:
            return len(self.taken)
        return max((place for place, number in enumerate(self.taken, start=1) if number in self.trained), default=0)


class TrainingFiles:
    """The files of one training run, in the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps = path / STEPS
        self._checkpoints = path / "checkpoints"
        with writing(path):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
        for part in self._checkpoints.glob("*.part"):
            shutil.rmtree(part, ignore_errors=True)
        self._logged = {line["kind"]: line["step"] for line in read_steps(path.parent)}
        self.step_groups = read_step_groups(path.parent)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of a checkpoint."""
        return self._checkpoints / f"step-{step:06d}"

    def latest(self) -> TrainingState | None:
        """Return the state of the last checkpoint, or None if there is none. Raises `ConfigError` if it cannot be
        read."""
        steps = self._saved()
        if not steps:
            return None
        path = self.checkpoint(steps[-1]) / "state.json"
        try:
            state = msgspec.json.decode(read_regular(path), type=TrainingState)
        except (OSError, *UNREADABLE) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}. Remove {path.parent} to continue from the previous checkpoint"
            ) from None
        if state.schema != STATE_SCHEMA:
            raise ConfigError(f"{path} is in the format {state.schema!r}; this version reads {STATE_SCHEMA!r}")
        return state

    def begin(self, step: int) -> Path:
        """Return a new, empty folder for the trainer's files. Raises `DiskError`."""
        part = self.checkpoint(step).with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        with writing(part):
            part.mkdir()
        return part

    def commit(self, part: Path, state: TrainingState, keep: int) -> None:
        """Make the checkpoint in `part` valid, and remove all checkpoints but the latest `keep` and the best one.
        Raises `DiskError`."""
        done = self.checkpoint(state.step)
        try:
            (part / "state.json").write_bytes(msgspec.json.encode(state))
            for file in part.rglob("*"):
                if file.is_file():
                    _fsync_path(file)
            shutil.rmtree(done, ignore_errors=True)
            part.rename(done)
            _fsync_path(self._checkpoints)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise not_written(done, error) from error
        for step in self._saved()[:-keep]:
            if step != state.best_step:
                shutil.rmtree(self.checkpoint(step), ignore_errors=True)

    def write_settings(self, settings: Mapping[str, JSON]) -> None:
        """Write the settings of the training run, which are read when it resumes. Raises `DiskError`."""
        path = self.path / SETTINGS
        with writing(path), replaced(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(settings)) + b"\n")

    def log(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Add a line, unless the training run wrote it before it was interrupted. Raises `DiskError`."""
        if step <= self._logged.get(kind, -1):
            return
        self._logged[kind] = step
        line = {"schema": STEP_SCHEMA, "time": time.time(), "kind": kind, "step": step, **numbers}
        with writing(self.steps), self.steps.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def log_groups(self, groups: StepGroups) -> None:
        """Record the groups of a step, before the step, unless an earlier process has recorded the same. Raises
        `DiskError`."""
        if self.step_groups.get(groups.step) != groups:
            earlier = {step: each for step, each in self.step_groups.items() if step < groups.step}
            self.step_groups = earlier | {groups.step: groups}
            path = self.path / STEP_GROUPS
            with writing(path), path.open("ab") as file:
                file.write(msgspec.json.encode(groups) + b"\n")

    def _saved(self) -> list[int]:
        found = (_NAME.fullmatch(each.name) for each in self._checkpoints.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)


def read_step_groups(run: Path) -> dict[int, StepGroups]:
    """Return what each step of a training run trained on. If an interrupted training run repeated a step in a different
    way, the later record holds, and those of the steps after it are void. A damaged line is left out."""
    found: dict[int, StepGroups] = {}
    for line in read_lines(run / FOLDER / STEP_GROUPS):
        with suppress(*UNREADABLE):
            groups = msgspec.convert(line, StepGroups)
            found = {step: each for step, each in found.items() if step < groups.step} | {groups.step: groups}
    return found


def training_named(run: str) -> str:
    """Return the name of a training run: `last` is the latest one, whatever ran after it."""
    trained = (folder for folder in list_runs() if (folder / FOLDER / SETTINGS).is_file()) if run == LAST else ()
    return str(next(iter(trained), run))


def read_settings(run: Path) -> dict[str, JSON]:
    """Return the settings that `write_settings` wrote. Raises `ConfigError` if the run trained nothing."""
    path = run / FOLDER / SETTINGS
    try:
        return msgspec.structs.asdict(msgspec.json.decode(read_regular(path), type=_Settings))
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{run} is not a training run: {path} cannot be read ({error})") from None


def _fsync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
