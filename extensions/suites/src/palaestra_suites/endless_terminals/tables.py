"""Small tables with typed columns. This module renders tables as text in four formats, and contains the Python code
that solutions use to read and write them.

Values are integers, or text that never looks like a number, so a column has the same meaning in every format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeAlias

from palaestra_slots.core.types import JSON

Value: TypeAlias = int | str
TableRow: TypeAlias = tuple[Value, ...]

FORMS = ("csv", "tsv", "json", "jsonl")


@dataclass(frozen=True, slots=True)
class Column:
    """A named column. `kind` is id (unique), group (few values), number or text."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Table:
    """The columns of a table, and its rows."""

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def of_kind(self, *kinds: str) -> list[str]:
        """Return the names of the columns of these kinds."""
        return [column.name for column in self.columns if column.kind in kinds]

    def at(self, name: str) -> int:
        """Return the index of a column."""
        return self.names.index(name)

    def values(self, name: str) -> list[Value]:
        """Return the values of a column."""
        place = self.at(name)
        return [row[place] for row in self.rows]

    def with_rows(self, rows: list[TableRow]) -> Table:
        """Return a table with the same columns and these rows."""
        return Table(self.columns, tuple(rows))

    def records(self) -> list[dict[str, JSON]]:
        """Return the rows as objects."""
        return [dict(zip(self.names, row, strict=True)) for row in self.rows]

    def cells(self) -> list[list[str]]:
        """Return the header and the rows as text."""
        return [self.names, *([str(value) for value in row] for row in self.rows)]


def render(table: Table, form: str) -> str:
    """Return the text of a table in one format, with a final newline."""
    if form == "json":
        return json.dumps(table.records(), indent=2) + "\n"
    if form == "jsonl":
        return "".join(json.dumps(record) + "\n" for record in table.records())
    cells = table.cells()
    if form == "tsv":
        return "".join("\t".join(row) + "\n" for row in cells)
    return "".join(",".join(map(_quoted, row)) + "\n" for row in cells)


def _quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if any(c in cell for c in ',"\n') else cell


def describe(form: str, names: list[str]) -> str:
    """Return the description of a format for a prompt."""
    fields = ", ".join(f"`{name}`" for name in names)
    if form == "json":
        return f"a JSON array of objects with the keys {fields} (numbers as JSON numbers)"
    if form == "jsonl":
        return f"JSON lines, one object per line, with the keys {fields} (numbers as JSON numbers)"
    kind = "tab-separated values" if form == "tsv" else "CSV"
    separator = "\t" if form == "tsv" else ","
    header = separator.join(names).replace("\t", "<TAB>")
    return f"{kind} with the header line `{header}`"


def short(form: str) -> str:
    """Return the short name of a format for a prompt."""
    return {"csv": "CSV", "tsv": "tab-separated", "json": "JSON", "jsonl": "JSON lines"}[form]


READER = """
import csv, json, re, sys

def value(text):
    return int(text) if isinstance(text, str) and re.fullmatch(r"-?[0-9]+", text) else text

def read(path, form):
    with open(path, newline="") as file:
        if form == "json":
            rows = json.load(file)
        elif form == "jsonl":
            rows = [json.loads(line) for line in file if line.strip()]
        else:
            rows = list(csv.DictReader(file, delimiter="\\t" if form == "tsv" else ","))
    return [{key: value(cell) for key, cell in row.items()} for row in rows]

def write(path, form, names, rows):
    with open(path, "w", newline="") as file:
        if form == "json":
            json.dump(rows, file)
        elif form == "jsonl":
            file.writelines(json.dumps(row) + "\\n" for row in rows)
        else:
            writer = csv.DictWriter(file, names, delimiter="\\t" if form == "tsv" else ",", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
"""
"""Code for solutions: `read(path, form)` returns a list of dictionaries, and `write(path, form, names, rows)` saves
one."""
