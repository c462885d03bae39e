"""A reward that is a plain function works on the slot as one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra.cli.exits import run_guarded
from palaestra.cli.main import cli
from palaestra.rollouts.journal import read_groups

pytestmark = pytest.mark.slots

WORD = """
from palaestra import HermesAgentBaseEnv

class WordEnv(HermesAgentBaseEnv):
    name = "word"

    async def setup(self):
        self.items = [{"id": "a", "solution": "echo alpha > word.txt"}]

    async def get_next_item(self):
        return self.items.pop() if self.items else None

    def format_prompt(self, item):
        return "Write."

    DEF compute_reward(self, item, result, ctx):
        return ctx.terminal("cat word.txt")["output"].strip() == "alpha"

    async def evaluate(self, *args, **kwargs):
        return {}
"""


@pytest.mark.parametrize("how", ["def", "async def"])
def test_a_reward_may_be_a_plain_function(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("word_env.py").write_text(WORD.replace("DEF", how))
    line = ["run", "word_env.py", "--policy", "oracle", "--group", "2", "--env.ensure_scores_are_not_same", "false"]
    assert run_guarded(lambda: cli.main(line, standalone_mode=False)) == 0
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    (group,) = read_groups(journal)
    assert [each.reward for each in group.trajectories] == [1.0, 1.0]
