"""What `palaestra audit` finds in planted sets: python benchmarks/audit_planted.py [--quick] [--form FORM] [--out DIR]

Writes 60 sound tasks of five forms and 120 copies with one fault each (`planted/`), audits them with all checks, and
counts the faults that are found with the right kind, and the findings and notes on sound tasks. An audit only measures
what a task costs: a costly task is found if it is among the two slowest of its set. With `--out`, the sets and audits
are kept, and the same command goes on where it was stopped. `--report` runs nothing and counts what is there.

Tasks of verifiers and Inspect need the environments of `scripts/faces_env`; without them, their forms are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _measure as measure
from planted.planted_task import KINDS, SOUND
from planted.sets import FORMS, PlannedAudit, Truth, planned, tasks_of, write_sets

_ROOT = Path(__file__).parents[1]
Audited = Mapping[tuple[str, str, str], Mapping[str, Any]]
"""The records of audited tasks by form, set and task."""


def main() -> int:
    """Audit the sets and print the tables."""
    parser = measure.options_parser(__doc__)
    parser.add_argument("--form", action="append", choices=FORMS, help="a form that is audited. Default: all")
    parser.add_argument("--budget", default="1h", help="the budget of each audit (default 1h)")
    parser.add_argument("--out", type=Path, help="the folder of the sets and audits")
    parser.add_argument("--report", action="store_true", help="only count what an earlier run has found in --out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        return _run(options, options.out or Path(temporary))


def _run(options: argparse.Namespace, folder: Path) -> int:
    forms = options.form or (["function"] if options.quick else list(FORMS))
    sets = folder / "sets"
    if not (sets / "truth.json").is_file():
        write_sets(sets)
    truths = [Truth(**each) for each in json.loads((sets / "truth.json").read_text())]
    truths = [each for each in truths if each.form in forms]
    began = time.monotonic()
    found: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for form in forms:
        for name in ("1",) if options.quick else ("1", SOUND, "2"):
            for each in planned(sets / form / name, form, name, tasks_of(form, name)):
                out = folder / "audits" / form / each.name
                if not options.report:
                    _audit(each, out, options)
                found |= _records(each, out)
    return _report(truths, found, time.monotonic() - began, options.json)


def _audit(audit: PlannedAudit, out: Path, options: argparse.Namespace) -> None:
    program = _program(audit.package)
    if program is None:
        print(f"{audit.form}: left out, {audit.package} is not installed (scripts/faces_env)", file=sys.stderr)
        return
    words = [*audit.words, "--budget", options.budget, "--jobs", "1", "--out", str(out)]
    done = subprocess.run([program, "audit", "run", *(["--tasks", "1"] if options.quick else []), *words],
                          capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode not in (0, 1):
        print(f"{audit.form}, {audit.name}: {done.stderr[-600:]}", file=sys.stderr)


@functools.cache
def _program(package: str) -> str | None:
    """Return the `palaestra` of an environment that has a package."""
    for folder in (Path(sys.executable).parent, _ROOT / ".venv-faces/bin", _ROOT / ".venv-faces-logs/bin"):
        probe = [str(folder / "python"), "-c", f"import importlib.util as u; u.find_spec({package!r}).name"]
        if (folder / "palaestra").exists() and not subprocess.run(probe, capture_output=True, check=False).returncode:
            return str(folder / "palaestra")
    return None


def _records(audit: PlannedAudit, out: Path) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    file = out / "audit.json"
    tasks = json.loads(file.read_text())["tasks"] if file.is_file() else []
    return {(audit.form, audit.set, each["id"]): each for each in tasks if each.get("complete", True)}


def _report(truths: Sequence[Truth], audited: Audited, seconds: float, json_file: Path | None) -> int:
    known = [(each, audited[key]) for each in truths if (key := (each.form, each.set, each.task)) in audited]
    faulty = [pair for pair in known if pair[0].kind != SOUND]
    hits = Counter((truth.form, truth.kind) for truth, _ in faulty if _is_found(truth, audited))
    tried = Counter((truth.form, truth.kind) for truth, _ in faulty)
    print("| kind | " + " | ".join(FORMS) + " | all |\n|---|" + "---|" * (len(FORMS) + 1))
    for kind in KINDS:
        cells = [f"{hits[form, kind]}/{tried[form, kind]}" if tried[form, kind] else "" for form in FORMS]
        counts = [sum(each[form, kind] for form in FORMS) for each in (hits, tried)]
        print(f"| {kind} | {' | '.join(cells)} | {counts[0]}/{counts[1]} |")
    for truth, record in faulty:
        if not _is_found(truth, audited):
            others = ", ".join(_words(each) for each in record.get("findings", ())) or "nothing"
            print(f"missed {truth.kind}: {truth.form}/{truth.set} {truth.task}: {truth.why} Found: {others}")
    wrong = _of_sound(truths, known)
    for truth, each in wrong:
        about = each.get("detail", "")[:300]
        print(f"on a sound task: {truth.form}/{truth.set} {truth.task}: {_words(each)} {about}")
    findings = sum(not each.get("note", False) for _, each in wrong)
    share = sum(hits.values()) / max(len(faulty), 1)
    rows = [
        measure.Row("planted faults that were audited", len(faulty), ""),
        measure.with_floor(measure.Row("found, the right kind named", share, ""), 0.95),
        measure.Row("sound tasks that were audited", len(known) - len(faulty), ""),
        measure.with_ceiling(measure.Row("findings on sound tasks", findings, ""), 0),
        measure.with_ceiling(measure.Row("notes on sound tasks", len(wrong) - findings, ""), 2),
        measure.Row("seconds of the audits of these tasks", sum(each["seconds"] for _, each in known), "s"),
        measure.Row("this run", seconds, "s"),
    ]  # fmt: skip
    return measure.report("An audit of planted faults", rows, json_file)


def _is_found(truth: Truth, audited: Audited) -> bool:
    if truth.kind == "costly":
        costs = {
            key[2]: sum(each["stages"].get(stage, 0.0) for stage in ("prepare", "grade"))
            for key, each in audited.items()
            if key[:2] == (truth.form, truth.set) and "stages" in each
        }
        if truth.task in sorted(costs, key=lambda task: -costs[task])[:2]:
            return True
    names = [truth.task, *filter(None, [truth.original])]
    records = [audited.get((truth.form, truth.set, name), {}) for name in names]
    return any(each["kind"] == truth.kind for record in records for each in record.get("findings", ()))


def _of_sound(
    truths: Sequence[Truth], known: Sequence[tuple[Truth, Mapping[str, Any]]]
) -> list[tuple[Truth, Mapping[str, Any]]]:
    """Return the findings and notes on sound tasks; that the original of a duplicate is named is right."""
    originals = {(each.form, each.set, each.original) for each in truths if each.original}
    return [
        (truth, each)
        for truth, record in known
        if truth.kind == SOUND
        for each in record.get("findings", ())
        if not (each["kind"] == "duplicate" and (truth.form, truth.set, truth.task) in originals)
    ]


def _words(finding: Mapping[str, Any]) -> str:
    return f"{'note ' if finding.get('note') else ''}{finding['kind']}: {finding['what']}"


if __name__ == "__main__":
    sys.exit(main())
