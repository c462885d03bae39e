"""Trajectory API, environment and trainer as processes, with a Tinker server, while each is killed at random."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from note_environment import NOTE

from palaestra.rollouts.observe.training_steps import read_steps
from palaestra_tokens.testing.tiny_model import make_tiny

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.slots,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("tinker") is None, reason="needs the extra 'tinker': make test-torch"),
]

KILLS = int(os.environ.get("PALAESTRA_CHAIN_KILLS", "3"))
"""The more the longer: each costs the start of a process."""
STEPS = 16 + 2 * KILLS
SAVE_EVERY = 4
SCORE = """@note.score
async def ran(rollout: Rollout) -> float:
    replies = [each["content"] for each in rollout.result.messages if each["role"] == "tool"]
    return 1.0 * any('"error"' not in reply for reply in replies)
"""


class Chain:
    """The three processes in a folder. Each is started again with the same words, `feed` with --resume."""

    def __init__(self, folder: Path, tinker_url: str) -> None:
        self.folder = folder
        api, weights = _free_port(), _free_port()
        self.weights = weights
        settings = ["--env.max_agent_turns=2", "--env.max_token_length=32", "--env.n=100000"]
        server = ["--openai.server_type=sglang", f"--base-url=http://127.0.0.1:{weights}", "--model=tiny"]
        self.words = {
            "api": ["serve", "api", "--port", str(api), "--store", "groups.jsonl"],
            "trainer": [
                *("train", "--batches-from", f"http://127.0.0.1:{api}", "--trainer", "tinker", "--model", "tiny/"),
                *("--tinker-url", tinker_url, "--port", str(weights), "--out", "chain", "--batch", "16"),
                *("--most-tokens=512", f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", "--learning-rate=2e-3"),
                *("--lora-rank=8",),
            ],
            "feed": [
                *("feed", "note_env.py", "--group=8", "--concurrency=2", *server, *settings, "--max-infra-rate=1"),
                *("--to", f"http://127.0.0.1:{api}", "--env.max_batches_offpolicy=2"),
            ],
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        words = [*self.words[name]]
        if name == "feed" and list((self.folder / "runs").glob("note--*/*/journal.jsonl")):
            words += ["--resume", "last"]
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "palaestra", *words]
            self.running[name] = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGKILL)
        self.running.pop(name).wait()

    def revive(self) -> None:
        """Start what was killed or has failed: an environment as soon as there is a model to ask."""
        for name in self.words:
            ended = name not in self.running or self.running[name].poll() not in (None, 0)
            if ended and (name != "feed" or _listens(self.weights)):
                self.start(name)

    def close(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def tinker_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    make_tiny(tmp_path / "tiny", practice=150, hidden=64, layers=2)
    (tmp_path / "note_env.py").write_text(NOTE + SCORE)
    words = ("serve", "tinker", "tiny", "--name", "tiny/", "--port", "0", "--checkpoints", "states")
    command = (sys.executable, "-m", "palaestra", *words)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


def test_killed_anywhere_the_chain_trains_each_batch_once(tmp_path: Path, tinker_url: str) -> None:
    rng = random.Random(KILLS)
    chain, kills = Chain(tmp_path, tinker_url), 0
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "chain").mkdir()
    due: float | None = None
    try:
        while True:
            chain.revive()
            _keep_batches(tmp_path, kept)
            done = len(_steps(tmp_path))
            if done and due is None and kills < KILLS:
                due = time.monotonic() + rng.uniform(0.5, 8)
            if due is not None and time.monotonic() > due:
                chain.kill(rng.choice(list(chain.running)))  # an environment may be waiting for the trainer
                kills, due = kills + 1, None
            trainer = chain.running.get("trainer")
            if done >= STEPS and trainer is not None and trainer.poll() is not None:
                assert trainer.returncode == 0
                break
            time.sleep(0.02)
    finally:
        chain.close()
    _keep_batches(tmp_path, kept)
    assert kills == KILLS
    assert _steps(tmp_path) == list(range(1, STEPS + 1))
    batches = {int(path.stem): json.loads(path.read_bytes()) for path in kept.glob("*.json")}
    assert sorted(batches) == list(range(1, STEPS + 1))
    groups = [json.dumps(group) for batch in batches.values() for group in batch]
    assert len(set(groups)) == len(groups), "a group was trained twice"
    events = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_bytes().splitlines()[1:]]
    taken = [event["serials"] for event in events if event.get("event") == "batch"]
    serials = [serial for batch in taken for serial in batch]
    assert len(set(serials)) == len(serials), "a group was given to the trainer twice"
    lost = len(taken) - STEPS
    assert 0 <= lost <= KILLS
    rewards = [line["reward"] for line in read_steps(tmp_path / "chain")]
    first, last = sum(rewards[:6]) / 6, sum(rewards[-6:]) / 6
    print(f"{kills} kills, {STEPS} steps, {lost} batches lost on the way, reward {first:.2f} to {last:.2f}")
    assert last > first


def _steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_steps(folder / "chain")]


def _keep_batches(folder: Path, kept: Path) -> None:
    """Copy the batches on the trainer's disk, and compare those that it still has with the copies."""
    for path in (folder / "chain" / "training" / "batches").glob("[0-9]*.json"):
        with contextlib.suppress(FileNotFoundError):  # a checkpoint has it now
            if (kept / path.name).exists():
                assert (kept / path.name).read_bytes() == path.read_bytes(), "another batch for the same step"
            else:
                shutil.copyfile(path, kept / f".{path.name}")
                (kept / f".{path.name}").rename(kept / path.name)
