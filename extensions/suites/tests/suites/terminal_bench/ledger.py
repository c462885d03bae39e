"""A task of three steps with a service that remembers only while it runs: a ledger that answers over HTTP."""

from __future__ import annotations

from pathlib import Path

from suites.terminal_bench.mini import written

TOML = """\
schema_version = "1.4"
multi_step_reward_strategy = "STRATEGY"
artifacts = ["/app/notes.txt"]
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 60
[environment]
workdir = "/app"
[[steps]]
name = "first"
min_reward = 1.0
[[steps]]
name = "second"
artifacts = [{ source = "/data/entries.txt", service = "ledger" }]
[steps.verifier]
environment_mode = "separate"
[[steps.verifier.collect]]
command = "python3 /srv/ask.py > /data/entries.txt"
service = "ledger"
[[steps]]
name = "third"
[steps.healthcheck]
command = "python3 /app/ask.py | grep -q two"
interval_sec = 0.1
retries = 20
"""
COMPOSE = """\
services:
  main:
    depends_on: {ledger: {condition: service_healthy}}
  ledger:
    build: ./ledger
    healthcheck: {test: [CMD, python3, /srv/ask.py], interval: 200ms, timeout: 5s, retries: 50}
"""
LEDGER = """\
import http.server
entries = []  # only in memory: a ledger that starts again has forgotten them

class Ledger(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(" ".join(entries).encode())

    def do_POST(self):
        entries.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("0.0.0.0", 80), Ledger).serve_forever()
"""
ASK = """\
import sys, urllib.request
data = sys.argv[1].encode() if len(sys.argv) > 1 else None
print(urllib.request.urlopen("http://ledger/", data=data).read().decode())
"""
PAY = "&& echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
SEES_ONE = f'#!/bin/bash\n[ "$(python3 /app/ask.py)" = one ] && [ -e /app/notes.txt ] {PAY}'
REACH = "python3 -c \"import urllib.request as u; u.urlopen('http://198.19.0.3/', timeout=1)\""
SEES_TWO = (
    f"#!/bin/bash\nif {REACH}; then exit 1; fi\n"
    f'[ "$(cat /data/entries.txt)" = "one two" ] && [ -e /app/notes.txt ] && [ ! -e /app/ask.py ] {PAY}'
)
SEES_THREE = f'#!/bin/bash\n[ "$(python3 /app/ask.py)" = "one two three" ] {PAY}'


def make_steps(folder: Path, strategy: str = "mean", **changed: str) -> Path:
    """Write the task; `changed` replaces texts of its files, by path."""
    files = {
        "task.toml": TOML.replace("STRATEGY", strategy),
        "environment/docker-compose.yaml": COMPOSE,
        "environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY ledger/ask.py /app/\n",
        "environment/ledger/Dockerfile": "FROM debian\nCOPY . /srv/\nRUN mkdir -p /data\nCMD python3 /srv/run.py\n",
        "environment/ledger/run.py": LEDGER,
        "environment/ledger/ask.py": ASK,
        "steps/second/tests/Dockerfile": "FROM debian\nRUN mkdir -p /app\nCOPY . /tests\n",
        "steps/third/workdir/setup.sh": '[ -z "$(ls -A /tests 2> /dev/null)" ]\n',
    }
    tests = {"first": SEES_ONE, "second": SEES_TWO, "third": SEES_THREE}
    for name, word in (("first", "one"), ("second", "two"), ("third", "three")):
        files[f"steps/{name}/instruction.md"] = f"Enter `{word}` into the ledger with ask.py.\n"
        files[f"steps/{name}/solution/solve.sh"] = (
            f"#!/bin/bash\npython3 /app/ask.py {word}; echo x >> /app/notes.txt\n"
        )
        files[f"steps/{name}/tests/test.sh"] = tests[name]
    return written(folder / "ledger", files | changed)
