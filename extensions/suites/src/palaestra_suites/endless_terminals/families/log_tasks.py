"""Tasks about logs: count, filter, merge and summarise.

Each function that returns a `TaskPart` builds one kind of task; its docstring, if any, describes the work that the task
asks for.
"""

from __future__ import annotations

from palaestra_suites.endless_terminals.checks.data_checks import Csv, Json
from palaestra_suites.endless_terminals.checks.file_checks import Lines
from palaestra_suites.endless_terminals.family import DataFile, Family, TaskPart, python
from palaestra_suites.endless_terminals.random_stream import Draw
from palaestra_suites.endless_terminals.tables import Column, Table, TableRow
from palaestra_suites.endless_terminals.words import LEVELS, NOUNS, SERVICES


def _service_log(draw: Draw, count: int) -> list[tuple[str, str, str, str]]:
    """Return records (time, level, service, message) of one day, sorted by time."""
    services = draw.sample(SERVICES, 4)
    return [
        (moment, draw.pick(LEVELS), draw.pick(services), draw.sentence(NOUNS, 2, 5))
        for moment in draw.instants(count, draw.date())
    ]


def _log_text(records: list[tuple[str, str, str, str]]) -> str:
    return "".join(f"{moment} {level} [{service}] {message}\n" for moment, level, service, message in records)


_FORM = "`TIME LEVEL [SERVICE] MESSAGE`, TIME as YYYY-MM-DDTHH:MM:SS"


