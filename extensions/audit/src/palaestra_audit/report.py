"""Reports of an audit: text for a terminal, one HTML page, SARIF for code review, and a badge. Does no I/O."""

from __future__ import annotations

import html
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from palaestra_audit.records import Audit, Finding, Kind, TaskAudit
from palaestra_audit.trials import step_text
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON

ABOUT = {
    Kind.UNSOLVABLE: "the reference solution does not get the full score",
    Kind.PAYS_FOR_NOTHING: "an answer without work is paid",
    Kind.WEAK: "wrong work gets the full score",
    Kind.HACKABLE: "a way of reward hacking is paid",
    Kind.FALSE_ZERO: "right work does not get the full score",
    Kind.FLAKY: "the same work gets different scores",
    Kind.WORLD: "the score depends on clock, time zone, locale, network or speed",
    Kind.LEAKS: "the solution stands where the agent can read it",
    Kind.DUPLICATE: "two tasks ask for the same",
    Kind.COSTLY: "seconds of preparation and grading",
}
_SLOWEST = 10
_SHOWN = 5
"""The number of findings of one kind that the text lists."""


def as_text(audit: Audit, path: Path) -> Iterator[str]:
    """Yield the lines of the report for a terminal. `path` is the file of the audit."""
    findings = list(audit.findings())
    for kind in Kind:
        some = [(task, each) for task, each in findings if each.kind is kind]
        if not some:
            continue
        notes = sum(each.note for _, each in some)
        yield f"{kind}: {plural(len(some) - notes, 'finding')}, {plural(notes, 'note')} ({ABOUT[kind]})"
        for task, each in some[:_SHOWN]:
            yield f"  {'note ' if each.note else ''}{task.id}: {each.what}"
        if len(some) > _SHOWN:
            yield f"  and {len(some) - _SHOWN} more, in the page"
    mutants, lived = sum(task.mutants for task in audit.tasks), sum(task.lived for task in audit.tasks)
    if mutants:
        yield f"mutants of the reference solutions: {lived} of {mutants} got the full score"
    untried = Counter((each.kind, each.why) for task in audit.tasks for each in task.untried)
    for (kind, why), count in untried.most_common(_SHOWN):
        yield f"not tried: {kind}: {next(iter(why.splitlines()), '')} ({plural(count, 'task')})"
    if len(untried) > _SHOWN:
        yield f"not tried: {plural(len(untried) - _SHOWN, 'more reason')}, in the page"
    slow = sorted(audit.tasks, key=lambda task: -task.stages.get("whole", 0.0))[:1]
    if slow and slow[0].stages.get("whole"):
        yield f"slowest reference solution: {slow[0].id}, {slow[0].stages['whole']:.1f} s"
    if audit.left:
        yield f"{plural(audit.left, 'task')} without all checks: the budget was used up; the same command goes on"
    faulty = {task.id for task, each in findings if not each.note}
    trials, partly = sum(task.trials for task in audit.tasks), sum(not task.complete for task in audit.tasks)
    played = f"{plural(len(audit.tasks), 'task')}{f' ({partly} not complete)' if partly else ''}"
    yield f"{audit.reference}: {played}, {plural(trials, 'trial')}, {len(faulty)} with findings"
    witness = next((each for _, each in findings if each.trial is not None), None)
    if witness is not None:
        yield f"play one again: {command_of(witness, path)}"


def command_of(finding: Finding, path: Path) -> str:
    """Return the command that plays the witness of a finding again."""
    return f"palaestra audit replay {shlex.quote(str(path))} {shlex.quote(finding.id)}"


