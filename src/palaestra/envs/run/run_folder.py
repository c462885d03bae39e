"""Where a run writes: its folder, and the projections of its journal.

The folder holds the journal, the settings, `metrics.jsonl` and, once a tool has touched the world, `world.jsonl`. The
groups file (JSONL in the Atropos shape) and the report lie beside each other: in the folder, or at the path that was
asked for, numbered rather than overwritten. A run that goes on where that path is not, and a copy of a run, have them
in the folder.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.rollouts.export.atropos import GroupsFile
from palaestra.rollouts.export.html import write_report
from palaestra.rollouts.journal.journal import Journal, RunEnded, RunStarted
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.observe.metrics import summarise
from palaestra.rollouts.observe.status import RunReader
from palaestra.rollouts.recorded_tools.recording_file import WORLD_NAME
from palaestra.rollouts.resume.state import Finished

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run."""

    path: Path
    run_id: str

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def world(self) -> Path:
        return self.path / WORLD_NAME

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def groups(self) -> Path:
        return self.path / "groups.jsonl"


def claim_folder(root: Path, env: str, model: str) -> RunFolder:
    """Make a new, empty folder `root/env--model/<UTC time>-<id>`. Raises `ConfigError` where none can be made."""
    above = root / f"{_plain(env)}--{_plain(model)}"
    while True:
        run_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.urandom(2).hex()}"
        path = above / run_id
        try:
            above.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except OSError as error:
            if isinstance(error, FileExistsError) and path.exists():  # a run that began in the same second has the id
                continue
            raise ConfigError(
                f"cannot make the run folder {path}: {error.strerror}; run where you may write"
            ) from error
        return RunFolder(path, run_id)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name.strip("/")).strip("-") or "unnamed"


def resumed_folder(path: Path) -> RunFolder:
    """The folder of a run to go on with. Raises `ConfigError` where there is none."""
    folder = RunFolder(path, path.name)
    if not folder.journal.is_file():
        raise ConfigError(f"{path} is no run folder: it has no {folder.journal.name}")
    return folder


class Output:
    """The open files of a run. `close` makes what is made from the whole.

    With `groups_file` an earlier part of the run is gone on with: that file is written again from its beginning.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        env: str,
        model: str,
        groups_path: Path | None,
        settings: Mapping[str, JSON],
        messages: bool = True,
        groups_file: Path | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.folder = folder
        self.env = env
        self.model = model
        self.own: dict[str, float] = {}
        self.finished: Finished | None = None
        self.resumed = ""
        self._settings = dict(settings)
        self._started_at = time.time()
        self.journal = journal or Journal(folder.journal)
        path, again = groups_file or groups_path or folder.groups, groups_file is not None
        self.groups = GroupsFile(path, env=env, model=model, messages=messages, again=again)
        if groups_file is None:
            self._settings["groups_file"] = str(self.groups.path.resolve())
            self._settings["run_folder"] = str(folder.path.resolve())
            folder.config.write_bytes(msgspec.json.format(msgspec.json.encode(self._settings), indent=2) + b"\n")

    @property
    def report(self) -> Path:
        """The report, beside the groups file and of its name."""
        return self.groups.path.with_suffix(".html")

    def start(self, seed: int) -> None:
        """Write the journal's first line."""
        self.journal.append(
            RunStarted(
                at=self._started_at,
                run_id=self.folder.run_id,
                env=self.env,
                model=self.model,
                seed=seed,
                config=self._settings,
            )
        )

    def close(self, reason: str) -> dict[str, float]:
        """Write the journal's last line, close everything and make the report. Returns the run's figures. Raises
        `DiskError`.

        The journal is gone through a group at a time, so that a long run's end takes no more memory than its middle.
        """
        try:
            self.journal.append(RunEnded(at=time.time(), reason=reason))
        finally:
            try:
                self.groups.close()
            finally:
                self.journal.close()
        recording = Recording(self.folder.journal)
        figures = summarise(recording) | self.own
        meta = {
            "env": self.env,
            "model": self.model,
            "started_at": self._started_at,
            "run": str(self.folder.path),
        }
        if self.finished is not None:
            self.resumed = RunReader(self.folder.journal).read().resumed
            meta |= {"resumed": self.resumed} if self.resumed else {}
        try:
            write_report(self.report, recording, meta)
        except OSError as error:
            logger.warning("the report %s cannot be written: %s; all else is kept", self.report, error.strerror)
        return figures
