"""The folder of a run, and the files made from its journal.

The folder holds the journal, the settings, `metrics.jsonl`, the groups (`groups.jsonl`, in the Atropos shape), the
report and, if tool replies from outside this machine were recorded, `world.jsonl`. If the settings name a path, copies
of the groups and of the report are written there; a new run numbers its copies instead of overwriting existing files. A
run that never began leaves no folder, and a run that wrote no group leaves no groups file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import msgspec

from palaestra.envs.config.command_line import ARGUMENTS, Parsed
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.envs.discovery import old_imports_allowed
from palaestra.envs.run.provenance import provenance
from palaestra.rollouts.events import (
    JOURNAL_SCHEMA,
    GroupBegun,
    GroupFinished,
    GroupsPlanned,
    Handlers,
    MetricsLogged,
    RunEnded,
    RunResumed,
    RunStarted,
)
from palaestra.rollouts.export.atropos import GroupsFile
from palaestra.rollouts.journal.journal import Journal, without_secrets
from palaestra.rollouts.journal.origin import mark_origin
from palaestra.rollouts.journal.reader import FORK_NAME, SET_NAME, WORLD_NAME, find_run
from palaestra.rollouts.observe.failures import Failures
from palaestra.rollouts.observe.last_metrics import last_metrics
from palaestra.rollouts.observe.metrics import Figures, group_size
from palaestra.rollouts.observe.status import RunReader, RunStatus
from palaestra.rollouts.observe.verdicts import OFFICIAL, VerdictCounts
from palaestra.rollouts.records import Group
from palaestra.rollouts.regraded import read_grades
from palaestra.rollouts.resume.state import EarlierWork, read_finished, repair
from palaestra_slots.core.config import DEFAULT
from palaestra_slots.core.errors import ConfigError, DiskError
from palaestra_slots.core.io.durable_files import KEPT, private
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig

if TYPE_CHECKING:
    from palaestra.rollouts.counterfactual import Counterfactual

logger = logging.getLogger(__name__)

REPORT_NAME = "report.html"

REPORTS = "palaestra.reports"
"""The group of entry points of extensions that write a report."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run."""

    path: Path
    run_id: str
    made: tuple[Path, ...] = ()
    """Parent folders that were created for the run's folder."""

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
    def workspaces(self) -> Path:
        return self.path.resolve() / "workspaces"

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def groups(self) -> Path:
        return self.path / "groups.jsonl"

    @property
    def report(self) -> Path:
        return self.path / REPORT_NAME

    def remove(self) -> None:
        """Remove the folder, and the parent folders that were made for it if they are empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        for path in self.made:
            with contextlib.suppress(OSError):  # the parent may hold other runs
                path.rmdir()


def claim_folder(root: Path, env: str, model: str) -> RunFolder:
    """Make a new, empty folder `root/env--model/<UTC time>-<id>`. Raises `ConfigError` if that fails."""
    above = run_place(root, env, model)
    made = tuple(path for path in (above, root) if not path.exists())
    while True:
        run_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.urandom(2).hex()}"
        path = above / run_id
        try:
            above.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        except OSError as error:
            if isinstance(error, FileExistsError) and path.exists():  # another run of the same second has this id
                continue
            raise ConfigError(
                f"cannot make the run folder {path}: {error.strerror}; run in a directory that you can write to"
            ) from error
        return RunFolder(path, run_id, made)


def run_place(root: Path, env: str, model: str) -> Path:
    """Return the folder that contains the runs of an environment with a model."""
    return root / f"{_folder_name(env)}--{_folder_name(model)}"


def named_folder(path: Path) -> RunFolder:
    """Make the run folder that the user named. Raises `ConfigError` if the path exists or the folder cannot be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise ConfigError(f"{path} exists: continue that run with --resume, or choose another name") from None
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {path}: {error.strerror}") from error
    # The runs of two evaluation sets may have the same name, and a tracker files runs by their ids.
    in_set = (path.parent / SET_NAME).is_file()
    return RunFolder(path, f"{path.parent.name}.{path.name}" if in_set else path.name)


def _folder_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name.strip("/")).strip("-") or "unnamed"


def resumed_folder(run: Path) -> RunFolder:
    """Return the folder of a run to resume, named as in `find_run`. Raises `ConfigError` for a folder that is not a run
    folder or that contains symbolic links."""
    path = find_run(run)
    folder = RunFolder(path, path.name)
    if not folder.journal.is_file():
        raise ConfigError(f"{path} is not a run folder: it has no {folder.journal.name}")
    links = sorted(str(each.relative_to(path)) for each in _links(path))
    if links:
        raise ConfigError(
            f"{path} contains symbolic links or special files ({', '.join(links[:5])}), and a resumed run could write "
            "to their targets; remove them"
        )
    return folder


