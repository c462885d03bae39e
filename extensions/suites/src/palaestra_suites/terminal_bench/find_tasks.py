"""Load terminal tasks from a task folder, a folder of task folders, or dataset rows that contain packed folders.

A row (JSONL or Parquet) has either an archive of the whole task (`task_binary`, a `.tar.gz`) or its parts (`task_name`,
`instruction`, `category`, `docker_image`, `environment_tar`, `tests_tar`, `solution_tar` and `test_sh`). An archive is
bytes or base64. Rows are unpacked into cache folders named by their content, and then read as folders. A row whose
`grading` is `live` is a task about a running service.

Invariant: a bad task does not prevent the others from loading. It is returned with its error.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from palaestra.envs.datasets import SUFFIXES, read_rows
from palaestra.rollouts.grading.grader import LIVE, SEALED
from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ConfigError, ImageError, TaskError
from palaestra_slots.core.types import JSON
from palaestra_slots.images.task_files import RowFields, check_links
from palaestra_slots.sandbox.images.unpack import unpack_files
from palaestra_suites.terminal_bench import harbor_task, terminal_bench_1
from palaestra_suites.terminal_bench.terminal_task import TerminalTask

_log = logging.getLogger(__name__)

MAX_UNPACKED_BYTES = 1 << 30
_MOST_WARNINGS = 10

_LONGEST_NAME = 255
"""The maximum length, in bytes, of a folder name on common file systems."""


class LeftOut(TaskError):
    """A task that cannot be used, with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """The usable tasks, and those that were left out."""

    tasks: tuple[TerminalTask, ...]
    left_out: tuple[LeftOut, ...]


def load_tasks(
    source: str,
    cache: Path,
    *,
    split: str = "train",
    fields: Mapping[str, str] | None = None,
    folders: Iterable[tuple[str, Path | TaskError, bool]] = (),
    variables: Mapping[str, str] | None = None,
) -> LoadedTasks:
    """Read every task of a source. `variables` are those of the host to which tasks may refer. If `folders` are given,
    they are the source's tasks: name, folder or error, and whether the task is graded live. Raises `ConfigError` if the
    source cannot be read or contains no task."""
    path = local_path(source)
    tasks: dict[str, TerminalTask] = {}
    left_out: list[LeftOut] = []
    folders = folders or (list(_folders(path)) if path.is_dir() else ())
    if not folders and not (path.is_dir() and not _holds_rows(path)):
        folders = _unpacked_rows(source, cache, split, fields)
    for name, folder, live in folders:
        if isinstance(folder, TaskError):
            left_out.append(LeftOut(name, str(folder)))
            continue
        try:
            task = read_folder(folder, variables)
        except TaskError as error:
            left_out.append(LeftOut(name, str(error)))
            continue
        if task.name in tasks:
            left_out.append(LeftOut(name, f"another task has the same name, in {tasks[task.name].path}"))
        else:
            tasks[task.name] = replace(task, live=task.live or live)
    if not tasks and not left_out:
        raise ConfigError(
            f"{source} contains no task: no folder in it has a {harbor_task.CONFIG_NAME} or a "
            f"{terminal_bench_1.CONFIG_NAME}"
        )
    _warn_of_ignored(tasks.values())
    return LoadedTasks(tuple(tasks.values()), tuple(left_out))


def _warn_of_ignored(tasks: Iterable[TerminalTask]) -> None:
    """Log a line for each key that tasks set although their format does not have it."""
    found = Counter(key for task in tasks for key in {re.sub(r"\[\d+\]", "", each) for each in task.ignored})
    for key, count in found.most_common(_MOST_WARNINGS):
        _log.warning("%d tasks set %s, which Harbor's schema does not have, so it has no effect", count, key)


def read_folder(folder: Path, variables: Mapping[str, str] | None = None) -> TerminalTask:
    """Return the task of one folder, in either format. `variables` are those of the host to which a Harbor task may
    refer. Raises `TaskError`."""
    check_links(folder)
    if harbor_task.is_task(folder):
        return harbor_task.read_task(folder, variables)
    if terminal_bench_1.is_task(folder):
        return terminal_bench_1.read_task(folder)
    raise TaskError(f"{harbor_task.CONFIG_NAME} is missing")


