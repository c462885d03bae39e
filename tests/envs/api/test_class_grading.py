"""Reward hooks of class environments see all that the agent left, in its own slot, unless sealed grading is chosen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import palaestra
from envs.scripts import groups_file

SCRIPT = r"""
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

SERVER = "cd ~ && (python3 -m http.server 8123 > /dev/null 2>&1 &) ; sleep 0.5"
WORKS = {
    "a file in the home directory": ("echo hello > ~/greeting.txt", "grep -q hello ~/greeting.txt"),
    "a tool in /opt": (
        "mkdir -p /opt/t && printf '#!/bin/sh\\necho 42\\n' > /opt/t/run && chmod 755 /opt/t/run && "
        "ln -s /opt/t/run /usr/local/bin/answer",
        "test $(answer) = 42",
    ),
    "a profile": ("echo 'export TOLD=yes' >> ~/.profile", "bash -lc 'test $TOLD = yes'"),
    "a service": (SERVER, "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8123/\")'"),
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
        return float(ctx.terminal(WORKS[item["id"]][1])["exit_code"] == 0)

    async def evaluate(self, *args, **kwargs): ...

if __name__ == "__main__":
    LeftEnv.cli()
"""


def scores(folder: Path, *flags: str) -> dict[str, float]:
    script = folder / "left_env.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, str(script), "process", "--policy", "oracle", *flags]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=100)
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
def test_sealed_grading_of_a_class_keeps_its_network_but_no_process(tmp_path: Path) -> None:
    found = scores(tmp_path, "--env.grading", "sealed", "--env.graded_paths", '["/root"]')
    assert found["the network"] == found["a file in the home directory"] == 1.0
    assert found["a service"] == 0.0
