"""The wheels in a virtual environment of their own, used in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path

import pytest

from palaestra.rollouts.journal.reader import Recording

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PALAESTRA"))}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def palaestra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of wheels that were built from this checkout and installed into a new virtual environment."""
    folder = tmp_path_factory.mktemp("wheel")
    run(ROOT / "scripts/wheels", folder / "dist", cwd=folder)
    wheels = sorted((folder / "dist").glob("*.whl"))
    venv.create(folder / "venv", with_pip=True)
    run(folder / "venv/bin/python", "-m", "pip", "install", "--quiet", *wheels, cwd=folder)
    return folder / "venv/bin/palaestra"


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(600)
def test_shipped_environments_run_in_an_empty_folder(palaestra: Path, tmp_path: Path) -> None:
    listed = {row["name"]: row for row in json.loads(run(palaestra, "env", "list", "--json", cwd=tmp_path))}
    assert sorted(listed) == [
        "count_lines", "endless_terminals", "hermes_swe", "swe_smith_oracle", "terminal_test", "terminalbench_2",
    ]  # fmt: skip
    for row in listed.values():
        assert Path(row["path"]).is_relative_to(palaestra.parents[1])
    assert "model_name: NAME" in run(palaestra, "env", "show", "swe_smith_oracle", "--example-config", cwd=tmp_path)

    run(palaestra, "run", "terminal_test", "--policy", "oracle", cwd=tmp_path)
    run(palaestra, "run", "hermes_swe", "--policy", "oracle", "--tasks", "1", "--group", "1", cwd=tmp_path)
    journals = sorted(tmp_path.glob("runs/*/*/journal.jsonl"))
    rewards = [[each.reward for group in Recording(path) for each in group.trajectories] for path in journals]
    assert rewards == [[1.0], [1.0] * 6]
    run(palaestra, "replay", journals[1].parent, cwd=tmp_path)
    run(palaestra, "tasks", "build", "terminal", "--n", "2", "--out", "tasks.jsonl", cwd=tmp_path)