def level_counts(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    records = _service_log(draw, draw.between(30, 60))
    log, target = f"{place}/{draw.fresh()}.log", f"{place}/{draw.fresh()}.json"
    value: dict[str, dict[str, int]] = {}
    for _, level, service, _ in records:
        counts = value.setdefault(service, {})
        counts[level] = counts.get(level, 0) + 1
    ask = (
        f"The lines of `{log}` have the form {_FORM}. Count them: `{target}` is a JSON object that maps each service "
        "to an "
        "object that maps each level to its number of lines. Levels that a service never logged are left out."
    )
    code = (
        f"import json, re\nresult = {{}}\nfor line in open({log!r}):\n"
        "    level, service = re.match(r'\\S+ (\\S+) \\[(\\w+)\\]', line).groups()\n"
        "    counts = result.setdefault(service, {})\n    counts[level] = counts.get(level, 0) + 1\n"
        f"json.dump(result, open({target!r}, 'w'))"
    )
    return TaskPart(ask, python(code), (Json(target, value),), {log: _log_text(records)})


def between_times(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    records = _service_log(draw, 60)
    first, last = sorted(draw.sample(range(5, 55), 2))
    start, end = records[first][0], records[last][0]
    level = draw.pick(LEVELS)
    log = f"{place}/{draw.fresh()}.log"
    records[first] = (start, level, *records[first][2:])  # so that at least one record has this level
    found = [f"{r[0]} {r[1]} [{r[2]}] {r[3]}" for r in records[first : last + 1] if r[1] == level]
    target = DataFile(f"{place}/{draw.fresh()}.log", "lines", lines=tuple(found))
    ask = (
        f"`{log}` has lines of the form {_FORM}. Copy the lines of level {level} from {start} to {end}, both times "
        "included, "
        f"to `{target.path}`, unchanged and in their order."
    )
    solution = f"awk -v a={start} -v b={end} '$1 >= a && $1 <= b && $2 == \"{level}\"' {log} > {target.path}\n"
    return TaskPart(ask, solution, (Lines(target.path, found),), {log: _log_text(records)}, output=target)


def merged_logs(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    records = _service_log(draw, 36)
    hosts = draw.words(3)
    owners = [draw.pick(hosts) for _ in records]
    files = {
        f"{place}/{host}.log": _log_text(
            [record for record, owner in zip(records, owners, strict=True) if owner == host]
        )
        for host in hosts
    }
    merged = [f"{r[0]} {host} {r[1]} [{r[2]}] {r[3]}" for r, host in zip(records, owners, strict=True)]
    target = DataFile(f"{place}/{draw.fresh()}.log", "lines", lines=tuple(merged))
    names = ", ".join(f"`{place}/{host}.log`" for host in hosts)
    ask = (
        f"{names} are the logs of three hosts, with lines of the form {_FORM}; no two lines have the same time. Merge "
        "them "
        f"into `{target.path}`, ordered by time, each line as `TIME HOST LEVEL [SERVICE] MESSAGE`, where HOST is the "
        "name "
        "of its file without `.log`."
    )
    solution = (
        f'cd {place}\nfor h in {" ".join(hosts)}; do sed "s/ / $h /" $h.log; done | LC_ALL=C sort > merged.tmp\n'
        f"mv merged.tmp {target.path.removeprefix(place + '/')}\n"
    )
    return TaskPart(ask, solution, (Lines(target.path, merged),), files, output=target)


def _access_log(draw: Draw, count: int) -> list[tuple[str, str, str, str, int, int, int]]:
    """Return records (address, time, method, path, status, bytes, milliseconds)."""
    addresses = [f"10.{draw.between(0, 9)}.{draw.between(0, 99)}.{draw.between(1, 254)}" for _ in range(5)]
    paths = [f"/{word}" for word in draw.words(4)] + [f"/{draw.fresh()}/{draw.fresh()}"]
    return [
        (
            draw.pick(addresses), moment, draw.pick(["GET", "GET", "GET", "POST", "DELETE"]), draw.pick(paths),
            draw.pick([200, 200, 200, 201, 301, 404, 404, 500, 503]), draw.between(100, 9000), draw.between(1, 2000),
        )
        for moment in draw.instants(count, draw.date())
    ]  # fmt: skip


def _access_text(records: list[tuple[str, str, str, str, int, int, int]]) -> str:
    return "".join(f'{a} [{t}] "{m} {p}" {s} {b} {ms}\n' for a, t, m, p, s, b, ms in records)


_ACCESS = '`ADDRESS [TIME] "METHOD PATH" STATUS BYTES MILLISECONDS`'
_ACCESS_PATTERN = r"""(\S+) \[(\S+)\] "(\S+) (\S+)" (\d+) (\d+) (\d+)"""


def busiest(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    records = _access_log(draw, draw.between(40, 70))
    column, name = draw.pick(((0, "address"), (3, "path"), (4, "status")))
    counts: dict[str, int] = {}
    for record in records:
        counts[str(record[column])] = counts.get(str(record[column]), 0) + 1
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    log, target = f"{place}/{draw.fresh()}.log", f"{place}/{draw.fresh()}.txt"
    found = [f"{number} {key}" for key, number in ranked]
    ask = (
        f"`{log}` is an access log with lines of the form {_ACCESS}. Count the requests for each {name} and write "
        "them to "
        f"`{target}` as `COUNT {name.upper()}` (one blank between), highest count first, equal counts in byte order "
        "of the "
        f"{name} (as `LC_ALL=C sort`)."
    )
    code = (
        f"import re\ncounts = {{}}\nfor line in open({log!r}):\n"
        f"    key = re.match({_ACCESS_PATTERN!r}, line).group({column + 1})\n    counts[key] = counts.get(key, 0) + 1\n"
        f"with open({target!r}, 'w') as file:\n"
        "    for key, n in sorted(counts.items(), key=lambda kv: (-kv[1], kv[0])):\n        print(n, key, file=file)"
    )
    output = DataFile(target, "lines", lines=tuple(found))
    return TaskPart(ask, python(code), (Lines(target, found),), {log: _access_text(records)}, output=output)


def slowest(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    records = _access_log(draw, draw.between(30, 60))
    paths = sorted({record[3] for record in records})
    rows: list[TableRow] = []
    for path in paths:
        own = [record for record in records if record[3] == path]
        rows.append((path, len(own), sum(r[5] for r in own), max(r[6] for r in own), sum(r[4] >= 500 for r in own)))
    numbers = ("requests", "bytes", "slowest", "errors")
    columns = (Column("path", "text"), *(Column(name, "number") for name in numbers))
    log = f"{place}/{draw.fresh()}.log"
    result = Table(columns, tuple(rows))
    target = DataFile(f"{place}/{draw.fresh()}.csv", "csv", result)
    ask = (
        f"Summarise the access log `{log}`, whose lines have the form {_ACCESS}, in `{target.path}`: CSV with the "
        "header "
        "line `path,requests,bytes,slowest,errors` and one row for each path, sorted by path in byte order: how many "
        "requests it had, the sum of their bytes, the largest milliseconds, and how many had a status of 500 or more."
    )
    code = (
        f"import csv, re\npaths = {{}}\nfor line in open({log!r}):\n"
        f"    g = re.match({_ACCESS_PATTERN!r}, line).groups()\n"
        "    paths.setdefault(g[3], []).append((int(g[4]), int(g[5]), int(g[6])))\n"
        f"with open({target.path!r}, 'w', newline='') as file:\n    writer = csv.writer(file)\n"
        "    writer.writerow(['path', 'requests', 'bytes', 'slowest', 'errors'])\n"
        "    for path, v in sorted(paths.items()):\n"
        "        writer.writerow([path, len(v), sum(r[1] for r in v), max(r[2] for r in v), sum(r[0] >= 500 for r in "
        "v)])"
    )
    return TaskPart(ask, python(code), (Csv(target.path, result.cells()),), {log: _access_text(records)}, output=target)


def sessions(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Pair the starts of sessions with their ends; one session has no end."""
    names = draw.words(draw.between(5, 8))
    day = draw.date()
    moments = draw.instants(2 * len(names), day)
    events: list[tuple[str, str, str]] = []
    spans: dict[str, int] = {}
    order = draw.shuffled([name for name in names for _ in range(2)])
    opened: dict[str, str] = {}
    for moment, name in zip(moments, order, strict=True):
        if name not in opened:
            opened[name] = moment
            events.append((moment, "start", name))
        elif name != names[0]:  # the session of the first name never ends
            events.append((moment, "end", name))
            spans[name] = _seconds(moment) - _seconds(opened[name])
    log, target = f"{place}/{draw.fresh()}.log", f"{place}/{draw.fresh()}.json"
    text = "".join(f"{moment} session {what} id={name}\n" for moment, what, name in events)
    value = {"durations": spans, "open": [names[0]]}
    ask = (
        f"The lines of `{log}` are `TIME session start id=NAME` and `TIME session end id=NAME`, in order of time, all "
        "on one "
        f"day. Write `{target}`: a JSON object whose `durations` maps the name of each ended session to its seconds "
        "from "
        "start to end, and whose `open` is the sorted list of the names that never ended."
    )
    code = (
        f"import datetime, json\nstart, durations = {{}}, {{}}\nfor line in open({log!r}):\n"
        "    moment, _, what, name = line.split()\n    moment = datetime.datetime.fromisoformat(moment)\n"
        "    name = name[3:]\n    if what == 'start':\n        start[name] = moment\n    else:\n"
        "        durations[name] = int((moment - start.pop(name)).total_seconds())\n"
        f"json.dump({{'durations': durations, 'open': sorted(start)}}, open({target!r}, 'w'))"
    )
    return TaskPart(ask, python(code), (Json(target, value),), {log: text})


def _seconds(moment: str) -> int:
    hours, minutes, seconds = map(int, moment.partition("T")[2].split(":"))
    return 3600 * hours + 60 * minutes + seconds


FAMILIES = (
    Family("log-levels", level_counts),
    Family("log-window", between_times),
    Family("log-merge", merged_logs),
    Family("log-busiest", busiest),
    Family("log-paths", slowest),
    Family("log-sessions", sessions),
)
