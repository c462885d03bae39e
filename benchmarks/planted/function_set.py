"""Function environments: one file for each set, with a check for each task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planted.planted_task import Edit, PlantedTask, fault

_HEAD = '''"""Small jobs of an office, each with a check of its own."""

import json

from palaestra import Task, WorkError, environment
from palaestra.grading import run_tests

TASKS, CHECKS = [], {}


def job(name, prompt, check, **fields):
    TASKS.append(Task(id=name, prompt=prompt, **fields))
    CHECKS[name] = check


async def returns(sandbox, function, cases):
    """Whether a function of the work returns these values."""
    try:
        return all([await sandbox.call(function, list(given)) == right for given, right in cases])
    except WorkError:
        return False


async def read_json(sandbox, path):
    try:
        return json.loads(await sandbox.read_text(path, missing=""))
    except ValueError:
        return None


@environment(toolsets=["terminal"])
def office():
    yield from TASKS


@office.score
async def right(task, sandbox):
    return await CHECKS[task.id](task, sandbox)
'''

_SOUND = {
    "median": '''
async def median(task, sandbox):
    cases = [([3, 1, 2], 2), ([4, 1, 3, 2], 2.5), ([7], 7), ([-5, -1, -3], -3), ([2, 2, 9, 9], 5.5), ([10, 0], 5), ([1, 1, 1, 8], 1), ([30, 10, 20, 50, 40], 30)]
    return await returns(sandbox, "stats:median", [([values], value) for values, value in cases])

job(
    "median", "median() in stats.py is wrong: it must return the middle value of a non-empty list of numbers in any "
    "order, and the mean of the two middle values if their number is even. Fix it.", median,
    files={"stats.py": "def median(values):\\n    return values[len(values) // 2]\\n"},
    solution="""cat > stats.py <<'END'
def median(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
END""",
)
''',
    "roman": '''
async def roman(task, sandbox):
    cases = [(1, "I"), (2, "II"), (3, "III"), (4, "IV"), (9, "IX"), (14, "XIV"), (40, "XL"), (58, "LVIII"), (90, "XC"), (400, "CD"), (900, "CM"), (1994, "MCMXCIV"), (2421, "MMCDXXI"), (3888, "MMMDCCCLXXXVIII"), (3999, "MMMCMXCIX")]
    return await returns(sandbox, "roman:to_roman", [([number], text) for number, text in cases])

job(
    "roman", "Write roman.py with a function to_roman(number) that returns the Roman numeral of a whole number from 1 "
    "to 3999 in capital letters and in the usual subtractive form (4 is IV, 900 is CM).", roman,
    solution="""cat > roman.py <<'END'
PARTS = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]


def to_roman(number):
    text = ""
    for value, letters in PARTS:
        while number >= value:
            text += letters
            number -= value
    return text
END""",
)
''',
    "sales": '''
async def sales(task, sandbox):
    return await read_json(sandbox, "totals.json") == task.answer

job(
    "sales", "sales.csv has the columns customer, region and amount; the amounts have two decimals. Write totals.json: "
    "an object that maps each region to the sum of its amounts in cents, as whole numbers.", sales,
    files={"sales.csv": 'customer,region,amount\\n"Ada, Ltd",north,10.10\\nBo,south,0.29\\n"Cy ""C"" Co",north,19.99\\nDee,west,7.00\\n"Eve, Inc",south,1234.56\\nFay,west,0.07\\n'},
    solution="""python3 - <<'END'
import collections
import csv
import json

totals = collections.Counter()
with open("sales.csv", newline="") as file:
    for row in csv.DictReader(file):
        totals[row["region"]] += round(float(row["amount"]) * 100)
with open("totals.json", "w") as file:
    json.dump(totals, file)
END""",
    answer={"north": 3009, "south": 123485, "west": 707},
)
''',
    "leap-days": '''
LEAP_TESTS = """
from calendar_days import leap_days


