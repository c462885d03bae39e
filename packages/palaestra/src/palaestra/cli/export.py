"""`palaestra export RUN --to FORMAT`: write a run's rollouts in a format that another program reads."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol, cast

import click

from palaestra.cli.completion import complete_formats, complete_runs
from palaestra.envs.config.host_path import HostPath
from palaestra_slots.core.exits import plural
from palaestra_slots.core.io import plugins
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from palaestra.rollouts.export.duplicates import Duplicates
    from palaestra.rollouts.export.exporter import Encoding, Exporter, ExportReport
    from palaestra.rollouts.journal.reader import Recording
    from palaestra.rollouts.records import Group, Trajectory

SOURCES = "palaestra.exported"
"""The group of entry points for what can be exported beside runs."""


class StoredGroups(Protocol):
    """Opens stored conversations. If `names` is empty, all are read; `left_out` counts those that are excluded."""

    def __call__(
        self, names: Sequence[str], left_out: Counter[str], *, tokens: bool
    ) -> AbstractContextManager[Iterable[Group]]: ...


class _Help(click.Command):
    """A command whose help ends with the formats; they are looked up only when the help is printed."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from palaestra.rollouts.export.formats import FORMATS

        super().format_help_text(ctx, formatter)
        with formatter.section("Formats"):
            formatter.write_dl([(name, summary) for name, (_, summary) in FORMATS.items()])


@click.command(
    "export",
    cls=_Help,
    context_settings={"max_content_width": 100},
    help="""Write the rollouts of a run in a format that another program reads.

    \b
      palaestra export RUN --to openai
      palaestra export RUN --to rows --out rows.jsonl     # exact tokens, for a trainer
      palaestra export last --to openai --min-reward 1    # solved tasks only, for fine-tuning
      palaestra export last --to table --task 'astropy-*' --outcome natural
      palaestra export --from sessions --to openai --out chats.jsonl     # conversations of palaestra chat

    RUN is a run's folder, an id or `last`, ended or not. The file is written to RUN/exports or --out. An
    existing file is kept, and the new one gets a number. stderr lists the rollouts left out, with the reasons.

    With --from sessions, RUN is a conversation, or `all`. Only conversations with consent (palaestra chat
    --consent yes) are exported, with secrets replaced.
    """,
)
@click.argument("run", required=False, default="", shell_complete=complete_runs)
@click.option(
    "--from",
    "source",
    type=click.Choice(["runs", "sessions"]),
    default="runs",
    help="A run, or conversations of palaestra chat.",
)
@click.option(
    "--to",
    "--format",
    "name",
    metavar="FORMAT",
    default="",
    shell_complete=complete_formats,
    help="Its name, or your own as package.module:Class.",
)
@click.option(
    "--out",
    type=HostPath(allow_dash=True),
    help="The file to write, a folder for it, or - for stdout.",
)
@click.option(
    "--scored-only/--all",
    "scored_only",
    default=None,
    help="Only kept rollouts with a reward (the default for training formats), or all.",
)
@click.option("--min-reward", type=float, help="Only rollouts with at least this reward.")
@click.option("--max-reward", type=float, help="Only rollouts with at most this reward.")
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="PATTERN",
    help="Only such tasks, as in `words-*`. Repeatable.",
)
@click.option("--outcome", "outcomes", multiple=True, help="Only this outcome (natural, …). Repeatable.")
@click.option(
    "--unique",
    type=float,
    metavar="SIMILARITY",
    help="Leave out repetitions: 1 equal, 0.8 similar.",
)
@click.option("--placeholders", is_flag=True, help="For `rows`: export placeholder tokens too.")
@click.option("--tokenizer", metavar="NAME", help="For `rows`: encode texts, to fine-tune this model.")
@click.option("--tool-parser", "parser", help="With --tokenizer: the parser of calls.")
@click.option("--chat-template", metavar="FILE", help="With --tokenizer: the chat template.")
@click.option("--text-content", is_flag=True, help="For `openai`: empty text in place of null.")
@click.option("--counterfactual", is_flag=True, help="Export rollouts of `palaestra fork` too.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    run: str,
    source: str,
    name: str,
    out: Path | None,
    scored_only: bool | None,
    unique: float | None,
    placeholders: bool,
    tokenizer: str | None,
    parser: str | None,
    chat_template: str | None,
    counterfactual: bool,
    text_content: bool,
    as_json: bool,
    **selection: JSON,
) -> None:
    from palaestra.rollouts.annotations import read_annotations
    from palaestra.rollouts.export.duplicates import Duplicates, duplicates_of
    from palaestra.rollouts.export.formats import FORMATS, exporter_named
    from palaestra.rollouts.journal.reader import open_recording
    from palaestra_slots.core.errors import ConfigError

    _check_outcomes(selection["outcomes"])
    exporter = exporter_named(name)
    given = {
        "--tokenizer": tokenizer, "--tool-parser": parser, "--chat-template": chat_template,
        "--placeholders": placeholders, "--counterfactual": counterfactual, "--text-content": text_content,
    }  # fmt: skip
    _check_options(exporter.name if exporter.name in FORMATS else "", source, {name for name in given if given[name]})
    everything = exporter.everything if scored_only is None else not scored_only
    wanted = Filter(**selection, discarded=everything)
    if unique is not None:
        wanted.duplicates = Duplicates(unique)
    if source == "sessions":
        _export_sessions(exporter, run, out, wanted, text_content=text_content, as_json=as_json)
        return
    if not run:
        raise ConfigError("specify the run to export: its folder, its id, or last")
    recording = open_recording(run)
    if unique is None and not everything:
        wanted.duplicates = duplicates_of(recording.meta)
    said = read_annotations(recording.path.parent)
    meta = replace(
        recording.meta,
        everything=everything,
        placeholders=placeholders,
        counterfactual=counterfactual,
        text_content=text_content,
        encoding=None if tokenizer is None else _encoding(tokenizer, chat_template, parser or "hermes"),
        judgements=said.by_rollout,
        grades=recording.grades,
    )
    folder = recording.path.parent / "exports"
    if out is None and folder.is_symlink():  # somebody else may have made the run, and chosen where the link leads
        raise ConfigError(f"{folder} is a link: remove it, or choose a file with --out")
    path = _place(out, folder, f"{exporter.name}{exporter.ending}")

    def write(file: IO[bytes]) -> ExportReport:
        with _progress(recording) as groups:
            report = exporter.export(wanted.of(groups), file, meta)
        report.left_out += wanted.left_out
        return report

    target, report = _write_export(path, write, named=out is not None)
    if new := sum(each.reward is not None for each in meta.grades.values()):
        report.remarks["with the score that palaestra grade gave it"] += new
    _say(exporter, report, target, recording.unfinished, as_json)