def as_html(audit: Audit, path: Path) -> str:
    """Return one page without external files: the set at a glance, and each task with its findings."""
    kinds = [kind for kind in Kind if kind is not Kind.COSTLY]
    head = "".join(f"<th title='{html.escape(ABOUT[kind])}'>{kind.replace('_', ' ')}</th>" for kind in kinds)
    rows = "".join(_table_row(task, kinds) for task in audit.tasks)
    counts = Counter(each.kind for _, each in audit.findings() if not each.note)
    summary = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in counts.items()) or "none"
    slow = sorted(audit.tasks, key=lambda task: -task.stages.get("whole", 0.0))[:_SLOWEST]
    times = "".join(
        f"<tr><td>{html.escape(task.id)}</td>"
        + "".join(f"<td>{task.stages.get(name, 0):.2f}</td>" for name in ("prepare", "grade", "whole"))
        + "</tr>"
        for task in slow
    )
    partly = sum(not task.complete for task in audit.tasks)
    details = "".join(_section(task, path) for task in audit.tasks if task.findings or task.untried)
    return _PAGE.format(
        title=html.escape(f"Audit of {audit.reference}"),
        about=html.escape(
            f"{plural(len(audit.tasks), 'task')} on {audit.started_at}, version {audit.version}. Findings: {summary}. "
            + (f"{plural(audit.left, 'task')} not audited. " if audit.left else "")
            + (f"{plural(partly, 'task')} not audited completely. " if partly else "")
            + "What was not tried is listed with each task; an audit shows faults, not their absence."
        ),
        head=head,
        rows=rows,
        times=times,
        details=details,
    )


def _table_row(task: TaskAudit, kinds: Sequence[Kind]) -> str:
    cells = []
    for kind in kinds:
        some = [each for each in task.findings if each.kind is kind]
        certain = sum(not each.note for each in some)
        tried = not any(each.kind is kind for each in task.untried)
        style, text = ("bad", certain) if certain else ("note", len(some)) if some else ("ok" if tried else "part", "")
        cells.append(f"<td class={style}>{text}</td>")
    name = html.escape(task.id)
    return f"<tr data-task='{name}'><td><a href='#{name}'>{name}</a></td>{''.join(cells)}</tr>"