def test_one_year():
    assert leap_days("2024-01-01", "2024-12-31") == 1
    assert leap_days("2023-01-01", "2023-12-31") == 0


def test_ends_belong():
    assert leap_days("2024-02-29", "2024-02-29") == 1
    assert leap_days("2024-03-01", "2028-02-28") == 0
    assert leap_days("2024-03-01", "2028-02-29") == 1


def test_centuries():
    assert leap_days("1896-01-01", "1905-01-01") == 2
    assert leap_days("1996-01-01", "2004-12-31") == 3
    assert leap_days("2096-01-01", "2104-12-31") == 2


def test_no_days():
    assert leap_days("2024-03-01", "2024-02-01") == 0
"""
LEAP = """import datetime


def leap_days(first, last):
    start, end = datetime.date.fromisoformat(first), datetime.date.fromisoformat(last)
    count = 0
    for year in range(start.year, end.year + 1):
        if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0):
            if start <= datetime.date(year, 2, 29) <= end:
                count += 1
    return count
"""

async def leap(task, sandbox):
    return (await run_tests(sandbox, LEAP_TESTS, reference={"calendar_days.py": LEAP})).score()

job(
    "leap-days", "Write calendar_days.py with a function leap_days(first, last). Both arguments are dates such as "
    "'2024-01-31' of the Gregorian calendar. It returns how many 29ths of February lie between them, where both dates "
    "belong to the period. If last is before first, it returns 0.", leap,
    solution=f"cat > calendar_days.py <<'END'\\n{LEAP}END",
)
''',
    "intervals": '''
INTERVAL_TESTS = """
import intervals


def test_overlap():
    assert intervals.merge([[1, 3], [2, 6], [8, 10]]) == [[1, 6], [8, 10]]


def test_touching():
    assert intervals.merge([[1, 4], [4, 5]]) == [[1, 5]]
    assert intervals.merge([[1, 4], [5, 6]]) == [[1, 4], [5, 6]]


def test_order_and_nesting():
    assert intervals.merge([[5, 6], [1, 9], [2, 3]]) == [[1, 9]]
    assert intervals.merge([[7, 8], [1, 2]]) == [[1, 2], [7, 8]]
    assert intervals.merge([[1, 10], [2, 3], [4, 12]]) == [[1, 12]]


def test_few():
    assert intervals.merge([]) == []
    assert intervals.merge([[3, 3]]) == [[3, 3]]


def test_input_stays():
    given = [[1, 3], [2, 6]]
    intervals.merge(given)
    assert given == [[1, 3], [2, 6]]