def _folders(path: Path) -> Iterator[tuple[str, Path, bool]]:
    """Yield the task folders at a path: the path itself, or all task folders below it, sorted. Folders that contain
    only an instruction.md count too. Links to task folders are followed, other links are not."""
    if _is_task(path):
        yield path.name, path.resolve(), False
        return
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        if _is_task(folder) or (folder / "instruction.md").is_file():
            yield folder.name, folder.resolve(), False
        elif not folder.is_symlink():  # it may lead anywhere, also back
            yield from _folders(folder)


def _holds_rows(path: Path) -> bool:
    return any(entry.suffix.lower() in SUFFIXES for entry in path.rglob("*"))


def _is_task(folder: Path) -> bool:
    return harbor_task.is_task(folder) or terminal_bench_1.is_task(folder)


def _unpacked_rows(
    source: str, cache: Path, split: str, fields: Mapping[str, str] | None
) -> Iterator[tuple[str, Path | TaskError, bool]]:
    """Yield the name and the folder (or the error) of each row, and whether the row requests live grading."""
    for number, row in read_rows(source, split=split, fields=fields):
        if isinstance(row, TaskError):
            yield f"row {number}", row, False
            continue
        name = str(row.get("task_name") or row.get("path") or f"row {number}").rstrip("/").rpartition("/")[2]
        try:
            yield name, _unpacked(row, name, cache), _is_live(row)
        except (TaskError, UnicodeEncodeError) as error:
            yield name, TaskError(f"row {number}: {error}"), False


def _is_live(row: Mapping[str, JSON]) -> bool:
    grading = row.get("grading") or SEALED
    if grading not in (SEALED, LIVE):
        raise TaskError(f"column 'grading' is {grading!r:.100}; it must be {SEALED!r} or {LIVE!r}")
    return grading == LIVE


def _unpacked(row: Mapping[str, JSON], name: str, cache: Path) -> Path:
    """Return the row's folder in the cache, unpacked if necessary."""
    if not name or name in (".", "..") or not name.isprintable() or len(name.encode()) > _LONGEST_NAME:
        raise TaskError(f"{name!r:.100} is not a valid task name")
    digest = hashlib.sha256(repr(sorted(row.items())).encode()).hexdigest()[:16]
    place = cache / "terminal-tasks" / digest / name
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="new-") as temporary:
        fresh = Path(temporary, name)
        fresh.mkdir()
        _write_task_files(fresh, row)
        shutil.rmtree(place, ignore_errors=True)
        fresh.rename(place)
    return place


def _write_task_files(folder: Path, row: Mapping[str, JSON]) -> None:
    whole = row.get("task_binary") or row.get("task_archive")
    if whole:
        _extract(_bytes(whole, "task_binary"), folder, "task_binary")
        return
    (folder / "instruction.md").write_text(RowFields(row).required("instruction"), encoding="utf-8")
    for column, below in (("environment_tar", "environment"), ("tests_tar", "tests"), ("solution_tar", "solution")):
        (folder / below).mkdir()
        if row.get(column):
            _extract(_bytes(row[column], column), folder / below, column)
    if row.get("test_sh"):
        (folder / "tests/test.sh").write_text(str(row["test_sh"]), encoding="utf-8")
    (folder / harbor_task.CONFIG_NAME).write_text(_task_toml(row), encoding="utf-8")


def _task_toml(row: Mapping[str, JSON]) -> str:
    """Return the task.toml for the columns of a row. JSON strings are valid TOML."""
    lines = ['version = "1.0"', "[metadata]"]
    lines += [f"{key} = {json.dumps(str(row[key]))}" for key in ("category", "difficulty") if row.get(key)]
    lines += (
        [f"[environment]\ndocker_image = {json.dumps(str(row['docker_image']))}"] if row.get("docker_image") else []
    )
    return "\n".join(lines) + "\n"


def _bytes(value: JSON, column: str) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(str(value), validate=True)
    except (binascii.Error, ValueError) as error:
        raise TaskError(f"column {column!r} is not base64: {error}") from None


def _extract(data: bytes, folder: Path, column: str) -> None:
    """Unpack an untrusted archive. Nothing is written outside the folder, devices are refused, and the size is
    limited."""
    try:
        unpack_files(data, str(folder), f"column {column!r}", MAX_UNPACKED_BYTES)
    except ImageError as error:
        raise TaskError(str(error)) from None
    check_links(folder)
