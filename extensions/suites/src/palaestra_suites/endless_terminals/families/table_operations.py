"""Build the parts of the table families: generate a table, choose a target file, and make a task part from one
operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from palaestra_slots.core.types import JSON
from palaestra_suites.endless_terminals.checks.all_checks import AnyCheck
from palaestra_suites.endless_terminals.checks.data_checks import Csv, Json, JsonLines
from palaestra_suites.endless_terminals.family import Build, DataFile, TaskPart, UnfitInputError, python
from palaestra_suites.endless_terminals.random_stream import Draw
from palaestra_suites.endless_terminals.tables import FORMS, READER, Column, Table, TableRow, describe, render, short
from palaestra_suites.endless_terminals.words import CITIES, COLOURS, PEOPLE, SERVICES

_THEMES = (
    ("orders", "order_id", (("customer", PEOPLE), ("city", CITIES)), ("amount", "items")),
    ("staff", "badge", (("team", SERVICES), ("office", CITIES)), ("salary", "age")),
    ("sensors", "sensor", (("site", CITIES), ("colour", COLOURS)), ("reading", "battery")),
    ("builds", "build", (("project", SERVICES), ("author", PEOPLE)), ("seconds", "warnings")),
    ("tickets", "ticket", (("queue", SERVICES), ("owner", PEOPLE)), ("hours", "priority")),
)


def fresh_table(draw: Draw, *, rows: int | None = None) -> tuple[str, Table]:
    """Return a generated table and its name. Each row has an id, two groups, a text and two numbers."""
    name, key, groups, numbers = draw.pick(_THEMES)
    columns = [Column(key, "id"), *(Column(group, "group") for group, _ in groups)]
    columns += [Column("label", "text"), *(Column(number, "number") for number in numbers)]
    choices = [draw.sample(values, draw.between(3, 5)) for _, values in groups]
    keys = draw.sample(range(100, 1000), rows or draw.between(8, 24))
    made: list[TableRow] = [
        (
            number,
            *(draw.pick(values) for values in choices),
            f"{draw.pick(COLOURS)} {draw.fresh()}{draw.pick(['', '', ', spare'])}",
            draw.between(1, 500),
            draw.between(0, 60),
        )
        for number in keys
    ]
    return name, Table(tuple(columns), tuple(made))


def table_source(draw: Draw, place: str, given: DataFile | None) -> tuple[DataFile, Table, dict[str, str]]:
    """Return the file to work on, its table, and the initial files that it needs. The file is `given` if that is a
    table, or else a generated one.

    Raises `UnfitInputError` if the given table has no rows.
    """
    if given is not None and given.table is not None:
        if not given.table.rows:
            raise UnfitInputError("the table is empty")
        return given, given.table, {}
    name, table = fresh_table(draw)
    form = draw.pick(FORMS)
    source = DataFile(f"{place}/{name}.{form}", form, table)
    return source, table, {source.path: render(table, form)}


def table_check(path: str, form: str, table: Table) -> AnyCheck:
    """Return the check of a written table."""
    if form == "json":
        return Json(path, table.records())
    if form == "jsonl":
        return JsonLines(path, table.records())
    return Csv(path, table.cells(), "\t" if form == "tsv" else ",")


def reading(source: DataFile) -> str:
    """Return how a prompt refers to a part's input."""
    return f"`{source.path}` ({short(source.form)})"


def need(values: list[str], what: str) -> list[str]:
    """Return `values`, such as names of columns, unchanged. Raises `UnfitInputError` if the list is empty."""
    if not values:
        raise UnfitInputError(f"the table has no {what}")
    return values


@dataclass(frozen=True, slots=True)
class TableOp:
    """One operation: its prompt, Python code that changes `rows` (dictionaries) and `names`, and the expected table.

    `code` never contains the expected result; it computes the result from the files of the slot.
    """

    ask: str
    code: str
    table: Table


TableStep: TypeAlias = Callable[[Draw, Table], TableOp]


def table_family(step: TableStep) -> Build:
    """Return a function that builds task parts. Each part asks to read a table, apply the operation that `step` draws,
    and write the result as a table."""

    def build(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
        source, table, files = table_source(draw, place, given)
        op = step(draw, table)
        same = op.table == table  # if true, a copy of the input must not pass
        form = draw.pick([form for form in FORMS if not (same and form == source.form)])
        target = DataFile(f"{place}/{draw.fresh()}.{form}", form, op.table)
        ask = draw.pick(
            (
                f"Read {reading(source)}. {op.ask} Write the result to `{target.path}` as "
                f"{describe(form, op.table.names)}.",
                f"From {reading(source)} make `{target.path}`, {describe(form, op.table.names)}. {op.ask}",
                f"`{target.path}` should become {describe(form, op.table.names)}, made from "
                f"{reading(source)}. {op.ask}",
            )
        )
        code = (
            f"{READER}\nrows = read({source.path!r}, {source.form!r})\nnames = {table.names!r}\n{op.code}\n"
            f"write({target.path!r}, {form!r}, names, rows)"
        )
        check = table_check(target.path, form, op.table)
        return TaskPart(ask, python(code), (check,), files, output=target)

    return build


@dataclass(frozen=True, slots=True)
class ReportOp:
    """An operation whose result is one JSON value: Python code over `rows` that sets `result`."""

    ask: str
    code: str
    value: JSON


def report_family(step: Callable[[Draw, Table], ReportOp]) -> Build:
    """Return a function that builds task parts. Each part asks to read a table and write the JSON report that `step`
    draws."""

    def build(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
        source, table, files = table_source(draw, place, given)
        op = step(draw, table)
        target = f"{place}/{draw.fresh()}.json"
        ask = draw.pick(
            (
                f"Read {reading(source)} and write the JSON file `{target}`: {op.ask}",
                f"Make a report about {reading(source)} in `{target}`, as JSON: {op.ask}",
            )
        )
        code = (
            f"{READER}\nrows = read({source.path!r}, {source.form!r})\n{op.code}\n"
            f"json.dump(result, open({target!r}, 'w'))"
        )
        return TaskPart(ask, python(code), (Json(target, json.loads(json.dumps(op.value))),), files)

    return build
