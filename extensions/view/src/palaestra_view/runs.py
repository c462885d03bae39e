"""The runs that one viewer shows, each with its index.

A viewer shows one run, with the counterfactual runs that continue its rollouts, the runs below a folder, or files of
other programs: one, or those below a folder without runs. A run's name is its path below that folder. Only these
journals and files, and the files that belong to them, are read; links are not followed.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from palaestra.rollouts.journal.reader import BATCHES, FORK_NAME, JOURNAL_NAME, RUNS, find_run, list_runs
from palaestra_slots.core.config import cache_folder
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import UNREADABLE, read_regular
from palaestra_view.marks import Marks
from palaestra_view.run_index import IMPORTS, RunIndex
from palaestra_view.summary import run_state

MOST = 200
"""The maximum number of runs that a viewer shows; the latest come first."""

_DEEP = 3
_KEPT_S = 30 * 86_400.0


class OpenRuns:
    """The runs below `root`, or only the folders and files `only`. `store` is the folder of the indexes; None keeps
    them in memory."""

    def __init__(self, root: Path, only: Sequence[Path] = (), store: Path | None = None) -> None:
        self.root = root
        self.only = only
        self.problems: dict[str, str] = {}
        """The reason why a run cannot be shown, by its name."""
        self.more = 0
        """The number of older runs that are not shown."""
        self._store = store
        self._indexes: dict[str, RunIndex] = {}
        self._marks: dict[str, Marks] = {}
        self._states: dict[str, str] = {}
        self.discover()

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the runs, the latest first."""
        return iter(list(self._indexes))

    def __getitem__(self, name: str) -> RunIndex:
        """Return the index of a run. Raises `ConfigError` for another name."""
        if name not in self._indexes:
            raise ConfigError(f"this viewer does not show a run {name!r}; reload the list of runs")
        return self._indexes[name]

    @property
    def run_name(self) -> str:
        """The name of the run that the user specified; empty if the viewer shows the runs of a folder."""
        return next(iter(self._indexes), "") if len(self.only) == 1 else ""

    def discover(self) -> bool:
        """Look for new runs, and return whether there are any."""
        found = [each for folder in self.only for each in (folder, *_related(folder))] or self._runs_below_root()
        self.more = max(0, len(found) - MOST)
        names = {self._run_name(folder): folder for folder in found[:MOST]}
        fresh = names.keys() - self._indexes.keys() - self.problems.keys()
        indexes: dict[str, RunIndex] = {}
        for name, folder in names.items():
            index = self._indexes.get(name)
            if index is None and name in fresh:
                try:
                    index = self._open_index(folder)
                except (ConfigError, OSError) as error:
                    self.problems[name] = str(error)
            if index is not None:
                indexes[name] = index
        for name in self._indexes.keys() - indexes.keys():
            self._indexes[name].close()
        self._indexes = indexes
        return bool(fresh)

    def update(self, name: str, seconds: float = 0.1) -> bool:
        """Index what one run has gained, and return whether there was anything, or whether its process has ended or
        started meanwhile. A run that cannot be read is left out from then on, with its reason in `problems`."""
        index = self._indexes.get(name)
        if index is None:
            return False
        try:
            changed = index.update(seconds)
            changed = self.marks(name).update() or changed
            state = run_state(index)
            before, self._states[name] = self._states.get(name, state), state
            return state != before or changed
        except (ConfigError, OSError, ValueError, *UNREADABLE) as error:
            self.problems[name] = str(error)
            self._indexes.pop(name).close()
            return True
        except sqlite3.ProgrammingError:  # the viewer ends, and has closed the index
            return False

    def marks(self, name: str) -> Marks:
        """Return what people have said about the rollouts of a run, and their new rewards. Raises `ConfigError` for
        another name."""
        index = self[name]
        if name not in self._marks or self._marks[name].index is not index:
            marks = Marks(index)
            marks.update()  # before another thread can find it
            self._marks[name] = marks
        return self._marks[name]

    def close(self) -> None:
        """Close all indexes."""
        for index in self._indexes.values():
            index.close()

    def _open_index(self, path: Path) -> RunIndex:
        if path.is_dir() and (path / JOURNAL_NAME).is_file():
            return RunIndex(path / JOURNAL_NAME, self._store)
        from palaestra_view.imported import ImportedIndex  # imported here, because a run reads none for its report

        return ImportedIndex(path, self._store)

    def _runs_below_root(self) -> list[Path]:
        if self.root == RUNS.resolve() or self.root == RUNS:
            return [folder for folder in list_runs() if _is_below(folder, RUNS) or _is_below(folder, BATCHES)]
        found = {
            path.parent
            for depth in range(1, _DEEP + 1)
            for path in self.root.glob("/".join(["*"] * depth + [JOURNAL_NAME]))
            if path.is_file() and not path.is_symlink() and _is_below(path.parent, self.root)
        }
        return sorted(found, key=lambda folder: (folder / JOURNAL_NAME).stat().st_mtime, reverse=True)

    def _run_name(self, folder: Path) -> str:
        try:
            found = folder.resolve().relative_to(self.root.resolve()).as_posix()
            return folder.resolve().name if found == "." else found
        except ValueError:  # a named batch, which is next to the folder of runs
            return folder.as_posix()


