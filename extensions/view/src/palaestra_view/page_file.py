"""Writes one self-contained file of a run: the viewer's page with the data of chosen rollouts in it.

The file is the same page as the server's. It loads nothing, and its policy allows only its own script and style. Long
texts are cut further than on the server, and the cuts are marked. The data are JSON, compressed, and are written one
rollout at a time, so memory does not grow with the run. A run's own report is such a file, without tokens.
"""

from __future__ import annotations

import base64
import hashlib
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from palaestra.rollouts.export.atropos import encode_line
from palaestra.rollouts.journal.reader import JOURNAL_NAME
from palaestra.rollouts.schedule import TaskChoice
from palaestra_slots.core.errors import ConfigError, DiskError
from palaestra_slots.core.io.durable_files import not_written, replaced
from palaestra_slots.core.types import JSON
from palaestra_view.forks import fork_of, forks
from palaestra_view.overview import overview
from palaestra_view.rollout_record import Names, rollout_record, token_record
from palaestra_view.run_index import RunIndex
from palaestra_view.runs import OpenRuns
from palaestra_view.summary import run_details, run_summary

LONG_CHARS = 50_000
"""The number of characters above which a text is cut in a file."""

SHORT_CHARS = 1_000
"""The same on a full page."""

PAGE_BYTES = 40_000_000
"""The size of the data, before compression, from which all further texts are cut short and no more tokens are
written. Browsers get slow somewhat above this size."""

