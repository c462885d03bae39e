"""Audits public sets of tasks, and writes the page of the documentation about what was found.

    python benchmarks/audit_study.py CHECKOUTS --out FOLDER --base ROOT         # audit the sets, or go on with it
    python benchmarks/audit_study.py CHECKOUTS --out FOLDER --only evoeval      # some of them
    python benchmarks/audit_study.py CHECKOUTS --out FOLDER --page docs/reference/audit_study.md

`audit_study.toml` names the sets, with the repositories and commits from which they come. CHECKOUTS is a folder with
the files of those repositories; no set is stored here. ROOT is a root file system with Python and pip, in place of
images that need packages of Debian: `palaestra images make debian:13` makes one. Each audit continues if it is stopped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import _measure as measure

from palaestra import __version__
from palaestra_audit.records import Audit, Finding, Kind, TaskAudit, read_audit
from palaestra_audit.trials import step_text
from palaestra_slots.core.printable import without_middle

_KINDS = [kind for kind in Kind if kind is not Kind.COSTLY]
_WITNESSES = 5
_MOST_REASONS = 3
_MOST_LINES, _FIRST_LINES = 40, 10
_LONGEST_LINE = 160
_PAGE = """# What audits of public sets found

<!-- written by benchmarks/audit_study.py --page -->

`palaestra audit` {version} played {tasks} tasks of {sets} public sets on {day}, on one machine with {cpus} cores and
without a container tool: where a task has an image of its own, the programs of the machine or of Debian 13 stood in
for it. Of each set, as many tasks were played with all checks as a limit of time allowed ("whole"), and the others only
with the reference solution and with doing nothing.

This page is no ranking. A finding has a witness that anybody can play again, and its author knows best whether it is a
fault; a note is what an honest reader could dispute. What was not tried is listed with each set, and an audit never
shows the absence of faults. The sets are not stored here: `benchmarks/audit_study.toml` names where they come from.

{table}

The numbers are those of tasks with findings, and in brackets of tasks with notes only.

