"""SkyRL's Tinker server trains for us, with the version of the SDK that SkyRL pins."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from note_environment import NOTE

import palaestra
from palaestra.rollouts.observe.training_steps import read_steps
from palaestra_tokens.testing.tiny_model import make_tiny

pytestmark = [
    pytest.mark.slots,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("skyrl") is None, reason="skyrl is not installed (make faces)"),
]
SCORE = """@note.score
async def some(rollout: Rollout) -> float:
    return 0.5 * (rollout.index % 2)
"""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server of `tiny/`. It starts its engine by `uv run`, as it was started itself."""
    monkeypatch.chdir(tmp_path)
    make_tiny(tmp_path / "tiny", practice=60, hidden=64, layers=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["uv", "run", "--no-project", "--python", sys.executable, "-m", "skyrl.tinker.api", "--backend", "jax"]
    words += ["--base-model", f"{tmp_path}/tiny/", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--checkpoints-base", f"{tmp_path}/states", "--database-url", f"sqlite:///{tmp_path}/tinker.db"]
    words += ["--backend-config", '{"max_lora_adapters": 4, "max_lora_rank": 4}']
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (
        (tmp_path / "server.log").open("wb") as log,
        subprocess.Popen(words, env={**os.environ, "PATH": path}, stdout=log, stderr=log, start_new_session=True) as it,
    ):
        try:
            while it.poll() is None and not listens(port):
                time.sleep(0.2)
            assert it.poll() is None, (tmp_path / "server.log").read_text()[-3000:]
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(it.pid, signal.SIGKILL)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_training_steps_and_resumes(url: str, tmp_path: Path) -> None:
    (tmp_path / "note_env.py").write_text(NOTE + SCORE)
    first = train(tmp_path, url, 2)
    again = train(tmp_path, url, 3, first.run.folder)
    assert max(first.result.difference, again.result.difference) < 1e-4
    lines = list(read_steps(first.run.folder))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["loss"] != 0.0 for line in lines)


def train(folder: Path, url: str, steps: int, resume: Path | None = None) -> palaestra.TrainingReport:
    training = {"steps": steps, "groups": 2, "eval_every": 0, "learning_rate": 1e-3, "lora_rank": 4}
    return asyncio.run(
        palaestra.train(
            str(folder / "note_env.py"),
            model=f"{folder}/tiny/",
            trainer="tinker",
            tinker_url=url,
            group_size=4,
            resume=resume,
            training=training,
            max_agent_turns=2,
            max_token_length=24,
        )
    )
