"""Writes one self-contained file of a run: the viewer's page with the data of chosen rollouts in it.

The file is the same page as the server's. It loads nothing, and its policy allows only its own script and style. Long
texts are cut further than on the server, and the cuts are marked. The data are JSON, compressed.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from palaestra.core.errors import ConfigError, DiskError
from palaestra.core.io.durable_files import not_written, replaced
from palaestra.core.types import JSON
from palaestra.viewer.divergence import MOST, siblings
from palaestra.viewer.forks import fork_of, forks
from palaestra.viewer.rollout_record import Names, rollout_record, token_record
from palaestra.viewer.runs import Runs
from palaestra.viewer.server import page_file, page_files
from palaestra.viewer.summary import run_details, run_summary

LONG_CHARS = 50_000
"""The number of characters above which a text is cut in a file."""

MOST_ROLLOUTS = 2000
_IMPORTS = re.compile(r'^import (?:\* as (\w+)|(\{[^}]*\})) from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORTS = re.compile(r"^export (?=(?:async )?(?:function\*?|const|let) (\w+))", re.MULTILINE)


def write_page(path: Path, runs: Runs, patterns: Sequence[str], texts: Callable[[str], Names | None]) -> Path:
    """Write the first of `runs` to a file, with the rollouts whose ids fit one of the patterns, or all, and return the
    path. Raises `ConfigError` if no rollout fits or too many do, and `DiskError` if the file cannot be written."""
    name = next(iter(runs))
    while runs.update(name, 5.0):
        continue
    if name in runs.problems:
        raise ConfigError(runs.problems[name])
    page = assembled(page_data(runs, name, patterns, texts(name)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write(page.encode())
    except OSError as error:
        raise error if isinstance(error, DiskError) else not_written(path, error) from error
    return path


def page_data(runs: Runs, name: str, patterns: Sequence[str], names: Names | None) -> dict[str, JSON]:
    """Return the data of a file: `rows`, `groups`, and `answers` by what the page asks."""
    index = runs[name]
    _, rows = index.rows(limit=10**9)
    rows = [row for row in rows if not patterns or any(fnmatchcase(row["id"], each) for each in patterns)]
    if not rows:
        raise ConfigError(f"no finished rollout of {index.path.parent} fits {', '.join(patterns) or 'the run'}")
    if len(rows) > MOST_ROLLOUTS:
        raise ConfigError(
            f"a file can have {MOST_ROLLOUTS} rollouts, and {len(rows)} were chosen: choose fewer with --rollout"
        )
    rows, chosen = runs.marks(name).annotated(rows), {row["id"] for row in rows}
    _, groups = index.groups(limit=10**9)
    groups = [{**group, "cells": [cell for cell in group["cells"] if cell[0] in chosen]} for group in groups]
    groups = [group for group in groups if group["cells"]]
    summary = run_summary(index, name)
    answers: dict[str, JSON] = {
        "runs": {"runs": [summary], "problems": {}, "more": 0, "root": "this file"},
        "run": {"summary": summary, **run_details(index), "judged": runs.marks(name).summary(), "fork": fork_of(index)},
    }
    for row in rows:
        record = rollout_record(index, row["id"], LONG_CHARS)
        for key in ("before", "after"):
            record[key] = record[key] if record[key] in chosen else None
        record["group"]["members"] = [each for each in record["group"]["members"] if each[0] in chosen]
        answers[f"rollout?{row['id']}"] = record
        answers[f"judgement?{row['id']}"] = runs.marks(name).of(row["id"])
        answers[f"forks?{row['id']}"] = forks(runs, name, row["id"])
        for number in range(len((record["tokens"] or {}).get("rows", ()))):
            answers[f"tokens?{row['id']}?{number}"] = token_record(index, row["id"], number, names)
    for group in groups:
        members = [index.trajectory(cell[0]) for cell in group["cells"][:MOST]]
        finished = [each for each in members if each is not None]
        if len(finished) > 1:
            answers[f"siblings?{group['group_id']}"] = siblings(finished)
    return {"rows": rows, "groups": groups, "answers": answers}


def assembled(data: JSON) -> str:
    """Return the page as one document with these data."""
    style, script = page_file("view.css"), bundled()
    packed = base64.b64encode(zlib.compress(msgspec.json.encode(data), 6)).decode()
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = page_file("index.html")
    page = page.replace('<link rel="stylesheet" href="/page/view.css">', f"<style>{style}</style>")
    page = page.replace('<script type="module" src="/page/app.js"></script>\n', "")
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    end = f'<script type="text/plain" id="data">{packed}</script>\n<script type="module">{script}</script>\n</body>'
    return page.replace("</body>", end)


def bundled() -> str:
    """Return the page's modules as one script. Each module becomes a function that returns its exports, after the
    modules that it imports."""
    modules = {name.removesuffix(".js"): page_file(name) for name in page_files() if name.endswith(".js")}
    done: dict[str, str] = {}

    def include(name: str) -> None:
        if name in done:
            return
        source = modules[name]
        for _, _, needed in _IMPORTS.findall(source):
            include(needed)
        exported = _EXPORTS.findall(source)
        body = _EXPORTS.sub("", _IMPORTS.sub(_as_constant, source))
        done[name] = f"const $_{name} = await (async () => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n"

    include("app")
    return "".join(done.values()).replace("</script", "<\\/script")


def _as_constant(found: re.Match[str]) -> str:
    whole, names, module = found.groups()
    return f"const {whole or names.replace(' as ', ': ')} = $_{module};\n"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
