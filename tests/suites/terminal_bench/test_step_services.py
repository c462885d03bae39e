"""Tasks of several steps whose services run from the first step to the last one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from palaestra.core.types import Blame
from palaestra.suites.terminal_bench.import_tasks import Finding
from palaestra.suites.toolchain.toolchain import DependencyCache
from programs import killed_after, until
from sandbox.backends.test_local_lifetime import assert_gone
from sandbox.processes import descendants
from suites.terminal_bench.conftest import Try, played_all
from suites.terminal_bench.mini import written

pytestmark = pytest.mark.slots

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
SEES_TWO = (
    "#!/bin/bash\nif python3 -c \"import socket; socket.create_connection(('198.19.0.3', 80), 1)\"; then exit 1; fi\n"
    f'[ "$(cat /data/entries.txt)" = "one two" ] && [ -e /app/notes.txt ] && [ ! -e /app/ask.py ] {PAY}'
)
SEES_THREE = f'#!/bin/bash\n[ "$(python3 /app/ask.py)" = "one two three" ] {PAY}'


def make_steps(folder: Path, strategy: str = "mean", **changed: str) -> Path:
    """Write the task; `changed` replaces texts of its files, by path."""
    files = {
        "task.toml": TOML.replace("STRATEGY", strategy),
        "environment/docker-compose.yaml": COMPOSE,
        "environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY ledger/ask.py /app/\n",
        "environment/ledger/Dockerfile": 'FROM debian\nCOPY . /srv/\nRUN mkdir -p /data\nCMD ["python3", "/srv/run.py"]\n',
        "environment/ledger/run.py": LEDGER,
        "environment/ledger/ask.py": ASK,
        "steps/second/tests/Dockerfile": "FROM debian\nRUN mkdir -p /app\nCOPY . /tests\n",
        "steps/third/workdir/setup.sh": "[ ! -e /tests ] && touch /app/third\n",
    }
    tests = {"first": SEES_ONE, "second": SEES_TWO, "third": SEES_THREE}
    for name, word in (("first", "one"), ("second", "two"), ("third", "three")):
        files[f"steps/{name}/instruction.md"] = f"Enter `{word}` into the ledger with ask.py.\n"
        files[f"steps/{name}/solution/solve.sh"] = (
            f"#!/bin/bash\npython3 /app/ask.py {word}; echo x >> /app/notes.txt\n"
        )
        files[f"steps/{name}/tests/test.sh"] = tests[name]
    return written(folder / "ledger", files | changed)


def test_services_keep_their_state_from_step_to_step(try_tasks: Try, tmp_path: Path) -> None:
    """The second step has a verifier of its own, which reaches no service; the agent's slot runs on beside it."""
    make_steps(tmp_path / "tasks")
    line = try_tasks(tmp_path / "tasks")["ledger"]
    assert line.finding is Finding.GOOD, line.reason
    assert (line.noop, line.solution) == (0.0, 1.0)


@pytest.mark.parametrize(("strategy", "reward"), [("mean", 2 / 3), ("final", 0.0)])
def test_rewards_of_steps_with_services_are_combined(
    installed_pytest: DependencyCache, tmp_path: Path, strategy: str, reward: float
) -> None:
    make_steps(tmp_path / "tasks", strategy, **{"steps/third/solution/solve.sh": "#!/bin/bash\ntrue\n"})
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["ledger"]
    assert (done.reward, done.official) == (pytest.approx(reward), pytest.approx(reward)), done.error
    assert [step["reward"] for step in done.detail["steps"]] == [1.0, 1.0, 0.0]
    assert all(step["services"]["ledger"]["exit_code"] is None for step in done.detail["steps"])


def test_an_early_step_that_fails_is_the_last_one(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    make_steps(tmp_path / "tasks", **{"steps/first/solution/solve.sh": "#!/bin/bash\ntrue\n"})
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["ledger"]
    assert (done.reward, done.metrics["steps_verified"]) == (0.0, 1.0), done.error


def test_a_health_check_that_work_breaks_ends_the_steps(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    """The third step waits for `two`; for Harbor, a step that cannot begin has no reward."""
    quick = TOML.replace("STRATEGY", "mean").replace("retries = 20", "retries = 1\ntimeout_sec = 1")
    make_steps(tmp_path / "tasks", **{"task.toml": quick, "steps/second/solution/solve.sh": "#!/bin/bash\ntrue\n"})
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["ledger"]
    assert [step["reward"] for step in done.detail["steps"]] == [1.0, 0.0, 0.0], done.error
    assert (done.reward, done.official) == (pytest.approx(1 / 3), 0.5)
    assert [label.name for label in done.labels] == ["set_up_failed"]


def test_a_health_check_of_the_first_step_that_fails_is_the_tasks_fault(
    installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    check = '[steps.healthcheck]\ncommand = "false"\nretries = 1\ninterval_sec = 0.1\ntimeout_sec = 0.1\n'
    text = TOML.replace("STRATEGY", "mean").replace("min_reward = 1.0\n", f"min_reward = 1.0\n{check}")
    make_steps(tmp_path / "tasks", **{"task.toml": text})
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["ledger"]
    assert (done.reward, done.blame) == (None, Blame.TASK)
    assert "the health check of step first fails" in done.error


def test_a_killed_run_goes_on_and_leaves_nothing(tmp_path: Path) -> None:
    """The run is killed while its second step waits, and played to its end afterwards."""
    waiting = "#!/bin/bash\n[ -e /app/again ] || sleep 1.5\npython3 /app/ask.py two\n"
    make_steps(tmp_path / "tasks", **{"steps/second/solution/solve.sh": waiting})
    home = tmp_path / "tmp"
    home.mkdir()
    settings = ["--env.dataset_name", str(tmp_path / "tasks"), "--env.base_image", "host"]
    settings += ["--env.cache_dir", str(tmp_path / "cache"), "--policy", "oracle"]
    palaestra = [sys.executable, "-m", "palaestra"]
    command = [*palaestra, "run", "terminalbench_2", "evaluate", *settings]
    place: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "TMPDIR": str(home)}}

    def commands(pid: int) -> list[str]:
        paths = [Path(f"/proc/{process.pid}/cmdline") for process in descendants(pid)]
        return [path.read_bytes().replace(b"\0", b" ").decode() for path in paths if path.exists()]

    with killed_after(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **place) as run:
        until(lambda: any("sleep 1.5" in each for each in commands(run.pid)), "the second step waits")
        pids = {process.pid for process in descendants(run.pid)}
    assert_gone(pids)
    done = subprocess.run([*command, "--resume", "last"], capture_output=True, text=True, **place)
    assert done.returncode == 0, done.stderr
    assert "mean reward 1.000" in done.stdout + done.stderr
    assert [path.name for path in home.iterdir()] == []
