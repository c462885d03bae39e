"""Tasks about SQLite databases. Python's `sqlite3` is sufficient to solve them.

Each function that returns a `TaskPart` builds one kind of task; its docstring, if any, describes the work that the task
asks for.
"""

# ruff: noqa: S608 all names in these queries come from words.py

from __future__ import annotations

from palaestra_suites.endless_terminals.checks.data_checks import Csv, Json
from palaestra_suites.endless_terminals.checks.program_checks import SqlQuery
from palaestra_suites.endless_terminals.families.table_operations import fresh_table, reading, table_source
from palaestra_suites.endless_terminals.family import DataFile, DataKind, Family, TaskPart, python
from palaestra_suites.endless_terminals.random_stream import Draw
from palaestra_suites.endless_terminals.tables import READER, Column, Table, TableRow, describe
from palaestra_suites.endless_terminals.words import PEOPLE

_OPEN = "import csv, json, sqlite3\ndb = sqlite3.connect({path!r})\n"


def _types(table: Table) -> str:
    """Return column definitions as SQL."""
    types = {"id": "INTEGER PRIMARY KEY", "number": "INTEGER"}
    return ", ".join(f"{column.name} {types.get(column.kind, 'TEXT')}" for column in table.columns)


def _filled(path: str, name: str, table: Table) -> str:
    """Return a shell script that creates a database with one table."""
    marks = ", ".join("?" for _ in table.columns)
    return f"mkdir -p {path.rpartition('/')[0]}\n" + python(
        f"{_OPEN.format(path=path)}db.execute('CREATE TABLE {name} ({_types(table)})')\n"
        f"db.executemany('INSERT INTO {name} VALUES ({marks})', {[list(row) for row in table.rows]!r})\ndb.commit()"
    )


def _row_lists(table: Table) -> list[list[int | str]]:
    return [list(row) for row in table.rows]


