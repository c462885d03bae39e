"""`palaestra run SCRIPT.py --compat`: a script of Atropos runs with no change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from golden_messages import check_message

SCRIPT = """from __future__ import annotations

from typing import Optional

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem
from atroposlib.type_definitions import Item, number
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer


class CoinConfig(BaseEnvConfig):
    sides: int = 2


class CoinEnv(BaseEnv):
    name = "coin"

    @classmethod
    def config_init(cls):
        config = CoinConfig(group_size=2, total_steps=1, tokenizer_name=TOKENIZER, some_setting_of_2024=3)
        return config, [APIServerConfig(model_name="NAME", weight=1.0)]

    async def setup(self):
        self.left = ["heads"]
        self.count = 0

    async def get_next_item(self) -> Optional[Item]:
        return self.left.pop() if self.left else None

    async def collect_trajectory(self, item):
        self.count += 1
        score: number = self.count % self.config.sides
        chat = [{"role": "user", "content": "Toss."}, {"role": "assistant", "content": item}]
        row = tokenize_for_trainer(self.tokenizer, chat, include_messages=True)
        return ScoredDataItem(scores=score, **row), []

    async def evaluate(self, *args, **kwargs): ...


if __name__ == "__main__":
    CoinEnv.cli()
"""


@pytest.mark.slots
def test_an_unchanged_script_runs(tmp_path: Path) -> None:
    from palaestra_contract.chat_tokenizer import ChatTokenizer
    from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
    from palaestra_tokens.tokenizers import load_tokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    save_tokenizer(train_tokenizer(), folder)
    (tmp_path / "coin_env.py").write_text(SCRIPT.replace("TOKENIZER", repr(str(folder)), 1))

    def palaestra(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "palaestra", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    refused = palaestra("run", "coin_env.py", "--policy", "noop")
    assert refused.returncode == 2
    check_message(refused.stderr, "'atroposlib'", "palaestra run coin_env.py --compat")
    done = palaestra("run", "--compat", "coin_env.py", "--policy", "noop")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ignores settings that it does not have: some_setting_of_2024") == 1
    (groups,) = tmp_path.glob("runs/*/*/groups.jsonl")
    group = json.loads(groups.read_text())
    assert sorted(group["scores"]) == [0.0, 1.0]
    tokenizer = ChatTokenizer(load_tokenizer(str(folder)))
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        assert tokenizer.decode([mask for mask in masks if mask != -100]) == "heads<|im_end|>\n"
        assert tokenizer.decode(tokens).startswith("<|im_start|>user\nToss.<|im_end|>")
    again = palaestra("resume", "last", "--compat")
    assert again.returncode == 0, again.stderr


OLD = """
from environments.hermes_base_env import HermesAgentBaseEnv, HermesAgentEnvConfig
from atroposlib.envs.server_handling.server_manager import APIServerConfig


class OldEnv(HermesAgentBaseEnv):
    name = "old"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=1, total_steps=2, max_num_workers=1)
        return config, [APIServerConfig(model_name="m")]

    async def setup(self):
        self.left = ["b", "a"]

    async def get_next_item(self):
        return self.left and {"id": self.left[-1], "solution": f"echo {self.left.pop()} > it"} or None

    def format_prompt(self, item):
        return "Write it"

    async def compute_reward(self, item, result, ctx):
        return float(ctx.terminal("cat it")["output"].strip() == item["id"])

    async def evaluate(self, *args, **kwargs):
        return {}
"""


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of an old script with `--compat`."""
    folder = tmp_path_factory.mktemp("old")
    (folder / "old_env.py").write_text(OLD)
    words = ["run", "old_env.py", "--compat", "--policy", "oracle", "--tasks", "1", "--env.save_workspaces", "true"]
    done = subprocess.run([sys.executable, "-m", "palaestra", *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slots
@pytest.mark.parametrize(
    "words",
    [
        ["resume", "last", "--tasks", "2"],
        ["replay", "last"],
        ["grade", "last"],
        ["grade", "last", "--environment", "old_env.py", "--compat"],
        ["fork", "last", "000000-a/0", "--turn", "0", "--times", "1"],
        ["env", "show", "old_env.py", "--compat"],
        ["env", "check", "old_env.py", "--compat", "--only", "conftest-skip"],
        ["eval", "--compat", "old_env.py", "--policy", "oracle", "--tasks", "1"],
        ["run", "old_env.py", "--compat", "--policy", "oracle", "--on", "processes:1"],
    ],
    ids=" ".join,
)
def test_old_imports_are_remembered_or_allowed_by_the_flag(old_run: Path, words: list[str]) -> None:
    first = str(min(old_run.glob("runs/*/*"), key=lambda path: path.name))
    words = [first if word == "last" else word for word in words]
    done = subprocess.run([sys.executable, "-m", "palaestra", *words], cwd=old_run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
