"""Tasks about tables in CSV, TSV, JSON and JSON lines: select, sort, group, join, convert and summarise.

Each public function builds one kind of task; its docstring, if any, describes the work that the task asks for.
"""

from __future__ import annotations

from palaestra_suites.endless_terminals.checks.all_checks import AnyCheck
from palaestra_suites.endless_terminals.checks.data_checks import Csv
from palaestra_suites.endless_terminals.checks.file_checks import Files
from palaestra_suites.endless_terminals.families.table_operations import (
    ReportOp,
    TableOp,
    fresh_table,
    need,
    reading,
    report_family,
    table_family,
    table_source,
)
from palaestra_suites.endless_terminals.family import Build, DataFile, DataKind, Family, TaskPart, python
from palaestra_suites.endless_terminals.random_stream import Draw
from palaestra_suites.endless_terminals.tables import READER, Column, Table, TableRow, Value, describe, render
from palaestra_suites.endless_terminals.words import PEOPLE


def _as_int(value: Value) -> int:
    assert isinstance(value, int)
    return value


def above(draw: Draw, table: Table) -> TableOp:
    """Keep the rows whose number is at least a bound."""
    name = draw.pick(need(table.of_kind("number"), "numbers"))
    values = sorted(map(_as_int, table.values(name)))
    bound = values[draw.below(len(values))]
    place = table.at(name)
    kept = [row for row in table.rows if _as_int(row[place]) >= bound]
    return TableOp(
        f"Keep only the rows whose `{name}` is {bound} or more, with all columns, in the order they have now.",
        f"rows = [row for row in rows if row[{name!r}] >= {bound}]",
        table.with_rows(kept),
    )


def matching(draw: Draw, table: Table) -> TableOp:
    name = draw.pick(need(table.of_kind("group"), "groups"))
    wanted = draw.pick(table.values(name))
    place = table.at(name)
    without = draw.chance(50)
    kept = [row for row in table.rows if (row[place] == wanted) != without]
    verb = "Drop" if without else "Keep only"
    sign = "!=" if without else "=="
    return TableOp(
        f"{verb} the rows whose `{name}` is `{wanted}`; all columns stay, and so does the order of the rows.",
        f"rows = [row for row in rows if row[{name!r}] {sign} {wanted!r}]",
        table.with_rows(kept),
    )


def ordered(draw: Draw, table: Table) -> TableOp:
    key = draw.pick(need(table.of_kind("id"), "ids"))
    name = draw.pick(need(table.of_kind("number"), "numbers"))
    place, tie = table.at(name), table.at(key)
    rows = sorted(table.rows, key=lambda row: (-_as_int(row[place]), _as_int(row[tie])))
    return TableOp(
        f"Sort all rows by `{name}`, largest first, and rows with the same `{name}` by `{key}`, smallest first.",
        f"rows.sort(key=lambda row: (-row[{name!r}], row[{key!r}]))",
        table.with_rows(rows),
    )


def top(draw: Draw, table: Table) -> TableOp:
    whole = ordered(draw, table)
    count = draw.between(2, 5)
    return TableOp(
        f"{whole.ask} Then keep only the first {count} rows.",
        f"{whole.code}\nrows = rows[:{count}]",
        table.with_rows(list(whole.table.rows[:count])),
    )


def grouped(draw: Draw, table: Table) -> TableOp:
    group = draw.pick(need(table.of_kind("group"), "groups"))
    number = draw.pick(need(table.of_kind("number"), "numbers"))
    groups: dict[str, list[int]] = {}
    for key, value in zip(table.values(group), table.values(number), strict=True):
        groups.setdefault(str(key), []).append(_as_int(value))
    word, code, result = draw.pick(
        (
            ("sum", "sum(v)", {key: sum(v) for key, v in groups.items()}),
            ("largest value", "max(v)", {key: max(v) for key, v in groups.items()}),
            ("smallest value", "min(v)", {key: min(v) for key, v in groups.items()}),
        )
    )
    columns = (Column(group, "group"), Column("rows", "number"), Column("total", "number"))
    rows: list[TableRow] = [(key, len(groups[key]), result[key]) for key in sorted(groups)]
    return TableOp(
        f"For each `{group}` there is one row with `{group}`, `rows` (how many rows it has) and `total` (the {word} of "
        f"its `{number}`), sorted by `{group}`.",
        f"groups = {{}}\nfor row in rows:\n    groups.setdefault(row[{group!r}], []).append(row[{number!r}])\n"
        f"rows = [{{{group!r}: k, 'rows': len(v), 'total': {code}}} for k, v in sorted(groups.items())]\n"
        f"names = [{group!r}, 'rows', 'total']",
        Table(columns, tuple(rows)),
    )


