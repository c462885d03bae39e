"""What a run prints at its end: one verdict with the score, its coverage, the causes of failures and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra.cli.main import main

pytestmark = pytest.mark.slots

ENV = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def words(n: int = 3):
    for i in range(n):
        yield Task(id=f"w{i}", prompt="p", solution="true")

@words.score
def right(task):
    if task.id == "w1":
        raise ValueError("no such column")
    return 1
"""

CLASS_ENV = """
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

class Own(HermesAgentBaseEnv):
    name = "own"

    async def setup(self): pass
    async def get_next_item(self): return None
    def format_prompt(self, item): return "p"
    async def compute_reward(self, item, result, ctx): return 1.0

    async def evaluate(self, *args, **kwargs):
        await self.evaluate_log({"eval/pct": 0.25})
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(ENV)


def test_the_verdict_comes_once_with_coverage_and_causes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "my_env.py", "--policy", "oracle", "--group", "2"]) == 3
    said = capsys.readouterr().err
    assert [line.partition(" after ")[0] for line in said.splitlines() if " after " in line] == ["done"]
    assert "mean reward 1.000 (0.342 to 1.000), 4 of 6 rollouts scored" in said
    assert "2 rollouts failed (grader), first 000001-w1/0: " in said
    assert said.count("no such column") == 2, "in the group's line and in the verdict"
    assert "--resume" not in said


def test_the_figures_of_an_own_evaluation_are_in_the_verdict_and_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own_env.py").write_text(CLASS_ENV)
    assert main(["eval", "own_env.py", "--policy", "oracle"]) == 0
    said = capsys.readouterr()
    assert "  pct 0.25\n" in said.err
    assert "no reward" not in said.err
    (report,) = Path(said.out.strip()).glob("*.html")
    page = report.read_text()
    assert "eval/pct" in page
    assert "0.25" in page