def _place(out: Path | None, folder: Path, name: str) -> Path:
    """Return the file that is written: `out`, or a file of this name in the directory `out`, or else in `folder`."""
    return (out or folder) / name if out is None or out.is_dir() else out


def _check_outcomes(outcomes: Iterable[str]) -> None:
    from palaestra_slots.core.config import nearest
    from palaestra_slots.core.errors import ConfigError
    from palaestra_slots.core.types import Outcome

    known = [outcome.value for outcome in Outcome]
    for outcome in outcomes:
        if outcome not in known:
            raise ConfigError(f"unknown outcome {outcome!r}; use one of {', '.join(known)}.{nearest(outcome, known)}")


_OF_FORMATS = {"--tokenizer": "rows", "--placeholders": "rows", "--text-content": "openai"}


def _check_options(format_name: str, source: str, given: Set[str]) -> None:
    """Raise `ConfigError` for options that one of our formats, or an export of conversations, does not read."""
    from palaestra_slots.core.errors import ConfigError

    for option in sorted(given & _OF_FORMATS.keys()):
        if format_name and format_name != (only := _OF_FORMATS[option]):
            raise ConfigError(f"{option} is for the format {only}; remove it, or export with --to {only}")
    if "--tokenizer" not in given and given & {"--tool-parser", "--chat-template"}:
        raise ConfigError("--tool-parser and --chat-template need --tokenizer: set it, or leave them out")
    if source == "sessions" and given & {"--tokenizer", "--placeholders", "--counterfactual"}:
        raise ConfigError("--tokenizer, --placeholders and --counterfactual are for runs: leave them out with --from")


def _encoding(tokenizer: str, chat_template: str | None, parser: str) -> Encoding:
    from palaestra.rollouts.export.exporter import Encoding
    from palaestra_tokens.engines.token_engine import template_text
    from palaestra_tokens.templates import ChatFormat
    from palaestra_tokens.tokenizers import load_tokenizer

    return Encoding(ChatFormat(load_tokenizer(tokenizer), template_text(chat_template)), parser)


def _export_sessions(
    exporter: Exporter, named: str, out: Path | None, wanted: Filter, *, text_content: bool, as_json: bool
) -> None:
    """Write stored conversations, which the door that stored them reads."""
    from palaestra.rollouts.export.exporter import ExportMeta

    stored = cast("StoredGroups", plugins.load(plugins.installed(SOURCES)["sessions"]))

    path = _place(out, Path("exports"), f"sessions-{exporter.name}{exporter.ending}")
    meta = ExportMeta(run_id="sessions", env="chat", everything=True, text_content=text_content)

    def write(file: IO[bytes]) -> ExportReport:
        left_out: Counter[str] = Counter()
        names = [] if named in ("", "all") else [named]
        with stored(names, left_out, tokens=exporter.name in ("rows", "atropos")) as groups:
            report = exporter.export(wanted.of(groups), file, meta)
        report.left_out += left_out + wanted.left_out
        return report

    target, report = _write_export(path, write)
    _say(exporter, report, target, 0, as_json)