"""
INTERVALS = """def merge(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
"""

async def merged(task, sandbox):
    return (await run_tests(sandbox, INTERVAL_TESTS, reference={"intervals.py": INTERVALS})).score()

job(
    "intervals", "Write intervals.py with a function merge(intervals). It gets a list of [start, end] lists of whole "
    "numbers with start <= end, in any order, and returns a new list in ascending order in which intervals that "
    "overlap or share an end point are one. It must not change its argument.", merged,
    solution=f"cat > intervals.py <<'END'\\n{INTERVALS}END",
)
''',
    "log-levels": """
async def levels(task, sandbox):
    text = await sandbox.read_text("levels.txt", missing="")
    return [line.split() for line in text.splitlines()] == [["ERROR", "3"], ["INFO", "4"], ["WARNING", "2"]]

job(
    "log-levels", "Count the entries of app.log by their level, the second word of a line. Lines that begin with a "
    "blank continue the entry before them and do not count. Write levels.txt: one line for each level that occurs, "
    "with the level, one blank and the number, in alphabetical order.", levels,
    files={"app.log": "09:00 INFO start\\n09:01 WARNING disk ERROR soon\\n09:02 ERROR no disk\\n  at ERROR write()\\n  at INFO main()\\n09:03 INFO retry\\n09:04 ERROR no disk\\n09:05 WARNING INFO is off\\n09:06 INFO retry\\n09:07 ERROR give up\\n09:08 INFO end\\n"},
    solution="grep -v '^ ' app.log | awk '{ n[$2]++ } END { for (l in n) print l, n[l] }' | LC_ALL=C sort > levels.txt",
)
""",
    "slug": '''
async def slugs(task, sandbox):
    cases = [("Hello, World!", "hello-world"), ("  two  blanks ", "two-blanks"), ("A1b2", "a1b2"), ("--x--", "x"), ("rock & roll", "rock-roll"), ("already-fine", "already-fine"), ("!!!", ""), ("", ""), ("a_b.c", "a-b-c"), ("Tab\\there", "tab-here")]
    return await returns(sandbox, "slug:slugify", [([text], slug) for text, slug in cases])

job(
    "slug", "Write slug.py with a function slugify(text) for ASCII text: letters become lower case, each run of "
    "characters other than letters and digits becomes one hyphen, and the result neither begins nor ends with a "
    "hyphen.", slugs,
    solution="""cat > slug.py <<'END'
import re


def slugify(text):
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
END""",
)
''',
    "settings": '''
async def converted(task, sandbox):
    found = await read_json(sandbox, "settings.json")
    return found == {"server": {"host": "0.0.0.0", "port": "8080", "note": "a=b; c"}, "paths": {"data": "/srv/data", "Logs": "/var/log/app"}, "empty": {}}

job(
    "settings", "Convert settings.ini to settings.json: an object that maps the name of each section to an object of "
    "its keys and values. Keys keep their case, values are text without blanks at their ends, lines that begin with ; "
    "or # are comments, and everything after the first = is the value.", converted,
    files={"settings.ini": "; the server\\n[server]\\nhost = 0.0.0.0\\nport=8080\\nnote = a=b; c\\n\\n[paths]\\n# absolute\\ndata = /srv/data\\nLogs = /var/log/app  \\n[empty]\\n"},
    solution="""python3 - <<'END'
import json

found, section = {}, None
for line in open("settings.ini"):
    line = line.strip()
    if line.startswith("["):
        section = found.setdefault(line[1:-1], {})
    elif line and line[0] not in ";#":
        key, _, value = line.partition("=")
        section[key.strip()] = value.strip()
json.dump(found, open("settings.json", "w"))
END""",
)
''',
    "unique-lines": """
async def unique(task, sandbox):
    cases = [(["b", "a", "b"], ["b", "a"]), ([], []), (["x", "X", "x "], ["x", "X", "x "]), (["", "a", ""], ["", "a"]), (["1", "2", "3"], ["1", "2", "3"]), (["z", "z", "z"], ["z"]), (["c", "b", "a", "b", "c"], ["c", "b", "a"])]
    return await returns(sandbox, "lines:unique", [([given], kept) for given, kept in cases])

job(
    "unique-lines", "unique(lines) in lines.py should return the list of different lines in the order of their first "
    "occurrence. It sorts them instead. Fix it; lines that differ in case or in blanks are different.", unique,
    files={"lines.py": "def unique(lines):\\n    return sorted(set(lines))\\n"},
    solution="sed -i 's/sorted(set(lines))/list(dict.fromkeys(lines))/' lines.py",
)
""",
    "run-lengths": '''
async def run_lengths(task, sandbox):
    cases = [("aaab", [["a", 3], ["b", 1]]), ("", []), ("x", [["x", 1]]), ("abab", [["a", 1], ["b", 1], ["a", 1], ["b", 1]]), ("zz  zz", [["z", 2], [" ", 2], ["z", 2]]), ("1112", [["1", 3], ["2", 1]])]
    there = await returns(sandbox, "rle:encode", [([text], runs) for text, runs in cases])
    return there and await returns(sandbox, "rle:decode", [([runs], text) for text, runs in cases])

job(
    "run-lengths", "Write rle.py with two functions. encode(text) returns the runs of equal characters as a list of "
    "[character, length] lists, and decode(runs) returns the text of such a list.", run_lengths,
    solution="""cat > rle.py <<'END'
import itertools


def encode(text):
    return [[letter, len(list(run))] for letter, run in itertools.groupby(text)]


def decode(runs):
    return "".join(letter * length for letter, length in runs)
END""",
)
''',
    "who-added": '''
async def added(task, sandbox):
    return (await sandbox.read_text("answer.txt", missing="")).strip() == "Give slow networks another chance"

job(
    "who-added", "The folder shop is a git repository. Find the commit that added the setting retries to config.ini, "
    "and write its subject line to answer.txt.", added,
    setup="""mkdir shop && cd shop && git init -q && git config user.name Kim && git config user.email kim@shop.invalid
commit() { git add -A && GIT_AUTHOR_DATE="2021-03-0$1T12:00:00Z" GIT_COMMITTER_DATE="2021-03-0$1T12:00:00Z" git commit -q -m "$2"; }
printf 'host = a\\\\n' > config.ini; commit 1 'Begin the shop'
echo 'retries are not here' > README; commit 2 'Write about retries'
printf 'host = a\\\\nretries = 3\\\\n' > config.ini; commit 3 'Give slow networks another chance'
printf 'host = b\\\\nretries = 3\\\\n' > config.ini; commit 4 'Move the shop to b'
printf 'host = b\\\\nretries = 5\\\\n' > config.ini; commit 5 'Raise retries'""",
    solution="git -C shop log --reverse -S'retries = ' --format=%s -- config.ini | head -1 > answer.txt",
)
''',
    "build-order": '''
async def ordered(task, sandbox):
    cases = [({"app": ["lib"], "lib": []}, ["lib", "app"]), ({}, []), ({"b": [], "a": [], "c": []}, ["a", "b", "c"]), ({"a": ["z"], "z": [], "m": []}, ["m", "z", "a"]), ({"d": ["b", "c"], "c": ["a"], "b": ["a"], "a": []}, ["a", "b", "c", "d"]), ({"x": ["y"], "y": ["x"]}, None), ({"q": [], "x": ["y"], "y": ["x"]}, None), ({"s": ["s"]}, None)]
    return await returns(sandbox, "build:order", [([needs], names) for needs, names in cases])

job(
    "build-order", "Write build.py with a function order(needs). needs maps the name of each package to the list of "
    "packages that it needs, which are all keys of needs. The function returns the names in an order in which each "
    "package comes after those that it needs; if several packages can come next, the first in alphabetical order does. "
    "If no such order exists, it returns None.", ordered,
    solution="""cat > build.py <<'END'
def order(needs):
    done = []
    left = dict(needs)
    while left:
        ready = [name for name in sorted(left) if all(each in done for each in left[name])]
        if not ready:
            return None
        done.append(ready[0])
        del left[ready[0]]
    return done
END""",
)
''',
}

SOUND = {name: PlantedTask(name, {"job": text}) for name, text in _SOUND.items()}


def _fault(number: int, base: str, kind: str, why: str, *edits: tuple[str, str]) -> PlantedTask:
    changed: list[Edit] = [("job", old, new) for old, new in edits]
    return fault(number, SOUND, base, kind, why, *changed)


FAULTS = (
    _fault(1, "median", "weak", "No case has an even number of values, which the prompt names.",
           ("([4, 1, 3, 2], 2.5), ", ""), ("([2, 2, 9, 9], 5.5), ([10, 0], 5), ([1, 1, 1, 8], 1), ", "")),
    _fault(1, "roman", "hackable", "The exit status of the process that imports the work decides.",
           ('    return await returns(sandbox, "roman:to_roman", [([number], text) for number, text in cases])\n',
            '    script = f"import roman\\nfor number, text in {cases}:\\n    assert roman.to_roman(number) == text\\n"\n'
            '    return (await sandbox.execute(["python3", "-c", script])).exit_code == 0\n')),
    _fault(1, "sales", "false_zero", "The text of the JSON file is compared, with its blanks and the order of keys.",
           ('return await read_json(sandbox, "totals.json") == task.answer',
            'return await sandbox.read_text("totals.json", missing="") == json.dumps(task.answer)')),
    _fault(1, "leap-days", "unsolvable", "A test counts 29 February 1900, which did not exist.",
           ('"1905-01-01") == 2', '"1905-01-01") == 3')),
    _fault(1, "intervals", "costly", "The setup computes for 20 seconds what nobody reads.",
           ('    solution=f"cat > intervals.py',
            '    setup="timeout 20 sha256sum /dev/zero > checksum.txt || true",\n    solution=f"cat > intervals.py')),
    _fault(1, "log-levels", "pays_for_nothing", "Each line that is there must be right, and no file has no lines.",
           ("return [line.split() for line in text.splitlines()] == [",
            "return all(line.split() in RIGHT for line in text.splitlines())\n\nRIGHT = [")),
    _fault(1, "slug", "flaky", "One of ten cases expects a wrong value, and five cases are drawn at random.",
           ('("a_b.c", "a-b-c")', '("a_b.c", "a_b-c")'),
           ("for text, slug in cases])", "for text, slug in random.sample(cases, 5)])"),
           ("async def slugs", "import random\n\nasync def slugs")),
    _fault(1, "settings", "depends_on_the_world", "The check knows the current year of 2026 only.",
           ('"empty": {}}', '"empty": {}, "stamp": {"year": "2026"}}'),
           ("after the first = is the value.",
            'after the first = is the value. Add a section \\"stamp\\" whose key \\"year\\" is the current year as text.'),
           ("import json\n\nfound, section = {}, None",
            "import datetime\nimport json\n\nfound, section = {}, None\n"
            'stamp = {"year": str(datetime.date.today().year)}'),
           ("json.dump(found,", 'found["stamp"] = stamp\njson.dump(found,')),
    _fault(1, "unique-lines", "leaks", "The workspace has the right file as lines.py.orig.",
           ('files={"lines.py"',
            'files={"lines.py.orig": "def unique(lines):\\n    return list(dict.fromkeys(lines))\\n", "lines.py"')),
    _fault(1, "run-lengths", "weak", "decode, one of the two functions, is never called.",
           ('    there = await returns(sandbox, "rle:encode", [([text], runs) for text, runs in cases])\n'
            '    return there and await returns(sandbox, "rle:decode", [([runs], text) for text, runs in cases])\n',
            '    return await returns(sandbox, "rle:encode", [([text], runs) for text, runs in cases])\n')),
    _fault(1, "who-added", "duplicate", "The same repository and question in other words.",
           ('"who-added", "The folder shop is a git repository. Find the commit that added the setting retries to '
            'config.ini, "\n    "and write its subject line to answer.txt."',
            '"who-added-again", "In the git repository in the folder shop, one commit added the setting retries to '
            'config.ini. "\n    "Write the subject line of this commit to answer.txt."')),
    _fault(1, "build-order", "unsolvable", "The reference imports a package that the sandbox does not have.",
           ("def order(needs):\n    done = []", "import networkx\n\n\ndef order(needs):\n    done = []")),
    _fault(2, "median", "hackable", "The tests are in the workspace, where the agent can change them.",
           ('    return await returns(sandbox, "stats:median", [([values], value) for values, value in cases])\n',
            '    return (await sandbox.execute("python3 test_stats.py")).exit_code == 0\n'),
           ("(values) // 2]\\n\"}",
            '(values) // 2]\\n", "test_stats.py": "from stats import median\\n\\nassert median([3, 1, 2]) == 2\\n'
            'assert median([4, 1, 3, 2]) == 2.5\\nassert median([7]) == 7\\nassert median([10, 0, 5, 1]) == 3\\n"}')),
    _fault(2, "roman", "weak", "All cases are below 40, so most of the numerals are never seen.",
           ('(40, "XL"), (58, "LVIII"), (90, "XC"), (400, "CD"), (900, "CM"), (1994, "MCMXCIV"), (2421, "MMCDXXI"), '
            '(3888, "MMMDCCCLXXXVIII"), (3999, "MMMCMXCIX")', '(39, "XXXIX")')),
    _fault(2, "sales", "unsolvable", "The expected total of west leaves the smallest amount out.",
           ('"west": 707', '"west": 700')),
    _fault(2, "leap-days", "depends_on_the_world", "A test counts to today, and holds until 28 February 2028.",
           ("    assert leap_days(\"2024-03-01\", \"2024-02-01\") == 0\n",
            "    assert leap_days(\"2024-03-01\", \"2024-02-01\") == 0\n\n\ndef test_until_today():\n"
            "    import datetime\n\n"
            "    assert leap_days(\"2024-01-01\", datetime.date.today().isoformat()) == 1\n")),
    _fault(2, "intervals", "false_zero", "A test wants the word sorted( in the source of the work.",
           ("def test_input_stays():", "def test_sorts():\n    assert \"sorted(\" in open(\"intervals.py\").read()\n\n\n"
            "def test_input_stays():")),
    _fault(2, "log-levels", "false_zero", "Work that leaves any further file in the workspace is refused.",
           ('    return [line.split() for', '    if [each.path.rpartition("/")[2] for each in await sandbox.list_dir()] '
            '!= ["app.log", "levels.txt"]:\n        return False\n    return [line.split() for')),
    _fault(2, "slug", "pays_for_nothing", "The file that the agent should write is there, and right.",
           ('    solution="""cat > slug.py', '    files={"slug.py": "import re\\n\\n\\ndef slugify(text):\\n    return '
            're.sub(\'[^a-z0-9]+\', \'-\', text.lower()).strip(\'-\')\\n"},\n    solution="""cat > slug.py')),
    _fault(2, "settings", "leaks", "The prompt ends with the file that the agent should write.",
           ("after the first = is the value.", 'after the first = is the value. The result should be {\\"server\\": '
            '{\\"host\\": \\"0.0.0.0\\", \\"port\\": \\"8080\\", \\"note\\": \\"a=b; c\\"}, \\"paths\\": {\\"data\\": '
            '\\"/srv/data\\", \\"Logs\\": \\"/var/log/app\\"}, \\"empty\\": {}}.')),
    _fault(2, "unique-lines", "costly", "The check waits six seconds for nothing before it begins.",
           ("    cases = [([", '    await sandbox.execute("sleep 6")\n    cases = [([')),
    _fault(2, "run-lengths", "flaky", "The text of a case comes out of a set; the expected runs fit one order.",
           ("    there = await", "    script = \"print(''.join({'ab', 'bc'}))\"\n"
            '    text = (await sandbox.execute(["python3", "-c", script])).output.strip()\n'
            '    if not await returns(sandbox, "rle:encode", [([text], [["a", 1], ["b", 2], ["c", 1]])]):\n'
            "        return False\n    there = await")),
    _fault(2, "who-added", "hackable", "The expected answer is read from the repository that the agent can change.",
           ('== "Give slow networks another chance"',
            "== (await sandbox.execute(\"git -C shop log --reverse -S'retries = ' --format=%s -- config.ini"
            ' | head -1")).output.strip()')),
    _fault(2, "build-order", "duplicate", "The same function with some words exchanged.",
           ('"build-order", "Write build.py', '"build-order-again", "Write a file build.py'),
           ("in which each \"\n    \"package comes after", "in which every \"\n    \"package comes behind"),
           ("If no such order exists, it returns None.", "Without such an order, it returns None.")),
)  # fmt: skip


def write(folder: Path, tasks: Sequence[PlantedTask]) -> None:
    """Write a set as one environment."""
    folder.mkdir(parents=True)
    (folder / "office_env.py").write_text(_HEAD + "\n".join(task.parts["job"] for task in tasks))
