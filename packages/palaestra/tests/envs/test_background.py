"""What an agent left running ends with its rollout, and nothing that grades it can see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.processes import table

pytestmark = pytest.mark.slots

ENVIRONMENT = '''
"""The agent starts a server-like process and leaves it; the check looks for it, and starts one itself."""

import json

from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig
from palaestra_slots.core.types import ToolStep

LEFT = "cp $(command -v sleep) left-2001; touch up; exec ./left-2001 2001"


class LeftEnv(HermesAgentBaseEnv):
    name = "left"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=1, total_steps=1)
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    async def setup(self):
        self.left = [{"id": "one", "prompt": "?", "solution": [
            ToolStep("terminal", {"command": LEFT, "background": True, "notify_on_complete": True}),
            "until pgrep -x left-2001; do :; done",
        ]}]

    async def get_next_item(self):
        return self.left.pop() if self.left else None

    def format_prompt(self, item):
        return item["prompt"]

    async def compute_reward(self, item, result, ctx):
        assert ctx.terminal("test -e up && test -e left-2001")["exit_code"] == 0
        assert ctx.terminal("pgrep -x left-2001")["exit_code"] == 1
        assert json.loads(ctx.call_tool("process", {"action": "list"})) == {"processes": []}
        started = json.loads(ctx.call_tool("terminal", {"command": "exec sleep 2002", "background": True}))
        assert ctx.terminal(f"kill -0 {started['pid']}")["exit_code"] == 0
        ctx.cleanup()
        assert ctx.terminal(f"kill -0 {started['pid']}")["exit_code"] == 1
        return 1.0

    async def evaluate(self, *args, **kwargs):
        return {}


if __name__ == "__main__":
    LeftEnv.cli()
'''


def test_sealed_grading_ends_what_a_rollout_left_running(tmp_path: Path) -> None:
    path = tmp_path / "left_env.py"
    path.write_text(ENVIRONMENT)
    command = [
        sys.executable,
        str(path),
        "process",
        *("--policy", "oracle", "--env.grading", "sealed"),
        "--env.data_path_to_save_groups",
        "out.jsonl",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (group,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert group["scores"] == [1.0]
    assert "session_id" in str(group["messages"])
    assert [process for process in table() if process.name == "left-2001"] == []
