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
        assert got == {"success": True, "bytes": 300000}, got
        assert (HERE / "zeros").read_bytes() == bytes(300000)
        missing = ctx.download_file("out/none", HERE / "none")
        assert missing["success"] is False and "out/none" in missing["error"], missing
        both = await ctx.download_dir_async("out", HERE / "both")
        assert both == {"success": True, "bytes": 300007, "files": 2, "left_out": []}, both
        assert ctx.upload_dir(HERE / "both", "again")["files"] == 2
        (HERE / "tests.py").write_bytes(b"print(6 * 7)\\n\\xff"[:-1])
        assert ctx.upload_file(HERE / "tests.py", "/tmp/checks/tests.py") == {"success": True, "bytes": 13}
        assert ctx.terminal("python3 /tmp/checks/tests.py; cmp out/zeros again/zeros")["output"] == "42\\n"
        assert ctx.upload_file(HERE / "nothing", "x")["success"] is False
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
