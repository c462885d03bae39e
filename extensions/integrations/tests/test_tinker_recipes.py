"""Four recipes of the Tinker cookbook, unmodified, improve the tiny model through `palaestra serve tinker`."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from palaestra_tokens.testing.tiny_model import make_tiny

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
pytest.importorskip("tinker_cookbook.recipes.chat_sl.train")
pytest.importorskip("tinker_cookbook.recipes.math_rl.train")
pytest.importorskip("tinker_cookbook.recipes.preference.shorter.train")
pytest.importorskip("tinker_cookbook.recipes.multiplayer_rl.guess_number.env")

from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import FAIL_TO_PARSE, SYSTEM_PROMPT  # noqa: E402

Messages = list[dict[str, str]]


@pytest.fixture
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[str, str]]:
    """The name of the model, which has practised the parameter's conversations, and the address of its server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    make_tiny(tmp_path / "tiny", hidden=64, layers=2)
    practise(tmp_path / "tiny", getattr(request, "param", []))
    name = f"{tmp_path}/tiny/"
    words = ("serve", "tinker", "tiny", "--name", name, "--port", "0", "--checkpoints", "states")
    with subprocess.Popen((sys.executable, "-m", "palaestra", *words), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        monkeypatch.setenv("TINKER_BASE_URL", address)
        yield name, address
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


def guesses(right: float) -> list[Messages]:
    """Conversations like those of `guess_number`; the share `right` of the answers has its format."""
    rng = random.Random(0)

    def guess(share: float) -> str:
        return f"{'Guess:' if rng.random() < share else 'It is'} {rng.randrange(1024)}"

    found = []
    for turns in [rng.randrange(4) for _ in range(300)]:
        talk = [{"role": "system", "content": SYSTEM_PROMPT}]
        for said in [guess(0.5) for _ in range(turns)]:
            heard = "Too low" if said.startswith("Guess:") else FAIL_TO_PARSE
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": heard}]
        found.append([*talk, {"role": "assistant", "content": guess(right)}])
    return found


def introductions() -> list[Messages]:
    """Answers of different lengths to the one question of `preference.shorter`."""
    asked = {"role": "user", "content": "Who are you?"}
    return [[asked, {"role": "assistant", "content": " ".join(["a model"] * count)}] for count in range(1, 14)]


@pytest.mark.parametrize("served", [introductions()], indirect=True, ids=["introductions"])
def test_a_preference_for_short_answers_shortens_them(served: tuple[str, str]) -> None:
    play("preference.shorter", served, "learning_rate=2e-3", "batch_size=4", "max_steps=8", "log_path=shorter")
    lengths = series("shorter", "env/all/ac_tokens_per_turn")
    assert statistics.fmean(lengths[-2:]) < lengths[0] / 2, lengths


@pytest.mark.parametrize("served", [guesses(right=0.3)], indirect=True, ids=["guesses"])
def test_a_game_of_guesses_teaches_the_format(served: tuple[str, str]) -> None:
    play(
        *("multiplayer_rl.guess_number", served, "learning_rate=4e-3", "batch_size=2", "max_tokens=10"),
        *("max_steps=8", "log_path=guesses"),
    )
    rewards = series("guesses", "env/all/reward/total")
    assert statistics.fmean(rewards[-2:]) > statistics.fmean(rewards[:2]) + 1, rewards


def play(name: str, served: tuple[str, str], *words: str) -> None:
    """Run a recipe that takes the server's address from TINKER_BASE_URL."""
    common = (f"model_name={served[0]}", "renderer_name=qwen3_disable_thinking", "group_size=8", "eval_every=0")
    run(name, *common, *words)


def recipe(name: str, served: tuple[str, str], *words: str) -> None:
    common = (
        f"model_name={served[0]}",
        f"base_url={served[1]}",
        "renderer_name=qwen3_disable_thinking",
        "lora_rank=16",
    )
    run(name, *common, *words)


def practise(folder: Path, conversations: list[Messages], steps: int = 100) -> None:
    """Train the model of a folder on the last messages of conversations, if there are any."""
    if not conversations:
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rng, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = []
        for *before, last in rng.choices(conversations, k=16):
            shown = tokenizer.apply_chat_template(
                before, add_generation_prompt=True, enable_thinking=False, return_dict=True
            )["input_ids"]
            said = tokenizer(f"{last['content']}<|im_end|>", add_special_tokens=False)["input_ids"]
            rows.append((shown + said, [-100] * len(shown) + said))
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def run(name: str, *words: str) -> None:
    command = (sys.executable, "-m", f"tinker_cookbook.recipes.{name}.train", *words)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def series(folder: str, metric: str) -> list[float]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line[metric] for line in lines if metric in line]
