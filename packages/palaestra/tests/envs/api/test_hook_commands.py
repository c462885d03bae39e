"""A check whose command lacks a network, a program or a file says so, and names the setting that changes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import palaestra

pytestmark = pytest.mark.slots

CLASS = r"""
import asyncio
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

COMMANDS = {
    "network": "python3 -c 'import urllib.request as u; u.urlopen(\"http://pypi.invalid/simple\")'",
    "program": "no-such-linter --version",
    "file": "cat /data/answer.txt",
    "fine": "false",
}

class CheckedEnv(HermesAgentBaseEnv):
    name = "checked"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=1, total_steps=4, allow_network=False)
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    async def setup(self):
        self.left = list(COMMANDS)

    async def get_next_item(self):
        return {"id": self.left.pop(0)} if self.left else None

    def format_prompt(self, item):
        return "?"

    async def compute_reward(self, item, result, ctx):
        if item["id"] == "program":
            return float('"exit_code": 0' in ctx.call_tool("terminal", {"command": COMMANDS["program"]}))
        return float(ctx.terminal(COMMANDS[item["id"]])["exit_code"] == 0)

    async def evaluate(self, *args, **kwargs): ...
HOOK

if __name__ == "__main__":
    CheckedEnv.cli()
"""

VERIFY = r"""
    async def verify_and_score_trajectory(self, item, result, *, trajectory_id, exec_tool, workspace_meta=None):
        done = await exec_tool("bash", {"command": COMMANDS[item["id"]]})
        if not done.success:
            raise RuntimeError("the check gave up")
        return 1.0, {}
"""

FUNCTION = r"""
from palaestra import Task, environment

UNTRUSTED = '''
cd /tmp; openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -subj /CN=localhost -days 1 2>/dev/null
openssl s_server -key key -cert cert -accept 8443 -quiet >/dev/null 2>&1 & sleep 1
python3 -c "import urllib.request as u; u.urlopen('https://localhost:8443')"
'''

@environment
def checks():
    connect = "import socket; socket.create_connection(('192.0.2.1', 9))"
    yield Task(id="network", prompt="?", data=f'python3 -c "{connect}"')
    yield Task(id="trust", prompt="?", data=UNTRUSTED)
    yield Task(id="file", prompt="?", data="test -e /data/answer.txt || { cat /data/answer.txt; exit 3; }")

@checks.score
async def correct(task, sandbox):
    done = await sandbox.execute(task.data)
    return done.success and (await sandbox.execute("true")).success or (
        task.id == "file" and (await sandbox.execute("cat /data/other.txt")).success)
"""


def played(folder: Path, text: str, *flags: str) -> str:
    script = folder / "checked_env.py"
    script.write_text(text)
    argv = [sys.executable, "-m", "palaestra", "run", str(script), "--policy", "noop", *flags]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=100).stderr


def test_a_zero_names_what_its_check_lacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = played(tmp_path, CLASS.replace("HOOK", ""))
    assert "set --env.allow_network true" in shown
    assert "no-such-linter --version` failed" in shown
    assert "the check's sandbox lacks it" in shown
    assert "`cat /data/answer.txt` failed: cat: /data/answer.txt: No such file or directory" in shown
    assert shown.count("scored 0 after a command of the check failed") == 3, shown
    monkeypatch.chdir(tmp_path)
    causes = {each.task_id: each.detail.get("missing_in_check") for each in palaestra.open_run("last").trajectories}
    assert causes["fine"] is None
    assert "set --env.allow_network true" in causes["network"][0]


def test_an_error_of_a_hook_names_what_its_check_lacked(tmp_path: Path) -> None:
    shown = played(tmp_path, CLASS.replace("HOOK", VERIFY))
    assert "RuntimeError: the check gave up" in shown
    assert "set --env.allow_network true" in shown
    assert "no-such-linter --version` failed" in shown


def test_a_zero_of_a_function_names_what_its_check_lacked(tmp_path: Path) -> None:
    shown = played(tmp_path, FUNCTION)
    assert "give the task network=NetworkPolicy(grade=Network.ON)" in shown
    assert "the agent did not leave the file, or the check shows the prepared version of it" in shown
    assert "`cat /data/other.txt` failed" in shown
    assert "add its authority to the task's" in shown
