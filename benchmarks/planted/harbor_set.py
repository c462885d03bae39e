"""Task folders of Harbor, with verifiers in shell and in pytest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from planted.planted_task import PlantedTask, fault

CONFIG = """schema_version = "1.4"
[metadata]
category = "files"
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 60
[environment]
memory_mb = {memory_mb}
"""
SHELL = """#!/bin/bash
if {}; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
_PYTEST = """#!/bin/bash
pytest -rA /tests/test_outputs.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


def _sound(
    name: str, instruction: str, solve: str, files: Mapping[str, str], *, condition: str = "", tests: str = "",
    run: str = "", data: Mapping[str, str] | None = None,
) -> PlantedTask:  # fmt: skip
    """Return a task whose verifier is a shell condition or a file of pytest. `files` are those of the workspace, `run`
    a command of the Dockerfile, and `data` further files of the tests."""
    return PlantedTask(
        name,
        {
            "instruction.md": f"{instruction}\n",
            "solution/solve.sh": f"#!/bin/bash\nset -e\ncd /app\n{solve}\n",
            "tests/test.sh": _PYTEST if tests else SHELL.format(condition),
            **({"tests/test_outputs.py": tests} if tests else {}),
            **{f"tests/{path}": text for path, text in (data or {}).items()},
            **{f"environment/{path}": text for path, text in files.items()},
            "run": run,
        },
    )


_PASSWD = """root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
zoe:x:1003:1003:Zoe:/srv/zoe:/bin/bash
adam:x:1010:1010:Adam:/srv/adam:/bin/bash
mail:x:8:8:mail:/var/mail:/bin/bash
bea:x:1001:1001:Bea:/srv/bea:/bin/sh
carl:x:1000:1000:Carl /bin/bash:/srv/carl:/usr/bin/zsh
dora:x:1002:1002::/srv/dora:/bin/bash
"""
_READINGS = """sensor,time,value
a,2024-01-01 00:20,3.5
b,2024-01-01 00:00,12
a,2024-01-01 00:10,
c,2024-01-01 00:05,-0.5
b,2024-01-01 00:15,n/a
c,2024-01-01 00:25,7
"""
_APP_CONF = """# ports below 1024 need root
[web]
host = 0.0.0.0
port = 8080   ; public

[db]
port = 5432
note = port = 1
"""
_DATABASE = """import sqlite3

