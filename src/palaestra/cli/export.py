"""`palaestra export RUN --to FORMAT`: a finished run in the form that another program reads."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from palaestra.cli.completion import complete_formats, complete_runs
from palaestra.core.exits import plural

if TYPE_CHECKING:
    from palaestra.rollouts.export.exporter import Exporter, ExportReport
    from palaestra.rollouts.journal.reader import Recording
    from palaestra.rollouts.records import Group, Trajectory


class _Help(click.Command):
    """A command whose help ends with the formats, which are read when it is asked for."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from palaestra.rollouts.export.exporter import FORMATS

        super().format_help_text(ctx, formatter)
        with formatter.section("Formats"):
            formatter.write_dl([(name, summary) for name, (_, summary) in FORMATS.items()])


@click.command(
    "export",
    cls=_Help,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="""Write the rollouts of a run in the form that another program reads.

    \b
      palaestra export RUN --to openai
      palaestra export RUN --to rows --out rows.jsonl     # exact tokens, for a trainer
      palaestra export last --to openai --min-reward 1    # solved tasks only, for fine-tuning
      palaestra export last --to table --task 'astropy-*' --outcome natural
      palaestra export RUN --to table --out - | column -ts,
      palaestra export --from sessions --to openai --out chats.jsonl     # conversations of palaestra chat

    RUN is a run's folder, an id or `last`. Only its journal is read, also during the run. The file lies in
    RUN/exports unless --out says otherwise; one that is there already is kept and the new one numbered. The path goes
    to stdout; what is not in the file, and why, to stderr.

    With --from sessions, RUN is a conversation (or all): only of users who consented (palaestra chat --consent yes),
    with secrets replaced.
    """,
)
@click.argument("run", required=False, default="", shell_complete=complete_runs)
@click.option(
    "--from",
    "source",
    type=click.Choice(["runs", "sessions"]),
    default="runs",
    help="A run, or stored conversations of palaestra chat.",
)
@click.option(
    "--to",
    "--format",
    "name",
    metavar="FORMAT",
    default="",
    shell_complete=complete_formats,
    help="One of the formats, or package.module:Class.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, allow_dash=True), help="The file, or a folder for it; - for stdout."
)
@click.option(
    "--scored-only/--all",
    "scored_only",
    default=None,
    help="Only with a reward [formats for training], or all.",
)
@click.option("--min-reward", type=float, help="Only rollouts with at least this reward.")
@click.option("--max-reward", type=float, help="Only rollouts with at most this reward.")
@click.option("--task", "tasks", multiple=True, metavar="PATTERN", help="Only these tasks; may be repeated, * matches.")
@click.option("--outcome", "outcomes", multiple=True, help="Only this outcome (natural, …); repeatable.")
@click.option("--placeholders", is_flag=True, help="rows: also tokens that train nothing.")
@click.option("--json", "as_json", is_flag=True, help="Say what came of it as JSON.")
def command(
    run: str,
    source: str,
    name: str,
    out: Path | None,
    scored_only: bool | None,
    min_reward: float | None,
    max_reward: float | None,
    tasks: tuple[str, ...],
    outcomes: tuple[str, ...],
    placeholders: bool,
    as_json: bool,
) -> None:
    from palaestra.core.config import nearest
    from palaestra.core.errors import ConfigError
    from palaestra.core.types import Outcome
    from palaestra.rollouts.export.exporter import exporter_named
    from palaestra.rollouts.journal.reader import open_recording

    known = [outcome.value for outcome in Outcome]
    for outcome in outcomes:
        if outcome not in known:
            raise ConfigError(f"unknown outcome {outcome!r}; there are {', '.join(known)}.{nearest(outcome, known)}")
    wanted = Filter(min_reward, max_reward, tasks, outcomes)
    exporter = exporter_named(name)
    if source == "sessions":
        _export_sessions(exporter, run, out, wanted, as_json=as_json)
        return
    if not run:
        raise ConfigError("name the run to export: its folder, its id, or last")
    recording = open_recording(run)
    everything = exporter.everything if scored_only is None else not scored_only
    meta = replace(recording.meta, everything=everything, placeholders=placeholders)
    folder = recording.path.parent / "exports"
    path = out or folder
    if out is None or path.is_dir():
        path = path / f"{exporter.name}{exporter.ending}"

    def write(file: IO[bytes]) -> ExportReport:
        with _progress(recording) as groups:
            report = exporter.export(wanted.of(groups), file, meta)
        report.left_out += wanted.left_out
        return report

    target, report = _written(path, write)
    _say(exporter, report, target, recording.unfinished, as_json)


