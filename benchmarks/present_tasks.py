"""Tasks in Terminal-Bench's present form, played by the oracle, by doing nothing and by a cheat.

    .venv/bin/python benchmarks/present_tasks.py                # with the programs of this machine
    .venv/bin/python benchmarks/present_tasks.py --root "$(palaestra images make debian:12 --include python3)"
    .venv/bin/python benchmarks/present_tasks.py --folder DIR   # also keep the task folders, for `harbor run`

Each task is a job (what to do, a solution, a check) in one form of the schema 1.4: with a verifier of its own root,
collect hooks, services, health checks, several steps, MCP servers or skills. A task is ok if the oracle earns 1.0,
doing nothing 0.0, and its cheat, which writes the reward itself, 0.0 or a label. The last line counts the tasks of each
feature. `--quick` plays one task of each form.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from image_tasks import write

from palaestra_suites.terminal_bench.import_tasks import Finding, import_tasks

_PYTEST = "uvx -p 3.13 -w pytest==8.4.1 pytest /tests/test_outputs.py -rA"
_PAYS = "then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi"
_TEST_SH = f"#!/bin/bash\nif {_PYTEST}; {_PAYS}\n"
_CHEAT = "#!/bin/bash\nmkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt\n"
_SERVED = """\
services:
  main:
    depends_on:
      data: {condition: service_healthy}
  data:
    build: ./data
    healthcheck: {interval: 200ms, timeout: 5s, retries: 50,
      test: [CMD, python3, -c, "import socket; socket.create_connection(('localhost', 8000))"]}
"""
_DATA = """\
import http.server

class Files(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        with open("/var/asked.txt", "a") as file:
            file.write(self.path + "\\n")
        super().do_GET()

http.server.ThreadingHTTPServer(("0.0.0.0", 8000), lambda *given: Files(*given, directory="/srv")).serve_forever()
"""
_MCP = """\
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    method, result = request["method"], {}
    if method == "initialize":
        result = {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "desk", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": [{"name": "where", "description": "Where the input is.", "inputSchema": {"type": "object"}}]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": "in /app"}]}
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""


@dataclass(frozen=True)
class Job:
    """What to do: `given` is the text of `input`, `solve` is shell text in /app, and `check` are the statements of a
    test that reads `output`."""

    name: str
    instruction: str
    input: str
    given: str
    output: str
    solve: str
    check: str