def projected(draw: Draw, table: Table) -> TableOp:
    kept = draw.sample(table.names, min(len(table.names), draw.between(2, 3)))
    renamed = f"{kept[-1]}_{draw.fresh()}"
    kinds = {column.name: column.kind for column in table.columns}
    columns = tuple(Column(renamed if name == kept[-1] else name, kinds[name]) for name in kept)
    rows: list[TableRow] = [tuple(row[table.at(name)] for name in kept) for row in table.rows]
    names = [column.name for column in columns]
    return TableOp(
        f"Take only the columns {', '.join(f'`{name}`' for name in kept)}, in this order, and rename `{kept[-1]}` to "
        f"`{renamed}`. All rows stay, in the order they have.",
        f"names = {names!r}\nrows = [dict(zip(names, (row[name] for name in {kept!r}))) for row in rows]",
        Table(columns, tuple(rows)),
    )


def converted(draw: Draw, table: Table) -> TableOp:
    return TableOp("Convert it: the same rows in the same order, every column kept.", "", table)


def computed(draw: Draw, table: Table) -> TableOp:
    numbers = need(table.of_kind("number"), "numbers")
    first, second = draw.pick(numbers), draw.pick(numbers)
    factor = draw.between(2, 9)
    name = f"{draw.fresh()}_score"
    a, b = table.at(first), table.at(second)
    rows: list[TableRow] = [(*row, _as_int(row[a]) * factor + _as_int(row[b])) for row in table.rows]
    return TableOp(
        f"Add a last column `{name}` that holds {factor} times `{first}` plus `{second}`; the rows keep their order.",
        f"for row in rows:\n    row[{name!r}] = {factor} * row[{first!r}] + row[{second!r}]\nnames.append({name!r})",
        Table((*table.columns, Column(name, "number")), tuple(rows)),
    )


def deduplicated(draw: Draw, table: Table) -> TableOp:
    name = draw.pick(need(table.of_kind("group"), "groups"))
    last = draw.chance(50)
    place = table.at(name)
    kept: dict[Value, TableRow] = {}
    for row in table.rows[::-1] if last else table.rows:
        kept.setdefault(row[place], row)
    rows = [row for row in table.rows if kept[row[place]] is row]
    which = "last" if last else "first"
    step = "reversed(rows)" if last else "rows"
    return TableOp(
        f"Of the rows that share a `{name}` keep only the {which} one; the rows that stay keep their order.",
        f"kept = {{}}\nfor row in {step}:\n    kept.setdefault(row[{name!r}], row)\n"
        f"rows = [row for row in rows if kept[row[{name!r}]] is row]",
        table.with_rows(rows),
    )


def summary(draw: Draw, table: Table) -> ReportOp:
    name = draw.pick(need(table.of_kind("number"), "numbers"))
    values = sorted(map(_as_int, table.values(name)))
    value = {"count": len(values), "sum": sum(values), "min": values[0], "max": values[-1]}
    return ReportOp(
        f"one object with the keys `count`, `sum`, `min` and `max` of the column `{name}`, as numbers.",
        f"v = [row[{name!r}] for row in rows]\n"
        "result = {'count': len(v), 'sum': sum(v), 'min': min(v), 'max': max(v)}",
        value,
    )


def cross_count(draw: Draw, table: Table) -> ReportOp:
    group = draw.pick(need(table.of_kind("group"), "groups"))
    other = draw.pick(need([name for name in table.of_kind("group", "id") if name != group], "second group"))
    value: dict[str, dict[str, int]] = {}
    for a, b in zip(table.values(group), table.values(other), strict=True):
        inner = value.setdefault(str(a), {})
        inner[str(b)] = inner.get(str(b), 0) + 1
    return ReportOp(
        f"an object with one key for each `{group}`, whose value is an object that counts its rows by `{other}` "
        "(keys are strings; combinations that do not occur are left out).",
        f"result = {{}}\nfor row in rows:\n    inner = result.setdefault(str(row[{group!r}]), {{}})\n"
        f"    inner[str(row[{other!r}])] = inner.get(str(row[{other!r}]), 0) + 1",
        value,
    )