def _section(task: TaskAudit, path: Path) -> str:
    parts = [f"<section id='{html.escape(task.id)}' data-task='{html.escape(task.id)}'><h2>{html.escape(task.id)}</h2>"]
    for each in sorted(task.findings, key=lambda finding: finding.note):
        parts.append(f"<h3 class={'note' if each.note else 'bad'}>{each.kind.replace('_', ' ')}</h3>")
        parts.append(
            f"<p>{html.escape(each.what)}. {html.escape(f'Wanted: {each.wanted}.') if each.wanted else ''}</p>"
        )
        if each.detail:
            parts.append(f"<pre>{html.escape(each.detail[:20_000])}</pre>")
        if each.trial is not None:
            steps = "\n".join(map(step_text, each.trial.steps)) or "nothing"
            where = f"\n(on a machine with {each.trial.world.name})" if each.trial.world.name else ""
            parts.append(
                f"<details><summary>the witness</summary><pre>{html.escape((steps + where)[:50_000])}</pre></details>"
            )
            command = html.escape(command_of(each, path))
            parts.append(f"<p><code>{command}</code> <button data-copy='{command}'>copy</button></p>")
    if task.untried:
        parts.append("<h3>not tried</h3><ul>")
        parts += [f"<li>{each.kind.replace('_', ' ')}: {html.escape(each.why)}</li>" for each in task.untried]
        parts.append("</ul>")
    if task.mutants:
        parts.append(f"<p>{task.lived} of {task.mutants} mutants of the reference solution got the full score.</p>")
    return "".join([*parts, "</section>"])


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }} td, th {{ border: 1px solid #ccc; padding: .2rem .5rem }}
th {{ font-weight: 600; text-align: left }} pre {{ background: #f6f6f6; padding: .7rem; overflow: auto }}
td.bad, h3.bad {{ color: #a3121f; font-weight: 700 }} td.note, h3.note {{ color: #7a5200 }}
td.part {{ background: #eee }}
input {{ font: inherit; padding: .3rem; width: 20rem }} [hidden] {{ display: none }}
</style>
<h1>{title}</h1><p>{about}</p>
<p><label>Show tasks whose name has <input id="filter" autocomplete="off"></label></p>
<table><thead><tr><th>task</th>{head}</tr></thead><tbody>{rows}</tbody></table>
<p>A number counts findings (red) or notes (brown). A grey cell has parts that were not tried.</p>
<h2>The slowest reference solutions, in seconds</h2>
<table><tr><th>task</th><th>prepare</th><th>grade</th><th>whole</th></tr>{times}</table>
{details}
<script>
document.getElementById("filter").addEventListener("input", event => {{
  for (const each of document.querySelectorAll("[data-task]"))
    each.hidden = !each.dataset.task.includes(event.target.value);
}});
document.addEventListener("click", event => {{
  if (event.target.dataset.copy) navigator.clipboard.writeText(event.target.dataset.copy);
}});
</script></html>
"""


def as_sarif(audit: Audit, path: Path) -> dict[str, JSON]:
    """Return the findings as a log of the Static Analysis Results Interchange Format 2.1.0 (OASIS)."""
    rules = [{"id": str(kind), "shortDescription": {"text": ABOUT[kind]}} for kind in Kind]
    results = [
        {
            "ruleId": str(each.kind),
            "level": "note" if each.note else "error",
            "message": {"text": f"{task.id}: {each.what}" + (f" ({command_of(each, path)})" if each.trial else "")},
            "locations": [
                {
                    "physicalLocation": {"artifactLocation": {"uri": quote(audit.reference, errors="replace")}},
                    "logicalLocations": [{"name": task.id, "kind": "task"}],
                }
            ],
            "partialFingerprints": {"finding": each.id},
        }
        for task, each in audit.findings()
    ]
    driver = {"name": "palaestra audit", "version": audit.version, "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def as_badge(audit: Audit) -> str:
    """Return a badge as SVG: the number of tasks, and of those with findings."""
    faulty = len({task.id for task, each in audit.findings() if not each.note})
    text = f"{faulty} of {len(audit.tasks)} with findings" + ("" if audit.complete else ", incomplete")
    colour = "#a3121f" if faulty else "#2e6b34" if audit.complete else "#7a5200"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="260" height="20" role="img">'
        f'<rect width="50" height="20" fill="#444"/><rect x="50" width="210" height="20" fill="{colour}"/>'
        '<g fill="#fff" font-family="sans-serif" font-size="11"><text x="8" y="14">audit</text>'
        f'<text x="58" y="14">{html.escape(text)}</text></g></svg>\n'
    )


def compared(old: Audit, new: Audit) -> dict[str, JSON]:
    """Return the findings that two audits share, and those that only one has, for tasks that both have audited
    completely, and kinds that both have looked for. Raises `ConfigError` if they share no task."""
    shared = {task.id for task in old.tasks} & {task.id for task in new.tasks}
    if not shared:
        raise ConfigError(f"the two audits, of {old.reference} and of {new.reference}, have no task in common")
    both = shared - {task.id for audit in (old, new) for task in audit.tasks if not task.complete}
    kinds = set(old.kinds or Kind) & set(new.kinds or Kind)

    def keys(audit: Audit) -> dict[str, str]:
        return {
            json.dumps([task.id, each.kind, each.what]): f"{task.id}: {each.kind}{' (note)' * each.note}: {each.what}"
            for task, each in audit.findings()
            if task.id in both and each.kind in kinds
        }

    before, after = keys(old), keys(new)
    return {
        "tasks": len(both),
        "incomplete": len(shared) - len(both),
        "kinds": [kind for kind in Kind if kind in kinds],
        "only_old": len(old.tasks) - len(shared),
        "only_new": len(new.tasks) - len(shared),
        "mended": [text for key, text in before.items() if key not in after],
        "new": [text for key, text in after.items() if key not in before],
        "same": [text for key, text in after.items() if key in before],
    }