JOBS = (
    Job("sort-words", "Sort the lines of words.txt into sorted.txt, each once.", "words.txt", "fig\napple\nfig\npear\n",
        "sorted.txt", "sort -u words.txt > sorted.txt", "assert text.split() == ['apple', 'fig', 'pear']"),
    Job("sum-orders", "Write the total of the column `price` of orders.csv to total.txt.", "orders.csv",
        "name,price\nü,3\nb,4\nc,35\n", "total.txt", "awk -F, 'NR > 1 {s += $2} END {print s}' orders.csv > total.txt",
        "assert text.strip() == '42'"),
    Job("count-errors", "Write how many requests of access.log have the status 500 to errors.txt.", "access.log",
        "GET / 200\nGET /500 404\nGET /a 500\nPOST /b 500\n", "errors.txt", "grep -c ' 500$' access.log > errors.txt",
        "assert int(text) == 2"),
    Job("fix-script", "double.py adds 2 instead of doubling. Write a right version to fixed.py.", "double.py",
        "import sys\nprint(int(sys.argv[1]) + 2)\n", "fixed.py", "sed 's/+ 2/* 2/' double.py > fixed.py",
        "import subprocess, sys\n"
        "assert subprocess.check_output([sys.executable, '/app/fixed.py', '21'], text=True).strip() == '42'"),
    Job("ini-to-json", "Write the section `server` of app.ini to app.json.", "app.ini",
        "[client]\nport = 1\n[server]\nport = 8080\nhost = a.example\n", "app.json",
        "python3 -c \"import configparser, json; c = configparser.ConfigParser(); c.read('app.ini'); "
        "json.dump(dict(c['server']), open('app.json', 'w'))\"",
        "import json\nassert json.loads(text) == {'port': '8080', 'host': 'a.example'}"),
    Job("decode", "secret.b64 is base64. Write what it says to secret.txt.", "secret.b64", "c2VjcmV0IHRleHQK\n",
        "secret.txt", "base64 -d secret.b64 > secret.txt", "assert text == 'secret text\\n'"),
    Job("newest", "Write the name of the newest release of releases.txt to newest.txt.", "releases.txt",
        "1.9.0\n1.10.0\n1.2.12\n", "newest.txt", "sort -V releases.txt | tail -1 > newest.txt",
        "assert text.strip() == '1.10.0'"),
    Job("table", "Write the lines of people.tsv, oldest first, to people.txt as NAME (AGE).", "people.tsv",
        "Ada\t36\nBo\t9\nCy\t71\n", "people.txt",
        "sort -t'\t' -k2nr people.tsv | sed 's/\\(.*\\)\\t\\(.*\\)/\\1 (\\2)/' > people.txt",
        "assert text.split('\\n')[:3] == ['Cy (71)', 'Ada (36)', 'Bo (9)']"),
)  # fmt: skip
FORMS = {
    "separate": 4, "own-root": 2, "collect": 3, "service": 6, "service-collect": 2, "health": 3, "steps": 3, "mcp": 2,
    "skills": 2,
}  # fmt: skip
"""The number of tasks in each form."""
FEATURES = {
    "separate": ("separate verifier",), "own-root": ("separate verifier",),
    "collect": ("separate verifier", "collect"), "service": ("services",),
    "service-collect": ("separate verifier", "collect", "services"), "health": ("healthcheck",),
    "steps": ("several steps",), "mcp": ("MCP or skills",), "skills": ("MCP or skills",),
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    name: str
    form: str
    oracle: float | None
    noop: float | None
    cheat: float | None
    ok: bool
    reason: str


def files_of(job: Job, form: str) -> dict[str, str]:
    """Return the files of a task's folder."""
    serves = form.startswith("service")
    given = "data" if serves else "."
    dockerfile = "FROM debian:12\nRUN mkdir -p /app\nWORKDIR /app\n" + ("" if serves else f"COPY {job.input} /app/\n")
    fetch = f"from urllib.request import urlretrieve; urlretrieve('http://data:8000/{job.input}', '{job.input}')"
    solve = "#!/bin/bash\ncd /app\n" + (f'python3 -c "{fetch}"\n' if serves else "") + f"{job.solve}\n"
    where = f"{job.input} is at http://data:8000/{job.input}." if serves else ""
    files = {
        "instruction.md": f"Work in /app. {job.instruction} {where}\n",
        "environment/Dockerfile": dockerfile,
        f"environment/{given}/{job.input}": job.given,
        "solution/solve.sh": solve,
        "cheat/solve.sh": _CHEAT,
        "tests/test.sh": _TEST_SH,
        "tests/test_outputs.py": test_of(job, form),
        "task.toml": settings_of(job, form),
    }
    if serves:
        files["environment/docker-compose.yaml"] = _SERVED
        files["environment/data/Dockerfile"] = "FROM debian:12\nCOPY . /srv\nCMD python3 /srv/serve.py\n"
        files["environment/data/serve.py"] = _DATA
    if form in ("separate", "collect", "service-collect"):
        files["tests/Dockerfile"] = "FROM debian:12\nRUN mkdir -p /app\nCOPY . /tests\n"
    if form == "mcp":
        files["environment/desk.py"] = _MCP
        files["environment/Dockerfile"] += "COPY desk.py /opt/\n"
    if form == "skills":
        files["environment/skills/job/SKILL.md"] = f"---\nname: job\ndescription: How to do it.\n---\n{job.solve}\n"
        files["environment/Dockerfile"] += "COPY skills /opt/skills\n"
    return steps_of(job, files) if form == "steps" else files


def test_of(job: Job, form: str) -> str:
    body = textwrap.indent(f"text = Path('/app/{job.output}').read_text()\n{job.check}\n", "    ")
    code = f"from pathlib import Path\n\ndef test_{job.name.replace('-', '_')}():\n{body}"
    if form == "collect":
        code += "\ndef test_what_was_collected():\n    assert Path('/logs/artifacts/lines.txt').read_text().strip()\n"
    if form == "service-collect":
        code += (
            f"\ndef test_the_input_was_asked_for():\n    assert '/{job.input}' in Path('/var/asked.txt').read_text()\n"
        )
    return code


def settings_of(job: Job, form: str) -> str:
    """Return the text of task.toml."""
    artifacts = [f'"/app/{job.output}"']
    collect = {"collect": f"mkdir -p /logs/artifacts && wc -l < {job.output} > /logs/artifacts/lines.txt"}.get(form, "")
    if form == "service-collect":
        artifacts.append('{ source = "/var/asked.txt", service = "data" }')
        collect = "sort -u -o /var/asked.txt /var/asked.txt"
    separate = "separate verifier" in FEATURES[form]
    text = 'schema_version = "1.4"\n' + (f"artifacts = [{', '.join(artifacts)}]\n" if separate else "")
    text += '[metadata]\ncategory = "files"\n[agent]\ntimeout_sec = 120\n[verifier]\ntimeout_sec = 120\n'
    text += 'environment_mode = "separate"\n' if separate else ""
    if collect:
        text += f'[[verifier.collect]]\ncommand = "{collect}"\n'
        text += 'service = "data"\n' if form == "service-collect" else ""
    text += '[environment]\nworkdir = "/app"\n' + ('skills_dir = "/opt/skills"\n' if form == "skills" else "")
    if form == "health":
        text += f'[environment.healthcheck]\ncommand = "test -s /app/{job.input}"\ninterval_sec = 0.2\nretries = 20\n'
    if form == "mcp":
        text += '[[environment.mcp_servers]]\nname = "desk"\ntransport = "stdio"\ncommand = "python3"\n'
        text += 'args = ["/opt/desk.py"]\n'
    return text


def steps_of(job: Job, files: dict[str, str]) -> dict[str, str]:
    """Return the files of a task whose second step copies what the first one made."""
    files = dict(files)
    first = {name: files.pop(name) for name in list(files) if name.startswith(("instruction", "solution", "tests"))}
    del files["cheat/solve.sh"]
    files |= {f"steps/make/{name}": text for name, text in first.items()}
    files |= {
        "steps/copy/instruction.md": f"Copy /app/{job.output} to /app/copy.txt.\n",
        "steps/copy/solution/solve.sh": f"#!/bin/bash\ncp /app/{job.output} /app/copy.txt\n",
        "steps/copy/tests/test.sh": f"#!/bin/bash\nif cmp /app/{job.output} /app/copy.txt; {_PAYS}\n",
    }
    files["task.toml"] += '[[steps]]\nname = "make"\n[[steps]]\nname = "copy"\n'
    return files


def tasks() -> list[tuple[str, Job, str]]:
    """Return the name, job and form of each task."""
    forms = [form for form, count in FORMS.items() for _ in range(count)]
    chosen = [(JOBS[number % len(JOBS)], form) for number, form in enumerate(forms)]
    return [(f"{job.name}-{form}", job, form) for job, form in chosen]


def play(folder: Path, root: str, quick: bool) -> list[Line]:
    """Write the tasks below the folder and try them."""
    chosen = list({form: (name, job, form) for name, job, form in tasks()}.values()) if quick else tasks()
    forms = {name: form for name, _, form in chosen}
    for name, job, form in chosen:
        write(folder / name, files_of(job, form))
    tried = import_tasks(str(folder), ["--env.base_image", root], progress=progress)
    return [
        Line(
            each.name, forms[each.name], each.solution, each.noop, each.cheat, each.finding is Finding.GOOD, each.reason
        )
        for each in tried.lines
    ]


def progress(line: object) -> None:
    print(line, file=sys.stderr, flush=True)


def report(lines: Sequence[Line]) -> int:
    good, features = sum(line.ok for line in lines), Counter[str]()
    for line in lines:
        print(f"{line.name:<32} oracle {line.oracle}, noop {line.noop}, cheat {line.cheat}  {line.reason}".rstrip())
        features.update(FEATURES[line.form] if line.ok else ())
    print(f"{good} of {len(lines)} tasks: " + ", ".join(f"{count} {name}" for name, count in features.items()))
    return 0 if good == len(lines) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="host", help="a root file system with python3 (default: this machine's)")
    parser.add_argument("--folder", type=Path, help="a new folder that keeps the tasks")
    parser.add_argument("--quick", action="store_true", help="one task of each form")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    try:
        lines = play(folder, options.root, options.quick)
    finally:
        if not options.folder:
            shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    return report(lines)


if __name__ == "__main__":
    raise SystemExit(main())