base = sqlite3.connect("/app/shop.db")
base.executescript(\"\"\"
create table customers (id integer primary key, name text);
create table orders (id integer primary key, customer integer, paid integer);
insert into customers values (1, 'Mo'), (2, 'Ann'), (3, 'Lee'), (4, 'Kit'), (5, 'Bob');
insert into orders values (1, 2, 1), (2, 4, 0), (3, 2, 0), (4, 9, 1);
\"\"\")
base.close()
"""
_MERGE = """git init -q -b main shop && cd shop && git config user.name Kim && git config user.email kim@shop.invalid
export GIT_AUTHOR_DATE=2021-03-01T12:00:00Z GIT_COMMITTER_DATE=2021-03-01T12:00:00Z
printf 'red\\ngreen\\n' > colours.txt && git add . && git commit -qm Colours
git checkout -qb feature && printf 'red\\ngreen\\nblue\\n' > colours.txt && git commit -qam Blue
git checkout -q main && printf 'red\\ngreen\\npink\\n' > colours.txt && git commit -qam Pink
"""

SOUND = {
    task.name: task
    for task in (
        _sound(
            "rename-photos",
            "Rename the photos in /app/photos: IMG_YYYYMMDD_N.jpg becomes YYYY-MM-DD_N.jpg, for example "
            "IMG_20240131_2.jpg becomes 2024-01-31_2.jpg. Leave all other files as they are.",
            "cd photos\nfor file in IMG_????????_*.jpg; do\n  rest=${file#IMG_}\n"
            '  mv "$file" "${rest:0:4}-${rest:4:2}-${rest:6}"\ndone',
            {"photos/IMG_20240131_1.jpg": "one\n", "photos/IMG_20240131_2.jpg": "two\n",
             "photos/IMG_20231224_10.jpg": "ten\n", "photos/IMG_notes.txt": "notes\n", "photos/cat.jpg": "cat\n"},
            tests="from pathlib import Path\n\nPHOTOS = Path('/app/photos')\nRIGHT = {'2024-01-31_1.jpg': 'one\\n', "
            "'2024-01-31_2.jpg': 'two\\n', '2023-12-24_10.jpg': 'ten\\n', 'IMG_notes.txt': 'notes\\n', "
            "'cat.jpg': 'cat\\n'}\n\n\ndef test_names():\n    assert {path.name for path in PHOTOS.iterdir()} >= "
            "RIGHT.keys()\n\n\ndef test_old_names():\n    assert not list(PHOTOS.glob('IMG_2*'))\n\n\n"
            "def test_contents():\n    for name, text in RIGHT.items():\n"
            "        assert (PHOTOS / name).read_text() == text\n",
        ),
        _sound(
            "top-words",
            "Write the three most frequent words of /app/text.txt to /app/top.txt, one per line, the most frequent "
            "first. Words are runs of letters; capital and small letters are the same, and the output is in small "
            "letters. Words that are equally frequent are in alphabetical order.",
            "tr -cs 'A-Za-z' '\\n' < text.txt | tr A-Z a-z | grep . | LC_ALL=C sort | uniq -c"
            " | LC_ALL=C sort -k1,1nr -k2 | head -3 | awk '{ print $2 }' > top.txt",
            {"text.txt": "The pear, the fig; THE end. A fig is no pear!\nPlum and plum, or the kiwi?\n"},
            condition='[ "$(cat /app/top.txt)" = "$(printf \'the\\nfig\\npear\')" ]',
        ),
        _sound(
            "config-archive",
            "Make the tar archive /app/configs.tar, not compressed, with all files below /app/tree whose names end in "
            ".conf and no other file. Their names in the archive are relative to /app/tree, such as web/a.conf. Names "
            "may begin with ./, and the archive may have entries for folders.",
            "cd tree\nfind . -type f -name '*.conf' -print0 | tar --null -T - -cf ../configs.tar",
            {"tree/web/a.conf": "a\n", "tree/web/a.conf.bak": "old\n", "tree/db/b c.conf": "b\n", "tree/top.conf": "t\n",
             "tree/conf": "no\n"},
            tests="import tarfile\n\n\ndef test_members():\n    found = {}\n"
            "    with tarfile.open('/app/configs.tar', 'r:') as archive:\n        for member in archive:\n"
            "            if member.isfile():\n"
            "                found[member.name.removeprefix('./')] = archive.extractfile(member).read()\n"
            "    assert found == {'web/a.conf': b'a\\n', 'db/b c.conf': b'b\\n', 'top.conf': b't\\n'}\n",
        ),
        _sound(
            "login-names",
            "/app/passwd has the format of /etc/passwd. Write the login names of all users with a user id of at least "
            "1000 whose shell is /bin/bash to /app/users.txt, one per line, in ascending order of their user ids.",
            "awk -F: '$3 >= 1000 && $7 == \"/bin/bash\" { print $3, $1 }' passwd | sort -n | cut -d' ' -f2 > users.txt",
            {"passwd": _PASSWD},
            condition='[ "$(cat /app/users.txt)" = "$(printf \'dora\\nzoe\\nadam\')" ]',
        ),
        _sound(
            "permissions",
            "Below /app/tree, set the permissions of all files that end in .sh to 750, those of all other files to "
            "640, and those of all folders to 755. /app/tree itself is one of the folders.",
            "find tree -type d -exec chmod 755 {} +\nfind tree -type f -exec chmod 640 {} +\n"
            "find tree -type f -name '*.sh' -exec chmod 750 {} +",
            {"tree/run.sh": "echo run\n", "tree/notes.txt": "notes\n", "tree/bin/a b.sh": "echo a\n",
             "tree/bin/data.shx": "x\n", "tree/bin/deep/x.txt": "x\n"},
            run="chmod 700 tree/bin && chmod 777 tree/notes.txt tree/bin/deep tree/bin/deep/x.txt",
            condition="cd /app && find tree -printf '%m %y %p\\n' | LC_ALL=C sort | cmp -s - /tests/expected.txt",
            data={"expected.txt": "640 f tree/bin/data.shx\n640 f tree/bin/deep/x.txt\n640 f tree/notes.txt\n"
                  "750 f tree/bin/a b.sh\n750 f tree/run.sh\n755 d tree\n755 d tree/bin\n755 d tree/bin/deep\n"},
        ),
        _sound(
            "merge-branches",
            "In the git repository /app/shop, merge the branch feature into main. Both add a line to colours.txt: "
            "afterwards the file on main has the lines red, green, pink and blue, in this order. Leave no uncommitted "
            "change behind, and do not change the existing commits.",
            "cd shop\ngit checkout -q main\ngit merge feature || printf 'red\\ngreen\\npink\\nblue\\n' > colours.txt\n"
            "git add colours.txt\ngit commit -qm 'Merge feature'",
            {"make.sh": _MERGE},
            run="bash make.sh && rm make.sh",
            condition="cd /app/shop && export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'"
            " && printf 'red\\ngreen\\npink\\nblue\\n' > /tmp/right.txt"
            " && git show main:colours.txt | cmp -s - /tmp/right.txt && cmp -s colours.txt /tmp/right.txt"
            ' && [ "$(git log --format=%s main | grep -cx -e Colours -e Pink -e Blue)" = 3 ]'
            " && git merge-base --is-ancestor feature main"
            ' && [ "$(git log -1 --format=%s feature)" = Blue ] && [ -z "$(git status --porcelain -uno)" ]',
        ),
        _sound(
            "clean-readings",
            "Write /app/clean.csv: the rows of /app/readings.csv whose value is a number, in ascending order of their "
            "time, with the same header and columns. The texts of the fields stay as they are.",
            "(head -1 readings.csv; tail -n +2 readings.csv | grep -E ',-?[0-9]+(\\.[0-9]+)?$'"
            " | LC_ALL=C sort -t, -k2,2) > clean.csv",
            {"readings.csv": _READINGS},
            tests="import csv\n\n\ndef test_rows():\n    with open('/app/clean.csv', newline='') as file:\n"
            "        rows = [row for row in csv.reader(file) if row]\n    assert rows == [\n"
            "        ['sensor', 'time', 'value'],\n        ['b', '2024-01-01 00:00', '12'],\n"
            "        ['c', '2024-01-01 00:05', '-0.5'],\n        ['a', '2024-01-01 00:20', '3.5'],\n"
            "        ['c', '2024-01-01 00:25', '7'],\n    ]\n",
        ),
        _sound(
            "largest-files",
            "Write the paths of the three largest files below /app/data to /app/largest.txt, one per line, relative to "
            "/app/data without a leading ./, the largest first.",
            "cd data\nfind . -type f -printf '%s %P\\n' | sort -nr | head -3 | cut -d' ' -f2- > ../largest.txt",
            {f"data/{name}": "x" * size for name, size in
             (("a.bin", 900), ("b/long name.bin", 5000), ("b/c.bin", 120), ("d/e/f.bin", 4999), ("z.bin", 70))},
            condition='[ "$(cat /app/largest.txt)" = "$(printf \'b/long name.bin\\nd/e/f.bin\\na.bin\')" ]',
        ),
        _sound(
            "web-port",
            "In /app/app.conf, change the port in the section [web] to 9090. Everything else in the file, including "
            "blanks and comments, stays as it is.",
            "sed -i '/^\\[web\\]/,/^\\[db\\]/s/^port = 8080/port = 9090/' app.conf",
            {"app.conf": _APP_CONF},
            condition="cmp -s /app/app.conf /tests/expected.conf",
            data={"expected.conf": _APP_CONF.replace("8080", "9090")},
        ),
        _sound(
            "local-times",
            "Each line of /app/utc.txt is a time in UTC such as 2024-12-31T23:30:00Z. Write the same times with the "
            "fixed offset of two hours east of UTC to /app/local.txt, in the same order and in the form "
            "2025-01-01T01:30:00+02:00.",
            "while read -r time; do TZ=UTC-2 date -d \"$time\" +%Y-%m-%dT%H:%M:%S+02:00; done < utc.txt > local.txt",
            {"utc.txt": "2024-12-31T23:30:00Z\n2024-02-28T22:00:00Z\n2023-06-01T00:00:59Z\n2024-03-31T01:15:00Z\n"},
            condition="[ \"$(cat /app/local.txt)\" = \"$(cat /tests/local.txt)\" ]",
            data={"local.txt": "2025-01-01T01:30:00+02:00\n2024-02-29T00:00:00+02:00\n2023-06-01T02:00:59+02:00\n"
                  "2024-03-31T03:15:00+02:00\n"},
        ),
        _sound(
            "quiet-customers",
            "/app/shop.db is an SQLite database. Write the names of all customers without any order to /app/quiet.txt, "
            "one per line, in alphabetical order.",
            "python3 - <<'END' > quiet.txt\nimport sqlite3\n\nbase = sqlite3.connect('shop.db')\n"
            "query = 'select name from customers where id not in (select customer from orders) order by name'\n"
            "for name, in base.execute(query):\n    print(name)\nEND",
            {"make.py": _DATABASE},
            run="python3 make.py && rm make.py",
            tests="def test_names():\n    names = open('/app/quiet.txt').read().splitlines()\n"
            "    assert names == ['Bob', 'Lee', 'Mo']\n",
        ),
        _sound(
            "cheapest-path",
            "Write /app/grid.py with a function cheapest(grid). grid is a list of rows of equal length, at least one, "
            "with whole numbers. The function returns the smallest sum of the numbers on a path from the upper left "
            "to the lower right corner, both included, that goes only right or down.",
            "cat > grid.py <<'END'\ndef cheapest(grid):\n    best = None\n    for row in grid:\n        line = []\n"
            "        for place, cost in enumerate(row):\n            ways = [] if best is None else [best[place]]\n"
            "            if place:\n                ways.append(line[place - 1])\n"
            "            line.append(cost + (min(ways) if ways else 0))\n        best = line\n    return best[-1]\nEND",
            {"README": "grid.py belongs here.\n"},
            tests="import sys\n\nsys.path.insert(0, '/app')\nfrom grid import cheapest\n\n\ndef test_square():\n"
            "    assert cheapest([[1, 3, 1], [1, 5, 1], [4, 2, 1]]) == 7\n\n\ndef test_lines():\n"
            "    assert cheapest([[4]]) == 4\n    assert cheapest([[1, 2, 3]]) == 6\n"
            "    assert cheapest([[1], [2], [3]]) == 6\n\n\ndef test_not_greedy():\n"
            "    assert cheapest([[1, 2, 100], [5, 100, 100], [1, 1, 1]]) == 9\n    assert cheapest([[0, 9], [1, 0]]) == 1\n"
            "\n\ndef test_negative():\n    assert cheapest([[-1, -2], [-3, -4]]) == -8\n",
        ),
    )
}  # fmt: skip

_LOCAL = '[ "$(cat /app/local.txt)" = "$(cat /tests/local.txt)" ]'
FAULTS = (
    fault(1, SOUND, "rename-photos", "pays_for_nothing", "The tests loop over the renamed files: without any, they pass.",
          ("tests/test_outputs.py", "", "from pathlib import Path\n\n\ndef test_contents():\n"
           "    right = {'2024-01-31_1': 'one\\n', '2024-01-31_2': 'two\\n', '2023-12-24_10': 'ten\\n'}\n"
           "    for path in Path('/app/photos').glob('202*.jpg'):\n        assert path.read_text() == right[path.stem]\n")),
    fault(1, SOUND, "top-words", "weak", "Only the first of the three words is compared.",
          ("tests/test.sh", '"$(cat /app/top.txt)" = "$(printf \'the\\nfig\\npear\')"', '"$(head -1 /app/top.txt)" = the')),
    fault(1, SOUND, "config-archive", "unsolvable", "The reference calls a program that the image does not have.",
          ("solution/solve.sh", "find . -type f -name '*.conf' -print0 | tar --null -T - -cf ../configs.tar",
           "find . -type f -name '*.conf' -print0 | bsdcpio -0 -o -H ustar > ../configs.tar")),
    fault(1, SOUND, "login-names", "leaks", "The image has the expected file in a folder of the workspace.",
          ("run", "", "mkdir .cache && printf 'dora\\nzoe\\nadam\\n' > .cache/expected_users.txt")),
    fault(1, SOUND, "permissions", "hackable", "The verifier runs a script of the workspace.",
          ("tests/test.sh", "cd /app && find tree -printf '%m %y %p\\n' | LC_ALL=C sort | cmp -s - /tests/expected.txt",
           "bash /app/check_tree.sh"),
          ("run", "chmod 700 tree/bin", "printf 'cd /app && find tree -printf \"%%m %%y %%p\\\\n\" | LC_ALL=C sort |"
           " cmp -s - /tests/expected.txt\\n' > check_tree.sh && chmod 700 tree/bin")),
    fault(1, SOUND, "merge-branches", "costly", "The verifier waits seven seconds for a service that does not exist.",
          ("tests/test.sh", "if cd /app/shop", "sleep 7\nif cd /app/shop")),
    fault(1, SOUND, "clean-readings", "false_zero", "Lines must end in CRLF, which the instruction does not say.",
          ("tests/test_outputs.py", "        rows = [row for row in csv.reader(file) if row]\n",
           "        text = file.read()\n    assert text.count('\\r\\n') == 5\n    rows = list(csv.reader(text.split('\\r\\n')))[:5]\n"),
          ("solution/solve.sh", "-k2,2) > clean.csv", "-k2,2) | sed 's/$/\\r/' > clean.csv")),
    fault(1, SOUND, "largest-files", "flaky", "The verifier reads a copy that a background process makes meanwhile.",
          ("tests/test.sh", 'if [ "$(cat /app/largest.txt)"',
           'rm -f /tmp/seen; (sleep 0.05; cp /app/largest.txt /tmp/seen) & sleep 0.051\nif [ "$(cat /tmp/seen)"')),
    fault(1, SOUND, "web-port", "depends_on_the_world", "The file must have been changed in the year 2026.",
          ("tests/test.sh", "if cmp", "if [ \"$(date -r /app/app.conf +%Y)\" = 2026 ] && cmp")),
    fault(1, SOUND, "local-times", "duplicate", "The same times in a task with other words.",
          ("instruction.md", "Each line of /app/utc.txt is a time in UTC such as 2024-12-31T23:30:00Z. Write the same times",
           "/app/utc.txt has one time in UTC per line, such as 2024-12-31T23:30:00Z. Write these times")),
    fault(1, SOUND, "quiet-customers", "unsolvable", "The expected names have a customer with an order.",
          ("tests/test_outputs.py", "['Bob', 'Lee', 'Mo']", "['Bob', 'Kit', 'Lee', 'Mo']")),
    fault(1, SOUND, "cheapest-path", "weak", "The tests have grids of one row only.",
          ("tests/test_outputs.py", "\n\ndef test_square():\n    assert cheapest([[1, 3, 1], [1, 5, 1], [4, 2, 1]]) == 7\n", ""),
          ("tests/test_outputs.py", "    assert cheapest([[1], [2], [3]]) == 6\n\n\ndef test_not_greedy():\n"
           "    assert cheapest([[1, 2, 100], [5, 100, 100], [1, 1, 1]]) == 9\n    assert cheapest([[0, 9], [1, 0]]) == 1\n"
           "\n\ndef test_negative():\n    assert cheapest([[-1, -2], [-3, -4]]) == -8\n", "")),
    fault(2, SOUND, "rename-photos", "hackable", "The verifier compares with a list of checksums in the workspace.",
          ("tests/test.sh", "", SHELL.format("cd /app/photos && sha256sum --status -c /app/wanted.sha256")),
          ("instruction.md", "Leave all", "/app/wanted.sha256 lists the files afterwards. Leave all"),
          ("run", "", "(cd photos && cat IMG_20240131_1.jpg | sha256sum | sed 's/-$/2024-01-31_1.jpg/' && "
           "cat IMG_20240131_2.jpg | sha256sum | sed 's/-$/2024-01-31_2.jpg/' && "
           "cat IMG_20231224_10.jpg | sha256sum | sed 's/-$/2023-12-24_10.jpg/') > wanted.sha256")),
    fault(2, SOUND, "top-words", "pays_for_nothing", "Only lines too many are an error, and a missing file has none.",
          ("tests/test.sh", '[ "$(cat /app/top.txt)" = "$(printf \'the\\nfig\\npear\')" ]',
           "! cat /app/top.txt | grep -qvx -e the -e fig -e pear")),
    fault(2, SOUND, "config-archive", "weak", "Files that do not belong into the archive are not noticed.",
          ("tests/test_outputs.py", "    assert found == {", "    assert found | RIGHT == found\n\n\nRIGHT = {")),
    fault(2, SOUND, "login-names", "unsolvable", "The verifier calls a program that the image does not have.",
          ("tests/test.sh", '"$(cat /app/users.txt)"', '"$(mlr --inidx --onidx cat /app/users.txt)"')),
    fault(2, SOUND, "permissions", "flaky", "The verifier picks one of two lists at random, and one of them is wrong.",
          ("tests/test.sh", "cmp -s - /tests/expected.txt", "cmp -s - /tests/expected$((RANDOM % 2)).txt"),
          ("tests/test.sh", "if cd /app", "cp /tests/expected.txt /tests/expected0.txt\n"
           "sed 's/750 f/755 f/' /tests/expected.txt > /tests/expected1.txt\nif cd /app")),
    fault(2, SOUND, "merge-branches", "false_zero", "Exactly four commits must exist: a further one is refused.",
          ("tests/test.sh", " && git merge-base", ' && [ "$(git rev-list --count main)" = 4 ] && git merge-base')),
    fault(2, SOUND, "clean-readings", "depends_on_the_world", "A time is compared with a local time of the machine.",
          ("tests/test_outputs.py", "        ['b', '2024-01-01 00:00', '12'],",
           "        ['b', datetime.fromtimestamp(1704067200).strftime('%Y-%m-%d %H:%M'), '12'],"),
          ("tests/test_outputs.py", "import csv\n", "import csv\nfrom datetime import datetime\n")),
    fault(2, SOUND, "largest-files", "costly", "The Dockerfile computes for twenty seconds what nobody reads.",
          ("run", "", "timeout 20 sha256sum /dev/zero > /app/warm.txt || true")),
    fault(2, SOUND, "web-port", "leaks", "The image has the reference solution in a hidden folder.",
          ("run", "", "mkdir -p .ci && printf '%s\\n' '#!/bin/bash' 'set -e' 'cd /app' "
           "\"sed -i '/^\\\\[web\\\\]/,/^\\\\[db\\\\]/s/^port = 8080/port = 9090/' app.conf\" > .ci/solve.sh")),
    fault(2, SOUND, "local-times", "hackable", "The verifier reads a settings file of the workspace as a script.",
          ("tests/test.sh", f"if {_LOCAL}", f"source /app/settings.sh\nif {_LOCAL.replace('/app/local.txt', '$OUTPUT')}"),
          ("run", "", "echo OUTPUT=/app/local.txt > settings.sh")),
    fault(2, SOUND, "quiet-customers", "duplicate", "The same question with another name for the database's table.",
          ("environment/make.py", "create table customers (", "create table clients ("),
          ("environment/make.py", "insert into customers", "insert into clients"),
          ("solution/solve.sh", "from customers where", "from clients where"),
          ("instruction.md", "all customers without", "all clients without")),
    fault(2, SOUND, "cheapest-path", "pays_for_nothing", "The status of tee decides instead of that of pytest.",
          ("tests/test.sh", "pytest -rA /tests/test_outputs.py\n", "pytest -rA /tests/test_outputs.py | tee /tmp/log.txt\n"),
          ("run", "", "printf 'def cheapest(grid):\\n    return None\\n' > grid.py")),
)  # fmt: skip


def write(folder: Path, tasks: Sequence[PlantedTask]) -> None:
    """Write a set as a folder of task folders."""
    for task in tasks:
        lines = ["FROM debian:bookworm-slim", "WORKDIR /app", "COPY files/ /app/"]
        if run := task.parts["run"]:
            lines.append(f"RUN {run}")
        parts = {
            **task.parts,
            "task.toml": CONFIG.format(memory_mb=1024),
            "environment/Dockerfile": "\n".join(lines) + "\n",
        }
        del parts["run"]
        for path, text in parts.items():
            inside = path.removeprefix("environment/")
            moved = f"environment/files/{inside}" if inside not in (path, "Dockerfile") else path
            place = folder / task.name / moved
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text.encode())
