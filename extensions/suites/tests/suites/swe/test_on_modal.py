"""The command line that existing users have for slots in Modal, against the stand-in of Modal's API."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from envs.scripts import groups_file
from palaestra_tokens.testing import LoopbackServer, completion
from palaestra_tokens.testing.fake_chat_server import FakeAnswer
from stand_ins.fake_modal import FakeModal

pytestmark = [pytest.mark.slots, pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[5] / "environments/swe_smith_oracle_env.py"
COMMAND = (
    "process --env.use_wandb false --env.total_steps 2 --env.group_size 1 --env.max_items 2 --env.tool_pool_mode modal "
    "--env.modal_image python:3.11 --env.modal_slots_per_sandbox 10 --env.modal_min_sandboxes 1"
)


def run(folder: Path, fake: FakeModal, *words: str, environ: Mapping[str, str] | None = None) -> list[float]:
    """The scores of the command, which must succeed and leave no sandbox."""
    variables = {**os.environ, "MODAL_CONFIG_PATH": os.devnull, **fake.variables, **(environ or {})}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *COMMAND.split(), *words],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert fake.sandboxes
    assert not fake.running
    return [score for line in groups_file(folder).read_text().splitlines() for score in json.loads(line)["scores"]]


def test_the_oracle_solves_tasks_in_modal(tmp_path: Path) -> None:
    with FakeModal() as fake:
        assert run(tmp_path, fake, "--policy", "oracle") == [1.0, 1.0]


async def test_a_model_server_is_scored_in_modal(tmp_path: Path) -> None:
    with FakeModal() as fake:
        async with LoopbackServer(FakeAnswer(completion("There is nothing to fix."))) as server:
            environ = {"ATROPOS_SERVER_BASE_URL": f"{server.url}/v1", "ATROPOS_SERVER_MODEL": "m"}
            result = await asyncio.to_thread(run, tmp_path, fake, environ=environ)
        assert result == [0.0, 0.0]
