"""What a reward function can do with `ctx`: files of any kind in both directions, searches, tools that are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.scripts import groups_file
from palaestra.cli.main import main

ENV = """
import os
from pathlib import Path
from palaestra import HermesAgentBaseEnv, HermesAgentEnvConfig, APIServerConfig

HERE = Path(__file__).parent


class FilesEnv(HermesAgentBaseEnv):
    name = "files"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal", "file"], group_size=1, total_steps=1)
        return config, [APIServerConfig()]

    async def setup(self): ...

    async def get_next_item(self):
        return {"id": "one", "solution": "mkdir out; head -c 300000 /dev/zero > out/zeros; echo needle > out/hay"}

    def format_prompt(self, item):
        return "?"

    async def compute_reward(self, item, result, ctx):
        got = ctx.download_file("out/zeros", HERE / "zeros")
        assert got == {"success": True, "bytes": 300000, "exit_code": 0, "output": ""}, got
        assert (HERE / "zeros").read_bytes() == bytes(300000)
        missing = ctx.download_file("out/none", HERE / "none")
        assert missing["success"] is False and "out/none" in missing["error"], missing
        both = await ctx.download_dir_async("out", HERE / "both")
        assert [(each["path"], each["success"], each["bytes"]) for each in both] == [
            ("hay", True, 7), ("zeros", True, 300000)
        ], both
        assert [each["exit_code"] for each in ctx.upload_dir(HERE / "both", "again")] == [0, 0]
        (HERE / "tests.py").write_bytes(b"print(6 * 7)\\n\\xff"[:-1])
        assert ctx.upload_file(HERE / "tests.py", "/tmp/checks/tests.py") ["bytes"] == 13
        assert ctx.terminal("python3 /tmp/checks/tests.py; cmp out/zeros again/zeros")["output"] == "42\\n"
        # one dict for each file, or one dict that says what failed
        failures = [
            ctx.upload_file(HERE / "nothing", "x"), *ctx.upload_dir(HERE / "nothing", "x"),
            *ctx.upload_dir(HERE / "tests.py", "x"), ctx.download_file("nothing", HERE / "x"),
            *ctx.download_dir("nothing", HERE / "x"), ctx.download_file("out/hay", HERE / "tests.py/x"),
        ]
        assert [(each["success"], each["exit_code"], each["error"] == each["output"]) for each in failures] == [
            (False, -1, True)
        ] * 6, failures
        assert ctx.download_file("out/hay", HERE / "new" / "folder" / "hay")["success"]
        assert (HERE / "new" / "folder" / "hay").read_text() == "needle\\n"
        ctx.terminal("mkdir odd; mkfifo odd/pipe; ln -s ../out/hay odd/link; mkdir odd/deep; touch odd/deep/empty")
        odd = ctx.download_dir("odd", HERE / "odd")
        assert [(each["path"], each["success"]) for each in odd] == [
            ("deep/empty", True), ("link", True), ("/workspace/odd/pipe", False)
        ], odd
        assert [ctx.terminal("true")["error"], ctx.terminal("exit 3")["error"]] == [None, None]
        slow = ctx.terminal("sleep 9", timeout=1)
        assert slow["exit_code"] == 124 and "timed out after 1s" in slow["error"], slow
        assert "needle" in str(ctx.search("needle")), ctx.search("needle")
        assert "web_search" in ctx.web_search("x")["error"]
        assert "error" in ctx.browser_navigate("http://127.0.0.1")
        assert "error" in ctx.web_extract(["x"]) and "error" in ctx.browser_snapshot()
        return 1.0

    async def evaluate(self, *args, **kwargs): ...
"""


@pytest.mark.slots
def test_a_reward_function_moves_files_and_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("files_env.py").write_text(ENV)
    argv = ["run", "files_env.py", "process", "--policy", "oracle"]
    assert main(argv) == 0
    assert json.loads(groups_file().read_text())["scores"] == [1.0]
