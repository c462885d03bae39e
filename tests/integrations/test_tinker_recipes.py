"""Two recipes of the Tinker cookbook, unmodified, improve the tiny model through `palaestra serve tinker`."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from palaestra.testing.tiny_model import make_tiny

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
pytest.importorskip("tinker_cookbook.recipes.chat_sl.train")
pytest.importorskip("tinker_cookbook.recipes.math_rl.train")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """The name of the model, and the address of its server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    make_tiny(tmp_path / "tiny", hidden=64, layers=2)
    name = f"{tmp_path}/tiny/"
    words = ("serve", "tinker", "tiny", "--name", name, "--port", "0", "--checkpoints", "states")
    with subprocess.Popen((sys.executable, "-m", "palaestra", *words), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield name, server.stdout.readline().strip()
        server.terminate()


def test_supervised_training_and_arithmetic_improve_the_model(served: tuple[str, str], tmp_path: Path) -> None:
    rng, sums = random.Random(0), tmp_path / "sums.jsonl"
    with sums.open("w") as file:
        for _ in range(448):
            x, y = rng.randrange(101), rng.randrange(101)
            said = {"user": f"What is {x} + {y}?", "assistant": str(x + y)}
            messages = [{"role": role, "content": text} for role, text in said.items()]
            file.write(json.dumps({"messages": messages}) + "\n")
    recipe("chat_sl", served, f"dataset={sums}", "learning_rate=6e-3", "batch_size=32", "num_epochs=1", "log_path=sl")
    losses = series("sl", "train_mean_nll")
    assert losses[-1] < losses[0] - 1, losses
    state = json.loads((tmp_path / "sl" / "checkpoints.jsonl").read_text().splitlines()[-1])["state_path"]
    recipe(
        *("math_rl", served, "env=arithmetic", f"load_checkpoint_path={state}", "learning_rate=1e-3"),
        *("groups_per_batch=8", "group_size=16", "max_steps=10", "log_path=rl"),
    )
    rewards = series("rl", "env/all/reward/total")
    assert statistics.fmean(rewards[-3:]) > rewards[0] + 0.01, rewards


def recipe(name: str, served: tuple[str, str], *words: str) -> None:
    common = (
        f"model_name={served[0]}",
        f"base_url={served[1]}",
        "renderer_name=qwen3_disable_thinking",
        "lora_rank=16",
    )
    command = (sys.executable, "-m", f"tinker_cookbook.recipes.{name}.train", *common, *words)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def series(folder: str, metric: str) -> list[float]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line[metric] for line in lines if metric in line]
