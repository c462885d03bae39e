"""docs/atropos.md: an environment of Atropos runs, and what the page says is tested where it says so."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from envs.scripts import groups_file
from palaestra.cli.main import main
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.fake_engine import ToyEngine
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "atropos.md").read_text("utf-8")
SCRIPT = """
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

class CoinEnv(BaseEnv):
    name = "coin"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=2), [APIServerConfig(model_name="NAME", base_url="http://localhost:8000/v1")]

    async def setup(self):
        self.left = ["heads", "tails"]

    async def get_next_item(self):
        return self.left.pop() if self.left else None

    async def collect_trajectory(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            asked = [{"role": "user", "content": "Heads or tails?"}]
            said = await managed.chat_completion(messages=asked, max_tokens=8)
            node = managed.get_state()["nodes"][-1]
        score = float(item in (said.choices[0].message.content or ""))
        row = {"tokens": node.tokens, "masks": node.masked_tokens, "inference_logprobs": node.logprobs}
        return row | {"scores": score}, []

    async def evaluate(self, *args, **kwargs):
        return None

if __name__ == "__main__":
    CoinEnv.cli()
"""
"""An environment as Atropos's documentation writes them."""


async def rolled_out(script: Path, model: Path) -> tuple[int, str]:
    """Run the script's `process` against a model that says heads."""
    tokenizer = load_tokenizer(str(model))
    async with TokenLoopback(ToyEngine(tokenizer, itertools.repeat("heads")), tokenizer) as server:
        flags = {"--env.tokenizer_name": str(model), "--openai.server_type": "vllm", "--openai.base_url": server.url}
        command = [sys.executable, str(script), "process", *itertools.chain(*flags.items())]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=script.parent, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.slots
def test_an_environment_runs_when_it_is_ported(tmp_path: Path) -> None:
    script, model = tmp_path / "their_env.py", tmp_path / "model"
    script.write_text(SCRIPT)
    assert main(["env", "port", str(script), "--write"]) in (0, None)
    model.mkdir()
    save_tokenizer(train_tokenizer(), model)
    code, said = asyncio.run(rolled_out(script, model))
    assert code == 0, said
    groups = [json.loads(line) for line in groups_file(tmp_path).read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[0.0] * 2, [1.0] * 2]
    assert all(len(row) for group in groups for row in group["inference_logprobs"])


def test_each_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests/interop").glob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)\(", source, re.MULTILINE))
    assert named
    assert named <= defined
