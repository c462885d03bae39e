"""Hooks of a class that are plain functions work as those that are not, and get the slot as those do."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra.rollouts.journal.reader import Recording

pytestmark = pytest.mark.slots

WORD = """
from palaestra import HermesAgentBaseEnv

class WordEnv(HermesAgentBaseEnv):
    name = "word"

    DEF setup(self):
        self.items = [{"id": "a", "solution": "echo alpha > word.txt"}]

    DEF get_next_item(self):
        return self.items.pop() if self.items else None

    def format_prompt(self, item):
        return "Write."

    DEF setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        return {"word": "alpha"}

    DEF compute_reward(self, item, result, ctx):
        return ctx.terminal("cat word.txt")["output"].strip() == "alpha"

    DEF evaluate(self, *args, **kwargs):
        return {}
"""

SUM = """
from palaestra import AgentEnv

class SumEnv(AgentEnv):
    name = "sum"

    DEF setup_agent_env(self):
        self.items = [{"id": "a", "solution": "true"}]

    DEF get_next_item(self):
        return self.items.pop() if self.items else None

    def build_task(self, item):
        return "Sum."

    DEF score_trajectory(self, item, final_response):
        return 1.0
"""

COIN = """
from palaestra import BaseEnv

class CoinEnv(BaseEnv):
    name = "coin"

    DEF setup(self):
        self.items = ["heads"]

    DEF get_next_item(self):
        return self.items.pop() if self.items else None

    DEF collect_trajectory(self, item):
        return {"tokens": [1], "masks": [-100], "scores": 1.0, "messages": []}, []

    DEF evaluate(self, *args, **kwargs):
        return {}
"""


@pytest.mark.parametrize("how", ["def", "async def"])
@pytest.mark.parametrize("script", [WORD, SUM, COIN], ids=["word", "sum", "coin"])
def test_hooks_may_be_plain_functions(script: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("an_env.py").write_text(script.replace("DEF", how))
    line = ["run", "an_env.py", "--policy", "oracle", "--group", "2", "--env.ensure_scores_are_not_same", "false"]
    assert main(line) == 0
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    (group,) = list(Recording(journal))
    assert [each.reward for each in group.trajectories] == [1.0, 1.0]


@pytest.mark.parametrize("how", ["def", "async def"])
def test_evaluate_may_be_a_plain_function(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("palaestra_contract")
    monkeypatch.chdir(tmp_path)
    Path("an_env.py").write_text(COIN.replace("DEF", how))
    assert main(["eval", "an_env.py", "--policy", "oracle"]) == 0