def _links(path: Path) -> Iterator[Path]:
    """Yield the links, FIFOs and devices of a run's folder. Kept workspaces, `workspaces/GROUP/INDEX`, may have
    them."""
    for place, folders, files in os.walk(path):
        here = Path(place)
        for entry in (here / name for name in (*folders, *files)):
            # Not `stat`, for which a link to a file is a file.
            if stat.S_IFMT(entry.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                yield entry
        if here.parent == path / "workspaces":
            folders.clear()


class RunOutput:
    """The open files of a run. `own` are the environment's own metrics. In a resumed run, the groups file is rewritten
    from the beginning. `close` sets `status`, that of the whole run."""

    def __init__(
        self,
        folder: RunFolder,
        journal: Journal,
        settings: Mapping[str, JSON],
        *,
        env: str,
        model: str,
        groups: GroupsFile,
        copy: GroupsFile | None = None,
        earlier: EarlierWork | None = None,
    ) -> None:
        self.folder = folder
        self.journal = journal
        self.env = env
        self.model = model
        self.groups = groups
        self.copy = copy
        self.own: dict[str, float] = {}
        earlier_metrics = last_metrics(folder.metrics) if earlier is not None else {}
        self.slots_before = {name: each for name, each in earlier_metrics.items() if name.startswith("slots/")}
        """The metrics of the slots in earlier parts of the run."""
        self.failures = Failures()
        self.verdicts: VerdictCounts | None = None  # made when a group has something to say about verdicts
        self.resumes = earlier is not None
        self.begun = self.resumes
        """Whether any group began. If none did, there is nothing to keep."""
        self.earlier = earlier or EarlierWork()
        self.status = RunStatus()
        self.settings = settings
        self.reader = RunReader(folder.journal, self.own)
        """Reads the journal: what an earlier part of the run has done, and at the end what the whole run has."""
        self._figures = Figures(group_size(settings))
        self._unfinished: set[str] = set()
        self._started_at = time.time()

    @property
    def outcomes(self) -> Counter[str]:
        """The number of rollouts by outcome."""
        return self._figures.outcomes

    @property
    def criteria(self) -> Mapping[str, float]:
        """The means of the environment's metrics of rollouts, such as its several scores."""
        return self._figures.criteria()

    @property
    def labels(self) -> Counter[str]:
        """The number of rollouts with each label."""
        return self._figures.labels

    @property
    def _groups_files(self) -> tuple[GroupsFile, ...]:
        return (self.groups,) if self.copy is None else (self.groups, self.copy)

    def keep(self, group: Group) -> None:
        """Write a finished group."""
        for file in self._groups_files:
            file.add(group)

    def skip(self, group: Group) -> None:
        """Leave a finished group out of the groups file."""
        for file in self._groups_files:
            file.skip(group.number)

    @property
    def verdict_lines(self) -> list[str]:
        """What the summary says about official verdicts that differ from rewards."""
        return [] if self.verdicts is None else list(self.verdicts.lines())

    def handlers(self) -> Handlers:
        # A training run logs the steps of a warm start before its first group.
        begins: Handlers = {MetricsLogged: lambda _: self.begin()}
        return {GroupBegun: self._on_begun, GroupFinished: self._on_finished, GroupsPlanned: self._on_planned, **begins}

    def _on_planned(self, event: GroupsPlanned) -> None:
        if event.total is not None:
            self.own["tasks_planned"] = float(event.total)

    def _on_finished(self, event: GroupFinished) -> None:
        self._figures.add(event.group)
        if self.verdicts is not None or any(each.difference or each.unseen for each in event.group.trajectories):
            self.verdicts = self.verdicts or VerdictCounts()
            self.verdicts.add(event.group)
        self._unfinished.discard(event.group.group_id)
        if event.group.error or len(event.group.scored) < len(event.group.trajectories):
            self.failures.add(event.group)

    def _on_begun(self, event: GroupBegun) -> None:
        self.begun = True
        self._unfinished.add(event.group.group_id)

    def begin(self) -> None:
        """Keep the files of the run, although no group has begun."""
        self.begun = True

    def discard_unless_begun(self) -> None:
        """Remove all files of a run that never began."""
        if self.begun:
            return
        self.journal.close()
        for file in self._groups_files:
            file.close()
            file.path.unlink(missing_ok=True)
        self.folder.remove()

    def close(self, reason: str) -> dict[str, float]:
        """Write the journal's last line, close all files and write the report. Returns the run's metrics. Raises
        `DiskError`. The report reads the journal one rollout at a time, so a long run does not need more memory at its
        end."""
        try:
            self.journal.append(RunEnded(at=time.time(), reason=reason))
        finally:
            try:
                for file in self._groups_files:
                    file.close()
                    if not file.path.stat().st_size:
                        file.path.unlink()
            finally:
                self.journal.close()
        self.status = self.reader.read()
        report, self._figures.unfinished = self.folder.report, len(self._unfinished)
        if self.settings.get("command") == "evaluate":
            self._figures.refused = int(self.own.get("tasks_left_out", 0))
        copy = self.copy.path.with_suffix(".html") if self.copy is not None and self.copy.path.is_file() else None
        write_report(self.folder.path, report, self.own, copy)
        return self._figures.numbers() | self.own | self.status.usage_metrics


def write_report(folder: Path, path: Path, own: Mapping[str, float], copy: Path | None = None) -> None:
    """Write the report of a finished run with the extension that provides it, if one is installed. It reads the run's
    files, so that nothing of the run depends on it. `copy` is the path of a second file."""
    try:
        for point in entry_points(group=REPORTS):
            cast("WriteReport", point.load())(folder, path, own)
        if copy is not None and path.is_file():
            shutil.copyfile(path, copy)
    except (OSError, ConfigError, ImportError, AttributeError) as error:  # the last two: a broken extension
        logger.warning("the report %s cannot be written: %s; all other files are kept", path, error)


WriteReport: TypeAlias = Callable[[Path, Path, Mapping[str, float]], None]
"""Writes a report of the run in a folder, to a path. Gets the environment's own metrics too."""

RunLine = Parsed[BaseEnvConfig, APIServerConfig]


def open_output(
    env: str,
    parsed: RunLine,
    model: str,
    root: Path,
    reference: str,
    *,
    named: bool = False,
    official_name: str = OFFICIAL,
    begins: Counterfactual | None = None,
) -> RunOutput:
    """Open the output of a new run, or of the run to resume. `reference` names the environment for a later replay.
    `root` is the folder of all runs, or, if `named`, of this run. `official_name` is the benchmark's name for its
    verdict. The rollouts of a counterfactual run begin at the point `begins`."""
    settings = {"environment": reference, "folder": str(Path.cwd()), **_recorded_settings(parsed)}
    settings |= {} if official_name == OFFICIAL else {"official_name": official_name}
    settings |= {"compat": True} if old_imports_allowed() else {}
    settings["provenance"] = provenance(reference)
    if parsed.resume is not None:
        return _reopen_output(env, parsed, model, parsed.resume, settings)
    folder = named_folder(root) if named else claim_folder(root, env, model)
    try:
        if begins is not None:
            settings["fork"] = begins.facts
            with open(folder.path / FORK_NAME, "wb", opener=private) as file:
                file.write(msgspec.json.encode(begins))
        return _new_output(env, parsed.env_config, model, folder, settings)
    except BaseException:
        folder.remove()
        raise


def _new_output(env: str, config: BaseEnvConfig, model: str, folder: RunFolder, settings: dict[str, JSON]) -> RunOutput:
    with contextlib.ExitStack() as opened:
        journal = Journal(folder.journal)
        opened.callback(journal.close)
        keeps = config.include_messages
        groups = opened.enter_context(GroupsFile(folder.groups, env=env, model=model, messages=keeps))
        copy = None
        if config.data_path_to_save_groups:
            try:
                copy = GroupsFile(Path(config.data_path_to_save_groups), env=env, model=model, messages=keeps)
            except DiskError as error:
                why = str(error).removesuffix(KEPT)
                raise ConfigError(f"{why} (--out, data_path_to_save_groups)") from None
        opened.pop_all()
    settings |= {"groups_file": str((copy or groups).path.resolve()), "run_folder": str(folder.path.resolve())}
    with open(folder.config, "wb", opener=private) as file:
        file.write(msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n")
    mark_origin(folder.path, settings)
    output = RunOutput(folder, journal, settings, env=env, model=model, groups=groups, copy=copy)
    started = RunStarted(
        at=output._started_at, run_id=folder.run_id, env=env, model=model, seed=config.seed, config=settings
    )
    journal.append(started)
    return output


def _reopen_output(env: str, parsed: RunLine, model: str, path: Path, settings: Mapping[str, JSON]) -> RunOutput:
    """Open the output of an earlier run, to resume it. Raises `ConfigError` if that run had a different environment,
    model or seed, or if one of the two runs is an evaluation and the other is not."""
    folder, evaluates = resumed_folder(path), parsed.command == "evaluate"
    journal = Journal(folder.journal)  # locked before anything is read: the process that holds the lock owns the run
    try:
        torn = repair(folder.journal)
        earlier = read_finished(folder.journal)
        was = earlier.run
        assert was is not None
        if (was.config.get("command", parsed.command) == "evaluate") != evaluates:
            kind, other = ("a run", "an evaluation") if evaluates else ("an evaluation", "a run")
            raise ConfigError(f"{path} is {kind} and cannot be resumed as {other}: use the command that started it")
        for name, value in {"env": env, "model": model, "seed": parsed.env_config.seed}.items():
            if getattr(was, name) != value:
                raise ConfigError(
                    f"{path} was run with {name} {getattr(was, name)!r}, not {value!r}: resume it with the same {name}"
                )
        from palaestra.rollouts.counterfactual import resumed_fork  # imported here, because few runs are resumed

        resumed_fork(folder.path, was.config)  # reports a damaged file before anything is opened
        messages, wanted = parsed.env_config.include_messages, parsed.env_config.data_path_to_save_groups
        groups = GroupsFile(folder.groups, env=env, model=model, messages=messages, again=True)
        copy = None
        if wanted:
            before = _earlier_copy(was.config, folder, Path(wanted))
            path, again = before or Path(wanted), before is not None
            copy = GroupsFile(path, env=env, model=model, messages=messages, again=again)
        for line in _differing(was.config, settings):
            logger.warning("resumed with a changed setting: %s", line)
        if earlier.rollouts and _has_changed(was.config, settings) and not read_grades(folder.path):
            logger.warning(
                "the environment's file has changed since this run began: rollouts so far keep their score; "
                "`palaestra grade %s` gives all rollouts the new score",
                path,
            )
        # The folder may have another name by now.
        folder = replace(folder, run_id=was.run_id)
        output = RunOutput(folder, journal, was.config, env=env, model=model, groups=groups, copy=copy, earlier=earlier)
    except BaseException:
        journal.close()
        raise
    config = {**was.config, **settings}
    if copy is not None:
        config["groups_file"] = str(copy.path.resolve())
    # The mark comes first: a run that is killed in between must not have recorded settings without a mark.
    mark_origin(folder.path, config)
    journal.append(RunResumed(at=time.time(), schema=JOURNAL_SCHEMA, torn=torn, config=config))
    return output


def _earlier_copy(recorded: Mapping[str, JSON], folder: RunFolder, wanted: Path) -> Path | None:
    """Find the copy of the groups that the earlier part of a run made at the wanted path, perhaps with a number; None
    if there is none. The copy is rewritten.

    The recording names this file, so the file must be next to `wanted`: a recording alone must not choose a file on
    this machine.
    """
    path, first = Path(recorded.get("groups_file", "")), Path(recorded.get("run_folder", folder.path))
    # A copy of the run's folder must not overwrite the file of the run that is still where it was.
    moved = first.exists() and not first.samefile(folder.path)
    if not path.is_absolute() or not path.parent.is_dir() or moved or path.is_symlink():
        return None
    named = wanted.resolve()
    return path if path.parent.resolve() == named.parent and _is_numbered(path.name, named.name) else None


def _is_numbered(name: str, wanted: str) -> bool:
    """Return whether `name` is the wanted name, perhaps with the number that a new file gets."""
    stem, suffix = Path(wanted).stem, Path(wanted).suffix
    return re.fullmatch(rf"{re.escape(stem)}([._-]\d+)?{re.escape(suffix)}", name) is not None


def _has_changed(recorded: Mapping[str, JSON], now: Mapping[str, JSON]) -> bool:
    """Return whether the environment's file has different content now; False if one of the runs has no file."""
    before, after = ((each.get("provenance") or {}).get("environment_sha256") for each in (recorded, now))
    return None not in (before, after) and before != after


def _differing(recorded: Mapping[str, JSON], now: Mapping[str, JSON]) -> list[str]:
    """Return lines about how the settings of a resumed run differ from the recorded ones."""
    old, new = recorded.get("env") or {}, now.get("env") or {}
    sources = {**(now.get("sources") or {}), **(recorded.get("sources") or {})}
    short = {name: written for written, name in ARGUMENTS.items()}
    lines = [
        f"{short.get(name, name)} was {old.get(name)!r}, and is {new.get(name)!r} now"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
        and (name in new or sources.get(f"env.{name}") != DEFAULT)  # records of earlier versions have every default
    ]
    places = (recorded.get("environment"), now.get("environment"))
    return (
        [*lines, f"the environment's file was {places[0]!r}, and is {places[1]!r} now"]
        if places[0] != places[1]
        else lines
    )


def _recorded_settings(parsed: RunLine) -> dict[str, JSON]:
    values = {
        "command": parsed.command,
        "env": parsed.env_config.recorded(),
        "openai": [server.recorded() for server in parsed.server_configs],
        "sources": dict(parsed.sources),
    }
    cleaned: dict[str, JSON] = msgspec.to_builtins(without_secrets(values))
    return cleaned
