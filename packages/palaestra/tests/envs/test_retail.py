"""The example in the manner of tau-bench: reference, noop, check, a kill in the middle, a resume, exports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import palaestra
from palaestra.cli.main import main
from programs import killed_after, until

EXAMPLE = Path(__file__).parents[4] / "examples/retail.py"

pytestmark = pytest.mark.slots


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.parametrize(("policy", "reward"), [("oracle", 1.0), ("noop", 0.0)])
def test_the_reference_and_doing_nothing(policy: str, reward: float) -> None:
    assert main(["run", str(EXAMPLE), "--policy", policy]) == 0
    (folder,) = Path.cwd().glob("runs/*/*")
    run = palaestra.open_run(folder)
    assert [each.reward for each in run.trajectories] == [reward] * 2
    assert main(["replay", str(folder)]) == 0


def test_the_check_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", str(EXAMPLE)]) == 0
    assert "the reference solution scores 1; doing nothing and" in capsys.readouterr().out


def test_a_killed_run_is_resumed_in_the_middle_of_its_conversations(tmp_path: Path) -> None:
    told = '    state["told"] += 1'
    Path("retail.py").write_text(EXAMPLE.read_text().replace(told, f'    __import__("time").sleep(0.7)\n{told}'))
    command = [sys.executable, "-m", "palaestra", "run", "retail.py", "--policy", "oracle"]

    def begun() -> bool:
        return any(b'"turn":2' in journal.read_bytes() for journal in tmp_path.glob("runs/*/*/journal.jsonl"))

    with killed_after(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        until(begun, "the second turn has ended")
    (folder,) = Path.cwd().glob("runs/*/*")
    assert main(["resume", str(folder)]) == 0
    done = palaestra.open_run(folder)
    assert [each.reward for each in done.trajectories] == [1.0, 1.0]
    assert [each.state["told"] for each in done.trajectories] == [2, 2]
    lines = (folder / "journal.jsonl").read_text().splitlines()
    resumed = [line for line in map(json.loads, lines) if line["event"] == "taken_up"]
    assert resumed
    assert not any(line.get("anew") for line in resumed)
    for name in ("openai", "sharegpt", "atif", "atropos"):
        assert main(["export", str(folder), "--to", name, "--out", f"{name}.jsonl"]) == 0
    record = json.loads(Path("openai.jsonl").read_text().splitlines()[0])
    roles = [each["role"] for each in record["messages"] if each["role"] != "assistant"]
    assert roles == ["system", "user", "user", "tool", "user", "tool"]