{sets_text}"""


@dataclass(frozen=True, slots=True)
class PublicSet:
    """A set of tasks: where it comes from, and what follows `palaestra audit`. `only` is a pattern of the folders of
    its tasks, such as `*/*`."""

    name: str
    source: str
    path: str
    words: Sequence[str]
    only: str = "*"
    tasks: int = 60

    @property
    def folder(self) -> str:
        """The name of the folder of the audit."""
        return "".join(each if each.isalnum() else "-" for each in self.name.lower()).strip("-")


def main() -> int:
    parser = measure.options_parser(__doc__, 1)
    parser.add_argument("checkouts", type=Path, metavar="CHECKOUTS")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder of the audits")
    parser.add_argument("--base", default="host", metavar="ROOT", help="the root file system for BASE in the words")
    parser.add_argument("--only", default="", metavar="NAME", help="only the sets with this text in their names")
    parser.add_argument("--budget", default="30m", help="the budget of each audit (default 30m)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page from the audits that there are")
    options = parser.parse_args()
    sets = [PublicSet(**each) for each in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["set"]]
    sets = [each for each in sets if options.only.lower() in each.name.lower()]
    if options.page is None:
        for each in sets:
            _audit(each, options)
    audits = [(each, read_audit(path)) for each in sets if (path := options.out / each.folder).is_dir()]
    if options.page is not None:
        options.page.write_text(page(audits), encoding="utf-8")
    rows = [measure.Row(f"{each.name}: tasks", len(audit.tasks), "") for each, audit in audits]
    rows += [measure.Row("tasks of all sets", sum(len(audit.tasks) for _, audit in audits), "")]
    return measure.report("An audit of public sets", rows, options.json)


def _audit(each: PublicSet, options: argparse.Namespace) -> None:
    source = options.checkouts / each.path
    target = source
    if each.only != "*":  # a folder that has only the tasks with these names
        target = options.out / "sets" / each.folder
        target.mkdir(parents=True, exist_ok=True)
        for task in sorted(source.glob(each.only)):
            link = target / "-".join(task.relative_to(source).parts)
            if not link.exists():
                link.symlink_to(task.resolve())
    count = str(2 if options.quick else each.tasks)
    own = [options.base if word == "BASE" else word for word in each.words]
    words = [str(target), "--tasks", count, "--seed", "1", "--budget", options.budget, *own]
    program = Path(sys.executable).with_name("palaestra")
    print(f"{each.name}: palaestra audit {' '.join(words)}", file=sys.stderr)
    subprocess.run([program, "audit", "run", *words, "--out", options.out / each.folder], check=False)


def page(audits: Sequence[tuple[PublicSet, Audit]]) -> str:
    """Return the page about these audits."""
    return _PAGE.format(
        version=__version__,
        tasks=sum(len(_played(audit)) for _, audit in audits),
        sets=len(audits),
        day=datetime.now(UTC).date(),
        cpus=os.cpu_count(),
        table="\n".join(_table(audits)),
        sets_text="\n".join(_about(each, audit) for each, audit in audits),
    )


def _played(audit: Audit) -> list[TaskAudit]:
    return [task for task in audit.tasks if task.trials]


def _table(audits: Sequence[tuple[PublicSet, Audit]]) -> Iterator[str]:
    heads = [kind.replace("_", " ") for kind in _KINDS]
    yield f"| set | tasks | whole | without findings or notes | {' | '.join(heads)} |"
    yield "|---|---:|---:|---:|" + "---:|" * len(heads)
    for each, audit in audits:
        tasks = _played(audit)
        whole = sum(task.complete for task in tasks)
        clean = sum(task.complete and not task.findings for task in tasks)
        cells = [_cell(tasks, kind) for kind in _KINDS]
        yield f"| {each.name} | {len(tasks)} | {whole} | {clean} | {' | '.join(cells)} |"


def _cell(tasks: Sequence[TaskAudit], kind: Kind) -> str:
    found = [{each.note for each in task.findings if each.kind is kind} for task in tasks]
    findings, notes = sum(False in each for each in found), sum(each == {True} for each in found)
    return (str(findings) if findings else "") + (f" ({notes})" if notes else "")


def _about(each: PublicSet, audit: Audit) -> str:
    """Return the section about one set: its source, up to five witnesses, and what was not tried."""
    certain = [(task.id, found) for task, found in audit.findings() if not found.note]
    same = Counter((found.kind, found.what) for _, found in certain)
    witnesses = "".join(_witness(found, same[found.kind, found.what]) for found in _chosen(certain))
    return f"## {each.name}\n\n{each.source}. {_untried(audit)}\n\n{witnesses}"


def _chosen(certain: Sequence[tuple[str, Finding]]) -> list[Finding]:
    """Return some of these findings, each with its task, that say different things, of as many kinds and tasks as
    possible."""
    chosen: dict[tuple[str, str], tuple[str, Finding]] = {}
    while len(chosen) < _WITNESSES:
        left = [(task, each) for task, each in certain if (each.kind, each.what) not in chosen]
        kinds, tasks = [kind for kind, _ in chosen], [task for task, _ in chosen.values()]
        best = min(left, key=lambda pair: (kinds.count(pair[1].kind), tasks.count(pair[0])), default=None)
        if best is None:
            break
        chosen[best[1].kind, best[1].what] = best
    return [each for _, each in chosen.values()]


def _witness(finding: Finding, tasks: int) -> str:
    also = f" (so in {tasks} tasks)" if tasks > 1 else ""
    said = f"**`{finding.id}`**: {finding.what}{also}."
    if finding.trial is None:
        shown = _shortened([*finding.places, *finding.detail.splitlines()])
        return f"{said}\n\n" + (f"````text\n{shown}\n````\n\n" if shown else "")
    steps = _shortened(("\n".join(map(step_text, finding.trial.steps)) or "nothing").splitlines())
    world = f" on a machine with {finding.trial.world.name}" if finding.trial.world.name else ""
    verdict = finding.verdict
    scored = "no score" if verdict is None or verdict.reward is None else f"score {verdict.reward:g}"
    return (
        f"{said} What the agent does{world}:\n\n````text\n{steps}\n````\n\n"
        f"Result: {scored}; wanted: {finding.wanted or '-'}.\n\n"
    )


def _shortened(lines: Sequence[str]) -> str:
    """Return these lines without the middle of long ones, and without the middle of them all if there are many."""
    if len(lines) > _MOST_LINES:  # the fault is mostly at the end, after the reference solution
        left_out = len(lines) - _MOST_LINES
        lines = [*lines[:_FIRST_LINES], f"... ({left_out} lines)", *lines[_FIRST_LINES + left_out :]]
    return "\n".join(without_middle(line, _LONGEST_LINE) for line in lines)


def _untried(audit: Audit) -> str:
    reasons = Counter(
        f"{untried.kind.replace('_', ' ')}, as {without_middle(untried.why.splitlines()[0], _LONGEST_LINE)}"
        for task in audit.tasks
        for untried in task.untried
    )
    named = "; ".join(f"{reason} ({count} tasks)" for reason, count in reasons.most_common(_MOST_REASONS))
    left = f"; {audit.left} tasks did not get all checks" if audit.left else ""
    return f"Not tried, most often: {named or 'nothing'}{left}."


if __name__ == "__main__":
    sys.exit(main())
