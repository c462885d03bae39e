"""Real agents from npm in slots without a network, and a transformers model that nobody trained: whatever it writes,
each run ends by itself, and each sampled token is recorded once with the model's own log-probability."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from bug_fixing import fix_calc
from test_installed_agents import installable

import palaestra
from model_logprobs import own_logprobs
from palaestra.agent.known_programs import PROGRAMS
from palaestra.agent.programs import NpmProgram
from palaestra_slots.core.types import Blame, Outcome
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.testing.tiny_model import make_tiny

pytestmark = [
    pytest.mark.slots,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra 'train': make test-torch"),
]

CONTEXT_TOKENS = 1 << 16
"""The prompt of Codex is longer than the tiny model's usual context."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(folder, hidden=32, layers=1, practice=40)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_TOKENS}))
    return folder


@pytest.mark.parametrize("name", ["opencode", "codex", "pi"])
def test_every_token_of_a_tiny_model_is_recorded_once(name: str, model: Path, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    assert isinstance(program, NpmProgram)
    if why := installable(program):
        pytest.skip(why)
    server = APIServerConfig(model_name=str(model), server_type="transformers", timeout=300)
    run = asyncio.run(
        palaestra.run(
            fix_calc,
            server=server,
            agent=name,
            folder=tmp_path,
            group_size=1,
            max_agent_turns=4,
            max_token_length=48,
            worker_timeout=400.0,
        )
    )
    (trajectory,) = run.groups[0].trajectories
    log = next((run.path / "agents").glob("*.log")).read_text()
    assert trajectory.outcome in (Outcome.NATURAL, Outcome.MAX_TURNS), f"{trajectory.error}\n{log[-3000:]}"
    assert trajectory.reward == 0.0
    assert trajectory.blame == (None if trajectory.outcome is Outcome.NATURAL else Blame.MODEL)
    assert trajectory.ledger is not None
    auxiliary = json.loads(next((run.path / "agents").glob("*.auxiliary.json")).read_bytes())
    titles = sum(turn["sampled_tokens"] for turn in (auxiliary["ledger"] or {"turns": []})["turns"])
    assert (titles > 0) == (name == "opencode")
    trained = sum(mask != -100 for row in trajectory.rows for mask in row.masks)
    assert trained + titles == trajectory.completion_tokens > 0
    for row in trajectory.rows:
        places = [place for place, mask in enumerate(row.masks) if mask != -100]
        recorded = [row.logprobs[place] for place in places]
        assert own_logprobs(model, list(row.tokens), places) == pytest.approx(recorded, abs=1e-3)
    verified = subprocess.run(
        [sys.executable, "-m", "palaestra", "verify", str(run.path)], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