@dataclass(slots=True)
class Filter:
    """Selects the rollouts to export; the first four fields are flags. `left_out` counts the rollouts that are not
    exported, by reason."""

    min_reward: float | None
    max_reward: float | None
    tasks: tuple[str, ...]
    outcomes: tuple[str, ...]
    discarded: bool
    """Whether to export the samples that a batch discarded."""
    duplicates: Duplicates | None = None
    left_out: Counter[str] = field(default_factory=Counter)

    def of(self, groups: Iterable[Group]) -> Iterator[Group]:
        """Yield the groups of the selected tasks, each with only its selected rollouts."""
        from palaestra.rollouts.schedule import TaskChoice

        chosen = TaskChoice(self.tasks)
        for group in groups:
            if self.tasks and group.task_id not in chosen:
                self.left_out["different task"] += len(group.trajectories)
                continue
            reasons = [self._exclusion_reason(each) for each in group.trajectories]
            self.left_out.update(filter(None, reasons))
            group.trajectories = [each for each, reason in zip(group.trajectories, reasons, strict=True) if not reason]
            yield group

    def _exclusion_reason(self, rollout: Trajectory) -> str:
        """Return the reason why a rollout is left out, or an empty string if it is exported."""
        from palaestra.rollouts.export.duplicates import REPEATED
        from palaestra.rollouts.export.exporter import discarded

        if not self.discarded and (why := discarded(rollout)):
            return f"discarded: {'; '.join(why)}"
        if self.outcomes and rollout.outcome.value not in self.outcomes:
            return "different outcome"
        if self.min_reward is not None and (rollout.reward is None or rollout.reward < self.min_reward):
            return f"reward below {self.min_reward:g}, or none"
        if self.max_reward is not None and (rollout.reward is None or rollout.reward > self.max_reward):
            return f"reward above {self.max_reward:g}, or none"
        # Last, because a rollout that another filter leaves out must not count as the first of its kind.
        seen = self.duplicates if rollout.scored or self.discarded else None
        if seen is not None and seen.repeats(rollout.rollout_id, rollout.messages):
            return REPEATED
        return ""


def _write_export(
    path: Path, write: Callable[[IO[bytes]], ExportReport], *, named: bool = True
) -> tuple[Path | None, ExportReport]:
    """Write the export. Returns the path, or None for stdout, and the report. A file is written next to its final path
    and renamed when complete; if the user `named` the path and it is a pipe or a device, the export is written into
    it."""
    from palaestra_slots.core.errors import ConfigError

    try:
        if str(path) == "-":
            report = write(sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return None, report
        if named and path.exists() and not path.is_file():
            with path.open("wb") as stream:
                return path, write(stream)
        return _filled(path, write)
    except BrokenPipeError:
        raise  # the reader has closed the pipe: nothing to report
    except OSError as error:
        place = "standard output" if str(path) == "-" else path
        raise ConfigError(f"cannot write {place}: {error.strerror}; choose a different file with --out") from error


def _filled(path: Path, write: Callable[[IO[bytes]], ExportReport]) -> tuple[Path, ExportReport]:
    from palaestra.rollouts.export.atropos import claim_path
    from palaestra_slots.core.io.durable_files import private, unfinished_name

    unfinished = unfinished_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(unfinished, "xb", opener=private) as file:
            report = write(file)
            file.flush()
            os.fsync(file.fileno())
        # Claimed last, so that an export that fails leaves no empty file and uses no number.
        target = claim_path(path)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target, report


@contextlib.contextmanager
def _progress(recording: Recording) -> Iterator[Iterable[Group]]:
    """Yield the groups, with a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield recording
        return
    with click.progressbar(recording, length=recording.finished, label="groups", file=sys.stderr) as groups:
        yield groups


def _say(exporter: Exporter, report: ExportReport, path: Path | None, unfinished: int, as_json: bool) -> None:
    """Print the path, or with `as_json` the report, to stdout, and a summary to stderr. If the export itself went to
    stdout, print the report to stderr and no path."""
    from palaestra.rollouts.export.exporter import COUNTERFACTUAL, UNSCORED

    facts = report.to_dict() | {"format": exporter.name, "path": str(path) if path else None}
    facts["unfinished_groups"] = unfinished
    lines = [f"{exporter.name}: {plural(report.records, 'record')} from {plural(report.rollouts, 'rollout')}"]
    lines += [f"  left out  {count:>6}  {reason}" for reason, count in (+report.left_out).most_common()]
    lines += [f"  remark    {count:>6}  {remark}" for remark, count in (+report.remarks).most_common()]
    unscored = report.left_out[UNSCORED]
    if unfinished:
        lines.append(f"  left out: {plural(unfinished, 'unfinished group')}")
    if report.left_out[COUNTERFACTUAL]:
        lines.append("  counterfactual rollouts continue a rollout of another run: --counterfactual exports them too")
    if not report.records:
        lines.append("  the export is empty" + (": --all also exports rollouts without a reward" if unscored else ""))
    click.echo("\n".join(lines), err=True)
    if as_json:
        click.echo(json.dumps(facts), err=path is None)
    elif path is not None:
        click.echo(path)