def joined(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Join with a second table that lacks some groups; the rows of those groups are dropped."""
    source, table, files = table_source(draw, place, given)
    group = draw.pick(need(table.of_kind("group"), "groups"))
    known = sorted({str(value) for value in table.values(group)})
    keys = draw.shuffled(known)[: max(1, len(known) - 1)]
    managers = {key: draw.pick(PEOPLE) for key in [*keys, draw.fresh().title()]}
    lookup = f"{place}/{draw.fresh()}.csv"
    target, key_name, value_name = f"{place}/{draw.fresh()}.csv", draw.fresh(), draw.fresh()
    rows = [[*map(str, row), managers[str(row[table.at(group)])]] for row in table.rows if row[table.at(group)] in keys]
    names = [*table.names, value_name]
    text = f"{key_name},{value_name}\n" + "".join(f"{key},{value}\n" for key, value in managers.items())
    ask = (
        f"Join {reading(source)} with `{lookup}` (CSV): `{group}` of the first is `{key_name}` of the second. Write "
        f"`{target}`, {describe('csv', names)}: the rows of the first file in their order, each with the "
        f"`{value_name}` that belongs to its `{group}`; rows whose `{group}` is not in `{lookup}` are left out."
    )
    code = (
        f"{READER}\nknown = {{row[{key_name!r}]: row[{value_name!r}] for row in read({lookup!r}, 'csv')}}\n"
        f"rows = [{{**row, {value_name!r}: known[row[{group!r}]]}} for row in read({source.path!r}, {source.form!r})"
        f" if row[{group!r}] in known]\nwrite({target!r}, 'csv', {names!r}, rows)"
    )
    return TaskPart(ask, python(code), (Csv(target, [names, *rows]),), {**files, lookup: text})


def partitioned(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Split a table into one file per value of a group."""
    source, table, files = table_source(draw, place, given)
    group = draw.pick(need(table.of_kind("group"), "groups"))
    folder = f"{place}/by-{group}"
    parts: dict[str, list[TableRow]] = {}
    for row in table.rows:
        parts.setdefault(str(row[table.at(group)]), []).append(row)
    checks: tuple[AnyCheck, ...] = (
        Files(folder, dict.fromkeys(sorted(f"{key}.csv" for key in parts), None)),
        *(Csv(f"{folder}/{key}.csv", table.with_rows(parts[key]).cells()) for key in sorted(parts)),
    )
    ask = (
        f"Split {reading(source)} by `{group}`: the new directory `{folder}` gets one CSV file for each value, named "
        f"after it (`VALUE.csv`), with the header line `{','.join(table.names)}` and the rows of that value in their "
        f"order. Nothing else may be in `{folder}`."
    )
    code = (
        f"{READER}\nimport os\nos.makedirs({folder!r}, exist_ok=True)\ngroups = {{}}\n"
        f"for row in read({source.path!r}, {source.form!r}):\n    groups.setdefault(row[{group!r}], []).append(row)\n"
        f"for key, rows in groups.items():\n    write(f'{folder}/{{key}}.csv', 'csv', {table.names!r}, rows)"
    )
    return TaskPart(ask, python(code), checks, files)


def unioned(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Combine the shards of one table, sorted by id."""
    _, table = fresh_table(draw)
    key = table.of_kind("id")[0]
    rows = draw.shuffled(table.rows)
    count = draw.between(2, 4)
    shards = {
        f"{place}/shards/part-{number}.csv": render(table.with_rows(rows[number::count]), "csv")
        for number in range(count)
    }
    whole = table.with_rows(sorted(table.rows))
    target = DataFile(f"{place}/{draw.fresh()}.csv", "csv", whole)
    ask = (
        f"The CSV files in `{place}/shards` have the same header line. Put all their rows into one file "
        f"`{target.path}`, {describe('csv', table.names)}, sorted by `{key}` as a number, smallest first."
    )
    code = (
        f"{READER}\nimport glob\nrows = [row for path in glob.glob('{place}/shards/*.csv') "
        f"for row in read(path, 'csv')]\nrows.sort(key=lambda row: row[{key!r}])\n"
        f"write({target.path!r}, 'csv', {table.names!r}, rows)"
    )
    return TaskPart(ask, python(code), (Csv(target.path, whole.cells()),), shards, output=target)


def _takes_table(name: str, build: Build) -> Family:
    return Family(name, build, takes=(DataKind.TABLE,))


FAMILIES = (
    _takes_table("table-above", table_family(above)),
    _takes_table("table-matching", table_family(matching)),
    _takes_table("table-sort", table_family(ordered)),
    _takes_table("table-top", table_family(top)),
    _takes_table("table-group", table_family(grouped)),
    _takes_table("table-project", table_family(projected)),
    _takes_table("table-convert", table_family(converted)),
    _takes_table("table-compute", table_family(computed)),
    _takes_table("table-deduplicate", table_family(deduplicated)),
    _takes_table("table-summary", report_family(summary)),
    _takes_table("table-cross-count", report_family(cross_count)),
    _takes_table("table-join", joined),
    _takes_table("table-partition", partitioned),
    Family("table-union", unioned),
)
