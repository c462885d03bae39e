"""The hooks of the class form see what the agent and the set-up wrote to `/tmp` and `/dev/shm`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from envs.scripts import groups_file

SCRIPT = """
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

class ScratchEnv(HermesAgentBaseEnv):
    name = "scratch"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=1, total_steps=2)
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    async def setup(self):
        self.left = [{"id": "a", "prompt": "?", "solution": "cp /tmp/seed /dev/shm/made; cp /tmp/seed /var/tmp/made"}]
        self.left.append({"id": "b", "prompt": "?", "solution": "(sleep 1000 &) > /dev/null 2>&1"})

    async def get_next_item(self):
        return self.left.pop(0) if self.left else None

    def format_prompt(self, item):
        return item["prompt"]

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        await exec_tool("terminal", {"command": "echo seed > /tmp/seed"})

    async def verify_and_score_trajectory(self, item, result, *, trajectory_id, exec_tool, workspace_meta=None):
        seen = await exec_tool("terminal", {"command": "cat /tmp/seed /dev/shm/made /var/tmp/made"})
        return float(seen.output.split().count("seed") == 3), {}

    async def compute_reward(self, item, result, ctx):
        raise AssertionError

    async def evaluate(self, *args, **kwargs): ...

if __name__ == "__main__":
    ScratchEnv.cli()
"""


@pytest.mark.slots
def test_scratch_files_are_graded(tmp_path: Path) -> None:
    """Also when the kept workspaces are graded again."""
    script = tmp_path / "scratch_env.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, str(script), "process", "--policy", "oracle", "--env.save_workspaces", "true"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    first, second = [json.loads(line) for line in groups_file(tmp_path).read_text().splitlines()]
    assert first["scores"] == [1.0]
    assert second["scores"] == [0.0]
    assert done.stderr.count("had processes when they ended") == 1
    again = [sys.executable, "-m", "palaestra", "grade", "last"]
    graded = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (graded.returncode, graded.stdout) == (0, ""), graded.stderr
