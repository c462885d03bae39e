"""`palaestra audit`: find the faults of an environment's tasks, each with a witness."""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click

from palaestra.cli.completion import SettingsCommand, complete_environments, complete_settings
from palaestra_audit.records import Audit, Kind, TaskAudit, read_audit
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.io.durable_files import replaced, writing
from palaestra_slots.core.printable import printable

FOUND, INCOMPLETE = 1, 3
"""Exit codes: there are findings; there are none, but parts of the audit are missing."""
_KINDS = click.Choice([str(kind) for kind in Kind])
_LENGTHS = {"s": 1, "m": 60, "h": 3600}


class _AuditGroup(click.Group):
    """A group whose first word may also be an environment."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            return "run", self.commands["run"], args
        return super().resolve_command(ctx, args)


def _seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a time such as 90s, 30m or 2h")
    return float(found[1]) * _LENGTHS[found[2] or "s"]


@click.group("audit", cls=_AuditGroup, context_settings={"ignore_unknown_options": True})
def command() -> None:
    """Find the faults of an environment's tasks, each with a witness that can be played again.

    \b
      palaestra audit my_env.py
      palaestra audit tasks/ --tasks 20 --budget 30m
      palaestra audit rows.jsonl --only weak --only hackable
      palaestra audit inspect:my_eval.py@my_task
      palaestra audit replay audits/my_env/audit.json ID
      palaestra audit compare OLD.json NEW.json

    `palaestra audit ENV` is short for `palaestra audit run ENV`.
    """


@command.command("run", cls=SettingsCommand, context_settings={"ignore_unknown_options": True})
@click.option("--tasks", type=click.IntRange(min=1), help="Audit at most this many tasks. Default: all.")
@click.option("--seed", type=int, help="With --tasks, choose them at random with this seed instead of the first ones.")
@click.option("--budget", callback=_seconds, metavar="TIME", help="Stop after this time: 90s, 30m, 2h.")
@click.option("--only", multiple=True, type=_KINDS, metavar="KIND", help="Look only for this kind. Repeatable.")
@click.option("--skip", multiple=True, type=_KINDS, metavar="KIND", help="Do not look for this kind. Repeatable.")
@click.option("--jobs", type=click.IntRange(min=1), help="Tasks at a time. Default: one for each processor.")
@click.option("--repeats", type=click.IntRange(min=2), default=5, show_default=True, help="Trials of a flaky score.")
@click.option("--against", type=click.Path(path_type=Path), metavar="FILE", help="Also look for duplicates in FILE.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder of the result. Default: audits/ENV."
)
@click.option("--badge", is_flag=True, help="Also write badge.svg.")
@click.option(
    "--patch",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write changes that close findings, if a rule knows one that holds when the changed task is audited again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the audit as JSON.")
@click.argument("environment", metavar="ENV", shell_complete=complete_environments)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_settings)
@click.pass_context
def run(
    context: click.Context,
    tasks: int | None,
    seed: int | None,
    budget: float | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    jobs: int | None,
    repeats: int,
    against: Path | None,
    out: Path | None,
    badge: bool,
    patch: Path | None,
    as_json: bool,
    environment: str,
    settings: tuple[str, ...],
) -> None:
    """Audit an environment, a folder of tasks, a file of SWE rows, or KIND:NAME of another library.

    \b
      palaestra audit run my_env.py --tasks 20
      palaestra audit run swe_smith_oracle --env.dataset_name rows.jsonl

    The kinds: unsolvable, pays_for_nothing, weak, hackable, false_zero, flaky, depends_on_the_world, leaks, duplicate,
    costly. A finding has a witness: what an agent does, and where. A note is what an honest reader could dispute. The
    result is in DIR: audit.json, audit.html and audit.sarif. The same command goes on with an audit that was stopped,
    and audits only tasks that have changed. The exit code is 1 if there are findings, and 3 if parts are missing.
    """
    from palaestra.envs.config.command_line import first_word
    from palaestra_audit.audit import Plan, Progress, audit_environment
    from palaestra_audit.checks import JOBS
    from palaestra_audit.patches import Patches

    environment, others = first_word([environment, *settings], "ENV")
    name = Path(environment).resolve().name if Path(environment).exists() else environment
    own = re.sub(r"[^\w.-]+", "-", name.removesuffix(".py")).strip("-")
    folder = out if out is not None else Path("audits", own)
    path, chosen = folder / "audit.json", (frozenset(map(Kind, only)), frozenset(map(Kind, skip)))
    plan = Plan(environment, others, path, tasks, seed, budget, *chosen, jobs or JOBS, repeats, against)
    if not plan.kinds:
        raise click.UsageError("--only and --skip leave no kind to look for")
    began, counted, shown = time.monotonic(), itertools.count(1), set[str]()

    class Told(Progress):
        total = 0

        def opened(self, tasks: int) -> None:
            self.total = tasks

        def begun(self, task: TaskAudit) -> None:
            for line in self._new(task):
                _tell(f"found {line}")

        def ended(self, task: TaskAudit, kept: bool) -> None:
            kinds = {each.kind: each for each in reversed(task.findings) if not each.note}
            tried = task.trials and not set(plan.kinds) <= {each.kind for each in task.untried}
            nothing = "not tried" if not tried else "ok" if task.complete else "not complete"
            found = ", ".join(map(str, reversed(kinds))) or nothing
            before = ", kept from an earlier audit" if kept else ""
            how = f"{plural(task.trials, 'trial')}, {task.seconds:.1f} s{before}"
            lines = [f"[{next(counted)}/{self.total}] {task.id}: {found} · {how}"]
            lines += [] if kept else [f"    {line}" for line in self._new(task)]
            _tell(*lines)

        def _new(self, task: TaskAudit) -> list[str]:
            """Return lines with the first finding of each kind, without those that have been shown."""
            first = {each.kind: each for each in reversed(task.findings) if not each.note}
            new = [each for each in reversed(first.values()) if each.id not in shown]
            shown.update(each.id for each in new)
            return [f"{each.id}: {each.what}" for each in new]

        def playing(self, running: Mapping[str, tuple[str, int]]) -> None:
            each = ", ".join(f"{task} ({kind}, {plural(trials, 'trial')})" for task, (kind, trials) in running.items())
            _tell(f"auditing {each}" if each else "preparing the tasks")

    try:
        audit = audit_environment(plan, Told())
    except KeyboardInterrupt:
        if path.is_file():
            _write_reports(read_audit(path), path, badge)
        click.echo("stopped: the same command goes on with the tasks that are left", err=True)
        raise
    _write_reports(audit, path, badge)
    if as_json:
        click.echo(path.read_text(encoding="utf-8"), nl=False)
    else:
        from palaestra_audit.report import as_text

        _tell(*as_text(audit, path), err=False)
        click.echo(f"{folder / 'audit.html'} ({time.monotonic() - began:.0f} s)")
    for line in Patches(audit, plan, patch).write() if patch is not None else ():
        click.echo(printable(line), err=as_json)
    context.exit(FOUND if not audit.sound else 0 if audit.complete else INCOMPLETE)


def _tell(*lines: str, err: bool = True) -> None:
    """Print these lines. A name with a line break does not begin another one, which a service might take for a
    command."""
    click.echo("\n".join(printable(line).replace("\n", "\\n") for line in lines), err=err)


def _write_reports(audit: Audit, path: Path, badge: bool) -> None:
    """Write the reports beside the file of the audit."""
    from palaestra_audit.report import as_badge, as_html, as_sarif

    reports = {path.with_suffix(".html"): as_html(audit, path)}
    reports[path.with_suffix(".sarif")] = json.dumps(as_sarif(audit, path), indent=1)
    if badge:
        reports[path.parent / "badge.svg"] = as_badge(audit)
    for report, text in reports.items():
        with writing(report), replaced(report) as file:  # not through a link that may be there
            file.write(text.encode(errors="replace"))


@command.command("replay", context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("finding", metavar="ID")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def replay_finding(context: click.Context, as_json: bool, file: Path, finding: str, settings: tuple[str, ...]) -> None:
    """Play the witness of a finding again, and print its steps and its score.

    \b
      palaestra audit replay audits/my_env/audit.json a/weak/1

    Run it where the audit ran, because the environment and its settings are named as they were there. The audit does
    not keep secret settings, such as --openai.api_key: give them again after ID, or as variables. The exit code is 1 if
    the score is no longer that of the finding.
    """
    from palaestra_audit.audit import replay
    from palaestra_audit.trials import shown_steps

    audit = read_audit(file)
    found = next(((task, each) for task, each in audit.findings() if each.id == finding), None)
    if found is None:
        known = ", ".join([each.id for _, each in audit.findings()][:10])
        raise ConfigError(f"{file} has no finding {finding}. It has: {known or 'none'}")
    task, each = found
    verdict, played = replay(audit, task, each, settings)
    same = each.verdict is not None and verdict.reward == each.verdict.reward
    if as_json:
        about = {"id": each.id, "kind": each.kind, "reward": verdict.reward, "same": same, "error": verdict.error}
        click.echo(json.dumps(about))
    else:
        steps = "\n".join(shown_steps(each.trial.steps if each.trial else (), played)) or "nothing"
        where = f"on a machine with {each.trial.world.name}\n" if each.trial and each.trial.world.name else ""
        click.echo(printable(f"{each.id}: {each.what}\n{where}{steps}"))
        scored = "unscored" if verdict.reward is None else f"{verdict.reward:g}"
        click.echo(
            printable(f"score {scored} (wanted {each.wanted or '-'}){': ' + verdict.error if verdict.error else ''}")
        )
        if not same:
            sys.stderr.write("the score is not that of the finding any more\n")
    context.exit(0 if same else 1)


@command.command("compare")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
def compare(as_json: bool, old: Path, new: Path) -> None:
    """Compare two audits: which findings were mended, and which are new.

    \b
      palaestra audit compare audits/v1/audit.json audits/v2/audit.json
    """
    from palaestra_audit.report import compared

    before, after = read_audit(old), read_audit(new)
    found = compared(before, after)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name in ("mended", "new"):
        for text in found[name]:
            _tell(f"{name}: {text}", err=False)
    missing = f" ({found['incomplete']} more not complete)" if found["incomplete"] else ""
    if before.kinds != after.kinds:
        click.echo(f"only the kinds that both looked for: {', '.join(found['kinds']) or 'none'}")
    click.echo(f"{plural(found['tasks'], 'task')} in both{missing}; {plural(len(found['same']), 'finding')} the same")