def _is_below(folder: Path, root: Path) -> bool:
    """Return whether a folder is below another one, and not only linked there."""
    return folder.resolve().is_relative_to(root.resolve())


def _related(folder: Path) -> list[Path]:
    """Return the folders of the runs next to this one that continue its rollouts (`palaestra fork`), and of the run
    whose rollout this one continues."""
    if not (folder / JOURNAL_NAME).is_file():
        return []  # a file of another program
    place, found = folder.resolve().parent.parent, list[Path]()
    for path in place.glob(f"*/*/{FORK_NAME}"):
        if _is_below(path.parent, place) and _continued_run_id(path) == folder.name:
            found.append(path.parent)
    run_id = _continued_run_id(folder / FORK_NAME)
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
        found += [path for path in place.glob(f"*/{run_id}") if _is_below(path, place)]
    found = [each for each in found if (each / JOURNAL_NAME).is_file() and not (each / JOURNAL_NAME).is_symlink()]
    return sorted(found, key=lambda each: each.name, reverse=True)


class _Origin(msgspec.Struct):
    run_id: str = ""


class _ForkFile(msgspec.Struct):
    origin: _Origin


def _continued_run_id(path: Path) -> str:
    """Return the id of the run that a counterfactual run continues; empty for another run."""
    try:
        return _run_id(path, path.stat().st_mtime_ns)
    except OSError:
        return ""


@lru_cache(maxsize=1024)
def _run_id(path: Path, changed: int) -> str:
    try:
        return msgspec.json.decode(read_regular(path), type=_ForkFile).origin.run_id
    except (OSError, *UNREADABLE):
        return ""


def open_runs(target: str, store: Path | None = None) -> OpenRuns:
    """Return the runs that `target` names: a run, as in `find_run`, a folder with runs in it or below it, or a file or
    folder of another program. An empty `target` names the folder of runs. Raises `ConfigError` if there are none."""
    if not target:
        if not list_runs():
            raise ConfigError(
                f"there are no runs in {RUNS.resolve()} or {BATCHES.resolve()}: specify the folder of a run, or start "
                "one with `palaestra run`"
            )
        return OpenRuns(RUNS, store=store)
    folder = find_run(target)
    folder = folder.parent if folder.is_file() and folder.name == JOURNAL_NAME else folder
    if (folder / JOURNAL_NAME).is_file():
        return OpenRuns(folder.parent, [folder], store)
    if not folder.is_dir():
        return _open_file(folder, store)
    runs = OpenRuns(folder, store=store)
    if not list(runs) and not runs.problems:
        from palaestra_view.imports.files import READABLE, sources_below  # as above

        found = sources_below(folder)
        if not found:
            raise ConfigError(
                f"{folder} is not a run folder, and there is nothing below it that can be shown: specify a folder with "
                f"journals, or a file: {READABLE}"
            )
        runs = OpenRuns(folder, found, store)
        if not list(runs):
            reasons = "; ".join(list(runs.problems.values())[:3])
            raise ConfigError(f"{folder} has nothing that can be shown: {reasons}")
    return runs


def _open_file(path: Path, store: Path | None) -> OpenRuns:
    """Return a file of another program as the one run. Raises `ConfigError` if it cannot be read."""
    runs = OpenRuns(path.parent, [path], store)
    for name in runs:
        runs.update(name, 0.2)
    if runs.problems:
        raise ConfigError(next(iter(runs.problems.values())))
    return runs


def index_store() -> Path:
    """Return the folder for indexes in the user's cache, without the indexes that were not used for 30 days."""
    folder = cache_folder("view")
    for path in (*folder.glob("*.sqlite"), *folder.glob(f"{IMPORTS}/*"), *folder.glob(f"{IMPORTS}/.*.tmp")):
        try:
            whole = path.is_dir() and not path.is_symlink()
            used = max(each.stat().st_mtime for each in (path, *(path.iterdir() if whole else ())))
            if time.time() - used > _KEPT_S:
                shutil.rmtree(path) if whole else path.unlink()
        except OSError:
            continue
    return folder