def imported(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Import a text table into a database, with its numbers as integers."""
    source, table, files = table_source(draw, place, given)
    path, name = f"{place}/{draw.fresh()}.db", f"{draw.fresh()}_rows"
    numbers = [f"`{column.name}`" for column in table.columns if column.kind in ("id", "number")]
    integers = f"; {', '.join(numbers)} as INTEGER, the others as TEXT" if numbers else "; all as TEXT"
    ask = (
        f"Load {reading(source)} into the new SQLite database `{path}`: a table `{name}` with the columns "
        f"{', '.join(f'`{column}`' for column in table.names)} in this order{integers}, and all rows."
    )
    columns = ", ".join(
        f"{column.name} {'INTEGER' if column.kind in ('id', 'number') else 'TEXT'}" for column in table.columns
    )
    code = (
        f"{READER}\n{_OPEN.format(path=path)}rows = read({source.path!r}, {source.form!r})\n"
        f"db.execute('CREATE TABLE {name} ({columns})')\n"
        f"db.executemany('INSERT INTO {name} VALUES ({', '.join('?' for _ in table.names)})', "
        "[list(row.values()) for row in rows])\ndb.commit()"
    )
    checks = (
        SqlQuery(path, f"SELECT {', '.join(table.names)} FROM {name}", _row_lists(table), False),
        SqlQuery(path, f"SELECT name FROM pragma_table_info('{name}') ORDER BY cid", [[c] for c in table.names]),
    )
    return TaskPart(ask, python(code), checks, files)


def queried(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Export the result of a grouped query over one table as CSV."""
    name, table = fresh_table(draw, rows=draw.between(15, 30))
    group, number = draw.pick(table.of_kind("group")), draw.pick(table.of_kind("number"))
    path = f"{place}/{draw.fresh()}.db"
    bound = draw.between(1, 200)
    groups: dict[str, list[int]] = {}
    for key, value in zip(table.values(group), table.values(number), strict=True):
        assert isinstance(value, int)
        groups.setdefault(str(key), []).append(value)
    rows: list[TableRow] = [(key, sum(v)) for key, v in sorted(groups.items()) if sum(v) >= bound]
    columns = (Column(group, "group"), Column("total", "number"))
    result = Table(columns, tuple(rows))
    target = DataFile(f"{place}/{draw.fresh()}.csv", "csv", result)
    ask = (
        f"The SQLite database `{path}` has a table `{name}` ({', '.join(table.names)}). Write `{target.path}`, "
        f"{describe('csv', result.names)}: for each `{group}` the sum of its `{number}` as `total`, only those "
        "with a "
        f"total of {bound} or more, sorted by `{group}`."
    )
    sql = f"SELECT {group}, sum({number}) AS t FROM {name} GROUP BY {group} HAVING t >= {bound} ORDER BY {group}"
    code = (
        f"{_OPEN.format(path=path)}with open({target.path!r}, 'w', newline='') as file:\n    out = csv.writer(file)\n"
        f"    out.writerow(['{group}', 'total'])\n    out.writerows(db.execute('{sql}'))"
    )
    initial = (SqlQuery(path, f"SELECT count(*) FROM {name}", [[len(table.rows)]]),)
    check = Csv(target.path, result.cells())
    return TaskPart(ask, python(code), (check,), setup=_filled(path, name, table), initial=initial, output=target)


def updated(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Update some rows and delete one."""
    name, table = fresh_table(draw, rows=draw.between(12, 24))
    group, number = draw.pick(table.of_kind("group")), draw.pick(table.of_kind("number"))
    key = table.of_kind("id")[0]
    path, amount = f"{place}/{draw.fresh()}.db", draw.between(5, 500)
    raised, dropped = draw.pick(table.rows)[table.at(group)], draw.pick(sorted(map(str, {*table.values(key)})))
    place_of = table.at(number)
    rows = [
        [*row[:place_of], int(row[place_of]) + amount * (row[table.at(group)] == raised), *row[place_of + 1 :]]
        for row in table.rows
        if str(row[table.at(key)]) != dropped
    ]
    ask = (
        f"In the table `{name}` of the SQLite database `{path}` add {amount} to `{number}` in every row whose "
        f"`{group}` is "
        f"`{raised}`, and delete the row whose `{key}` is {dropped}. All else stays."
    )
    code = (
        f"{_OPEN.format(path=path)}db.execute('UPDATE {name} SET {number} = {number} + {amount} WHERE {group} = ?', "
        f"[{raised!r}])\ndb.execute('DELETE FROM {name} WHERE {key} = {dropped}')\ndb.commit()"
    )
    columns = ", ".join(table.names)
    initial = (SqlQuery(path, f"SELECT {columns} FROM {name}", _row_lists(table), False),)
    final = (SqlQuery(path, f"SELECT {columns} FROM {name}", rows, False),)
    return TaskPart(ask, python(code), final, setup=_filled(path, name, table), initial=initial)


def joined(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Report rows of one table that are missing in another, and the number of rows of each owner, as JSON."""
    name, table = fresh_table(draw)
    key = table.of_kind("id")[0]
    ids = [int(value) for value in table.values(key)]
    some = draw.sample(ids, len(ids) // 2)
    owners = {number: draw.pick(PEOPLE) for number in some}
    path, target = f"{place}/{draw.fresh()}.db", f"{place}/{draw.fresh()}.json"
    other = Table((Column(key, "id"), Column("owner", "text")), tuple((number, owners[number]) for number in some))
    counts: dict[str, int] = {}
    for owner in owners.values():
        counts[owner] = counts.get(owner, 0) + 1
    value = {"without_owner": sorted({*ids} - {*some}), "rows_of_owner": counts}
    ask = (
        f"The SQLite database `{path}` has the tables `{name}` ({', '.join(table.names)}) and `owners` ({key}, "
        "owner). Write "
        f"`{target}`: a JSON object with `without_owner`, the sorted list of each `{key}` of `{name}` that `owners` "
        "does not "
        "have, and `rows_of_owner`, an object that maps each owner to the number of rows that belong to it."
    )
    code = (
        f"{_OPEN.format(path=path)}missing = db.execute('SELECT {key} FROM {name} WHERE {key} NOT IN '\n"
        f"    '(SELECT {key} FROM owners) ORDER BY 1')\ncounts = db.execute('SELECT owner, count(*) FROM owners GROUP "
        "BY 1')\n"
        "result = {'without_owner': [row[0] for row in missing], 'rows_of_owner': dict(counts)}\n"
        f"json.dump(result, open({target!r}, 'w'))"
    )
    setup = _filled(path, name, table) + _filled(path, "owners", other)
    initial = (SqlQuery(path, "SELECT count(*) FROM owners", [[len(some)]]),)
    return TaskPart(ask, python(code), (Json(target, value),), setup=setup, initial=initial)


def migrated(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Move a text column to a separate table that rows refer to."""
    name, table = fresh_table(draw)
    group, key = table.of_kind("group")[0], table.of_kind("id")[0]
    path, new = f"{place}/{draw.fresh()}.db", f"{group}_names"
    names = sorted({str(value) for value in table.values(group)})
    pairs = sorted([row[table.at(key)], row[table.at(group)]] for row in table.rows)
    ask = (
        f"In the SQLite database `{path}`, add a table `{new}` with the columns `id` (INTEGER PRIMARY KEY) and `name` "
        "(TEXT) that "
        f"holds each value of the column `{group}` of `{name}` once, with the ids 1, 2, 3 … in the sorted order of "
        "the names. "
        f"Give `{name}` a new INTEGER column `{group}_id` that holds the id of each row's `{group}`. The old columns "
        "stay."
    )
    code = (
        f"{_OPEN.format(path=path)}db.executescript('''CREATE TABLE {new} (id INTEGER PRIMARY KEY, name TEXT);\n"
        f"INSERT INTO {new} (name) SELECT DISTINCT {group} FROM {name} ORDER BY {group};\n"
        f"ALTER TABLE {name} ADD COLUMN {group}_id INTEGER;\n"
        f"UPDATE {name} SET {group}_id = (SELECT id FROM {new} n WHERE n.name = {name}.{group});''')\ndb.commit()"
    )
    checks = (
        SqlQuery(path, f"SELECT id, name FROM {new} ORDER BY id", [[n, word] for n, word in enumerate(names, 1)]),
        SqlQuery(
            path,
            f"SELECT {key}, n.name FROM {name} t JOIN {new} n ON n.id = t.{group}_id ORDER BY 1",
            pairs,
        ),
        SqlQuery(path, f"SELECT {', '.join(table.names)} FROM {name}", _row_lists(table), False),
    )
    initial = (SqlQuery(path, f"SELECT count(*) FROM {name}", [[len(table.rows)]]),)
    return TaskPart(ask, python(code), checks, setup=_filled(path, name, table), initial=initial)


FAMILIES = (
    Family("sqlite-import", imported, takes=(DataKind.TABLE,)),
    Family("sqlite-query", queried),
    Family("sqlite-update", updated),
    Family("sqlite-join", joined),
    Family("sqlite-migrate", migrated),
)