def _export_sessions(exporter: Exporter, named: str, out: Path | None, wanted: Filter, *, as_json: bool) -> None:
    """Write stored conversations."""
    from palaestra.chat.export import session_groups
    from palaestra.chat.store import ConversationStore
    from palaestra.rollouts.export.exporter import ExportMeta

    path = out or Path("exports")
    if out is None or path.is_dir():
        path = path / f"sessions-{exporter.name}{exporter.ending}"
    meta = ExportMeta(run_id="sessions", env="chat", everything=True)

    def write(file: IO[bytes]) -> ExportReport:
        left_out: Counter[str] = Counter()
        names = [named] if named else []
        groups = session_groups(store, names, left_out, tokens=exporter.name in ("rows", "atropos"))
        report = exporter.export(wanted.of(groups), file, meta)
        report.left_out += left_out + wanted.left_out
        return report

    with ConversationStore() as store:
        target, report = _written(path, write)
    _say(exporter, report, target, 0, as_json)


@dataclass(slots=True)
class Filter:
    """Which rollouts are exported. `left_out` counts the others by reason."""

    min_reward: float | None
    max_reward: float | None
    tasks: tuple[str, ...]
    outcomes: tuple[str, ...]
    left_out: Counter[str] = field(default_factory=Counter)

    def of(self, groups: Iterable[Group]) -> Iterator[Group]:
        """Yield the groups with the chosen rollouts; without groups of other tasks."""
        for group in groups:
            if self.tasks and not any(fnmatchcase(group.task_id, pattern) for pattern in self.tasks):
                self.left_out["another task"] += len(group.trajectories)
                continue
            reasons = [self._reason(each) for each in group.trajectories]
            self.left_out.update(filter(None, reasons))
            group.trajectories = [each for each, reason in zip(group.trajectories, reasons, strict=True) if not reason]
            yield group

    def _reason(self, rollout: Trajectory) -> str:
        """Return why a rollout is left out; empty if it is not."""
        if self.outcomes and rollout.outcome.value not in self.outcomes:
            return "another outcome"
        if self.min_reward is not None and (rollout.reward is None or rollout.reward < self.min_reward):
            return f"reward below {self.min_reward:g}, or none"
        if self.max_reward is not None and (rollout.reward is None or rollout.reward > self.max_reward):
            return f"reward above {self.max_reward:g}, or none"
        return ""


def _written(path: Path, write: Callable[[IO[bytes]], ExportReport]) -> tuple[Path | None, ExportReport]:
    """Return where the export lies, None for stdout. A file is filled beside its place, which it takes when it is
    whole; what is there already and is no file (a pipe, a device) is written to as it is."""
    from palaestra.core.errors import ConfigError

    try:
        if str(path) == "-":
            report = write(sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return None, report
        if path.exists() and not path.is_file():
            with path.open("wb") as stream:
                return path, write(stream)
        return _filled(path, write)
    except BrokenPipeError:
        raise  # nobody reads any more, and nobody need be told
    except OSError as error:
        place = "standard output" if str(path) == "-" else path
        raise ConfigError(f"cannot write {place}: {error.strerror}; name another file with --out") from error


def _filled(path: Path, write: Callable[[IO[bytes]], ExportReport]) -> tuple[Path, ExportReport]:
    from palaestra.core.io.durable_files import private
    from palaestra.rollouts.export.atropos import claim_path

    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(unfinished, "wb", opener=private) as file:
            report = write(file)
            file.flush()
            os.fsync(file.fileno())
        target = claim_path(path)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target, report


@contextlib.contextmanager
def _progress(recording: Recording) -> Iterator[Iterable[Group]]:
    """The groups, with a bar on stderr where somebody is looking."""
    if not sys.stderr.isatty():
        yield recording
        return
    with click.progressbar(recording, length=recording.finished, label="groups", file=sys.stderr) as groups:
        yield groups


def _say(exporter: Exporter, report: ExportReport, path: Path | None, unfinished: int, as_json: bool) -> None:
    """The path, or the report, on stdout, unless the export itself went there; the summary on stderr."""
    from palaestra.rollouts.export.exporter import UNSCORED

    facts = report.to_dict() | {"format": exporter.name, "path": str(path) if path else None}
    facts["unfinished_groups"] = unfinished
    lines = [f"{exporter.name}: {plural(report.records, 'record')} from {plural(report.rollouts, 'rollout')}"]
    lines += [f"  left out  {count:>6}  {reason}" for reason, count in (+report.left_out).most_common()]
    lines += [f"  remark    {count:>6}  {remark}" for remark, count in (+report.remarks).most_common()]
    unscored = report.left_out[UNSCORED]
    if unfinished:
        lines.append(f"  left out: {plural(unfinished, 'group')} that had not ended")
    if not report.records:
        lines.append("  there is nothing in it" + (": --all takes rollouts without a reward" if unscored else ""))
    click.echo("\n".join(lines), err=True)
    if as_json:
        click.echo(json.dumps(facts), err=path is None)
    elif path is not None:
        click.echo(path)