MOST_ROLLOUTS = 2000
_IMPORTS = re.compile(r'^import (?:\* as (\w+)|(\{[^}]*\})) from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORTS = re.compile(r"^export (?=(?:async )?(?:function\*?|const|let) (\w+))", re.MULTILINE)
_BLOCK = 3 << 14
"""The number of bytes that are written as base64 together: a multiple of 3."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a file contains: the rollouts whose ids fit one of `patterns`, or all. If `first` is true, a run with more
    than `MOST_ROLLOUTS` rollouts is shown with the first of them; otherwise it is an error. `own` has the environment's
    own metrics of a run that is just ending."""

    patterns: Sequence[str] = ()
    tokens: bool = True
    first: bool = False
    own: Mapping[str, float] | None = None
    page_bytes: int = PAGE_BYTES


def write_page(
    path: Path, runs: OpenRuns, chosen: Chosen, texts: Callable[[str], Names | None] = lambda run: None
) -> Path:
    """Write the first of `runs` to a file, and return the path. Raises `ConfigError` if no rollout fits or too many do,
    and `DiskError` if the file cannot be written."""
    name = next(iter([*runs, *runs.problems]))
    while runs.update(name, 5.0):
        continue
    if name in runs.problems:
        raise ConfigError(runs.problems[name])
    pieces = page_data(runs, name, chosen, texts(name) if chosen.tokens else None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            for piece in assembled(pieces):
                file.write(piece)
    except OSError as error:
        raise error if isinstance(error, DiskError) else not_written(path, error) from error
    return path


def write_report(folder: Path, path: Path, own: Mapping[str, float] | None = None) -> None:
    """Write the report of the run in `folder`, finished or not. Raises `ConfigError` and `DiskError`. The index is a
    temporary file, because a long run's would take much memory."""
    if not (folder / JOURNAL_NAME).is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {JOURNAL_NAME}")
    with tempfile.TemporaryDirectory(prefix="palaestra-report-") as store:
        runs = OpenRuns(folder.parent, [folder], Path(store))
        try:
            write_page(path, runs, Chosen(tokens=False, first=True, own=own))
        finally:
            runs.close()


def page_data(runs: OpenRuns, name: str, chosen: Chosen, names: Names | None) -> Iterator[bytes]:
    """Yield the data of a file as JSON, in pieces: `rows`, `groups`, `left_out` (the number of rollouts that are not in
    the file), and `answers` by what the page asks."""
    index = runs[name]
    rows, left_out = _chosen_rows(index, chosen)
    rows = runs.marks(name).annotated(rows)
    ids = {row["id"] for row in rows}
    _, groups = index.groups(limit=10**9 if chosen.patterns else MOST_ROLLOUTS)
    groups = [{**group, "cells": [cell for cell in group["cells"] if cell[0] in ids]} for group in groups]
    groups = [group for group in groups if group["cells"] or (not chosen.patterns and group["error"])]
    yield b'{"rows":%s,"groups":%s,"left_out":%d,"answers":{' % (_json_bytes(rows), _json_bytes(groups), left_out)
    summary = run_summary(index, name, chosen.own)
    answers = {"runs": [summary], "problems": {}, "more": 0, "root": "this file"}
    yield b'"runs":%s' % _json_bytes(answers)
    details = {**run_details(index), "judged": runs.marks(name).summary(), "fork": fork_of(index)}
    yield b',"run":%s' % _json_bytes({"summary": summary, **details, **overview(index, chosen.own)})
    budget = _Budget(chosen)
    for key, answer in _answers(runs, name, rows, groups, names, budget):
        piece = _json_bytes(answer)
        budget.left -= len(piece)
        yield b",%s:%s" % (_json_bytes(key), piece)
    yield b"}}"


class _Budget:
    """Counts how many bytes still fit on the page. On a full page, texts are cut short and tokens are left out."""

    def __init__(self, chosen: Chosen) -> None:
        self.left = chosen.page_bytes
        self._tokens = chosen.tokens

    @property
    def long_chars(self) -> int:
        return LONG_CHARS if self.left > 0 else SHORT_CHARS

    @property
    def tokens(self) -> bool:
        return self._tokens and self.left > 0


def _chosen_rows(index: RunIndex, chosen: Chosen) -> tuple[list[dict[str, JSON]], int]:
    """Return the rows of the chosen rollouts, and the number of the other rollouts."""
    whole, rows = index.rows(limit=10**9 if chosen.patterns else MOST_ROLLOUTS)
    total = whole
    if chosen.patterns:
        wanted = TaskChoice(chosen.patterns)
        rows = [row for row in rows if row["id"] in wanted]
        if not rows:
            raise ConfigError(f"no finished rollout of {index.folder} fits {', '.join(chosen.patterns)}")
        total = len(rows)
    if total > MOST_ROLLOUTS and not chosen.first:
        raise ConfigError(
            f"a file can have {MOST_ROLLOUTS} rollouts, and {total} were chosen: choose fewer with --rollout"
        )
    rows = rows[:MOST_ROLLOUTS]
    return rows, whole - len(rows)


def _answers(
    runs: OpenRuns,
    name: str,
    rows: Sequence[Mapping[str, JSON]],
    groups: Sequence[Mapping[str, JSON]],
    names: Names | None,
    budget: _Budget,
) -> Iterator[tuple[str, JSON]]:
    index, ids = runs[name], {row["id"] for row in rows}
    for row in rows:
        try:
            record = rollout_record(index, row["id"], budget.long_chars)
        except ConfigError:  # nested too deeply: the page says that the file lacks it
            continue
        for key in ("before", "after"):
            record[key] = record[key] if record[key] in ids else None
        record["group"]["members"] = [each for each in record["group"]["members"] if each[0] in ids]
        if not budget.tokens:
            record["tokens"] = None
        yield f"rollout?{row['id']}", record
        yield f"judgement?{row['id']}", runs.marks(name).of(row["id"])
        yield f"forks?{row['id']}", forks(runs, name, row["id"])
        for number in range(len((record["tokens"] or {}).get("rows", ()))):
            yield f"tokens?{row['id']}?{number}", token_record(index, row["id"], number, names)
    for group in groups:
        if budget.left <= 0:
            return
        if len(group["cells"]) < 2:
            continue
        from palaestra_view.divergence import MOST, siblings  # imported here: groups of one have nothing to compare

        members = [index.trajectory(cell[0]) for cell in group["cells"][:MOST]]
        finished = [each for each in members if each is not None]
        if len(finished) > 1:
            yield f"siblings?{group['group_id']}", siblings(finished)


def _json_bytes(value: JSON) -> bytes:
    return encode_line(value)[:-1]


def assembled(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the page as one document with these data."""
    begin, end = _frame()
    yield begin
    packer, waiting = zlib.compressobj(4), bytearray()
    for piece in pieces:
        waiting += packer.compress(piece)
        if len(waiting) >= _BLOCK:
            whole = len(waiting) // _BLOCK * _BLOCK
            yield base64.b64encode(waiting[:whole])
            del waiting[:whole]
    yield base64.b64encode(waiting + packer.flush())
    yield end


@cache
def _frame() -> tuple[bytes, bytes]:
    """Return the page before and after the data."""
    style, script = page_file("view.css"), bundled()
    policy = (
        f"default-src 'none'; script-src {_csp_hash(script)}; style-src {_csp_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = page_file("index.html")
    page = page.replace('<link rel="stylesheet" href="/page/view.css">', f"<style>{style}</style>")
    page = page.replace('<script type="module" src="/page/app.js"></script>\n', "")
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    begin, _, end = page.partition("</body>")
    begin += '<script type="text/plain" id="data">'
    return begin.encode(), f'</script>\n<script type="module">{script}</script>\n</body>{end}'.encode()


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


def page_files() -> list[str]:
    """Return the names of the page's own files."""
    return sorted(each.name for each in resources.files(__package__).joinpath("page").iterdir() if each.is_file())


def page_file(name: str) -> str:
    """Return one of the page's own files."""
    return resources.files(__package__).joinpath("page", name).read_text("utf-8")


def _as_constant(found: re.Match[str]) -> str:
    whole, names, module = found.groups()
    return f"const {whole or names.replace(' as ', ': ')} = $_{module};\n"


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
