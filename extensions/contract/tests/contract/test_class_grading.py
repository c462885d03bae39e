"""Reward hooks of class environments see all that the agent left, in its own slot, unless sealed grading is chosen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import palaestra
from envs.scripts import groups_file
from palaestra.cli.main import main

SCRIPT = r"""
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

ASK = "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8123/\")'"
SERVER = f"cd ~ && (python3 -m http.server 8123 > /dev/null 2>&1 &) ; until {ASK} > /dev/null 2>&1; do sleep 0.2; done"
WORKS = {
    "a file in the home directory": ("echo hello > ~/greeting.txt", "grep -q hello ~/greeting.txt"),
    "a tool in /opt": (
        "mkdir -p /opt/t && printf '#!/bin/sh\\necho 42\\n' > /opt/t/run && chmod 755 /opt/t/run && "
        "ln -s /opt/t/run /usr/local/bin/answer",
        "test $(answer) = 42",
    ),
    "a profile": ("echo 'export TOLD=yes' >> ~/.profile", "bash -lc 'test $TOLD = yes'"),
    "a service": (SERVER, ASK),
    "a library": (
        "mkdir -p /opt/l && echo 'int area(void) { return 12; }' > a.c && cc -shared -fPIC -o /opt/l/libarea.so a.c && "
        "echo /opt/l > /etc/ld.so.conf.d/area.conf && ldconfig",
        "python3 -c 'import ctypes; assert ctypes.CDLL(\"libarea.so\").area() == 12'",
    ),
    "own tests": (
        "echo 'double = lambda n: 2 * n' > calc.py; echo 'import calc' > test_calc.py; "
        "echo 'def test_it(): assert calc.double(2) == 4' >> test_calc.py; touch conftest.py",
        "python3 - <<'END'\nimport zipfile\nwheel = zipfile.ZipFile('/tmp/four-1.0-py3-none-any.whl', 'w')\n"
        "wheel.writestr('four.py', 'FOUR = 4')\n"
        "wheel.writestr('four-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: four\\nVersion: 1.0\\n')\n"
        "tag = 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n'\n"
        "wheel.writestr('four-1.0.dist-info/WHEEL', tag)\n"
        "wheel.writestr('four-1.0.dist-info/RECORD', '')\nwheel.close()\nEND\n"
        "python3 -m pip install -q --no-index --target /opt/checks /tmp/four-1.0-py3-none-any.whl && "
        "echo 'import four, calc' > test_all.py && "
        "echo 'def test_four(): assert calc.double(2) == four.FOUR' >> test_all.py && "
        "PYTHONPATH=/opt/checks python3 -c 'import test_all, test_calc; test_all.test_four(); test_calc.test_it()'",
    ),
    "the network": ("cat /proc/net/dev | wc -l > ~/devices", "test $(cat /proc/net/dev | wc -l) = $(cat ~/devices)"),
}

class LeftEnv(HermesAgentBaseEnv):
    name = "left"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=1, total_steps=len(WORKS))
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    async def setup(self):
        self.left = [{"id": name, "prompt": "?", "solution": work} for name, (work, _) in WORKS.items()]

    async def get_next_item(self):
        return self.left.pop(0) if self.left else None

    def format_prompt(self, item):
        return item["prompt"]

    async def compute_reward(self, item, result, ctx):
        if "home" in item["id"] and ctx.read_file("~/greeting.txt").get("content") != "hello\n":
            return 0.0
        return float(ctx.terminal(WORKS[item["id"]][1])["exit_code"] == 0)

    async def evaluate(self, *args, **kwargs): ...

if __name__ == "__main__":
    LeftEnv.cli()
"""


def scores(folder: Path, *flags: str) -> dict[str, float]:
    script = folder / "left_env.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, str(script), "process", "--policy", "oracle", *flags]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in groups_file(folder).read_text().splitlines()]
    return {row["task_id"]: row["scores"][0] for row in rows}


@pytest.mark.slots
def test_a_reward_hook_runs_in_the_agents_own_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scores(tmp_path, "--env.save_workspaces", "true")
    assert set(found.values()) == {1.0}, found
    monkeypatch.chdir(tmp_path)
    run = palaestra.open_run("last")
    again = [sys.executable, "-m", "palaestra", "grade", "last", "--network"]
    graded = subprocess.run(again, capture_output=True, text=True, timeout=100)
    service = next(each for each in run.trajectories if each.task_id == "a service")
    assert graded.returncode == 1, graded.stderr
    assert f"{service.rollout_id} was graded while its processes ran" in graded.stdout + graded.stderr
    others = [line for line in graded.stdout.splitlines() if service.rollout_id not in line]
    assert others == [], "all other rollouts get the same score again"


@pytest.mark.slots
def test_sealed_grading_of_a_class_sees_everything_but_processes(tmp_path: Path) -> None:
    found = scores(tmp_path, "--env.grading", "sealed")
    assert found == {**dict.fromkeys(found, 1.0), "a service": 0.0}


FUNCTIONS = """
from palaestra import NetworkPolicy, Task, environment
from left_env import WORKS

@environment(toolsets=["terminal"])
def functions():
    for name, (work, _) in WORKS.items():
        grading = "live" if name == "a service" else "sealed"
        yield Task(id=name, prompt="?", solution=work, grading=grading)

@functions.score
async def right(task, sandbox):
    return (await sandbox.execute(WORKS[task.id][1], timeout_s=90)).success
"""


@pytest.mark.slots
def test_a_function_form_pays_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("left_env.py").write_text(SCRIPT)
    Path("functions_env.py").write_text(FUNCTIONS)
    assert main(["run", "functions_env.py", "--policy", "oracle", "--env.group_size", "1"]) == 0
    rows = [json.loads(line) for line in groups_file().read_text().splitlines()]
    assert {row["task_id"]: row["scores"] for row in rows} == {row["task_id"]: [1.0] for row in rows}
    assert len(rows) == 7
