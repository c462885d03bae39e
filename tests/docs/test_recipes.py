"""Each recipe runs as it is printed, and keeps its promise."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import palaestra
from envs.scripts import only_wheels, wheel
from palaestra.cli.main import main
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/environments/recipes.md").read_text()
RECIPES = dict(re.findall(r"```python\n# (\w+_env\.py)\n(.*?)```", PAGE, re.DOTALL))


def rewards(folder: Path, policy: str) -> list[Any]:
    (journal,) = folder.glob(f"runs/*--{policy}/*/journal.jsonl")
    return [each.reward for each in palaestra.open_run(journal.parent).trajectories]


def test_the_page_is_short_and_its_recipes_are_known() -> None:
    assert len(PAGE.split()) <= 1300
    assert [*RECIPES] == ["shop_env.py", "median_env.py", "mean_env.py", "haiku_env.py", "sales_env.py"]


@pytest.mark.slots
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "haiku_env.py"])
def test_a_recipe_pays_the_reference_and_not_noop(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    only_wheels(tmp_path, monkeypatch)
    wheel(tmp_path / "index", "tabulate", version="0.9.0")
    Path(name).write_text(RECIPES[name])
    for policy, reward in (("oracle", 1.0), ("noop", 0.0)):
        assert main(["run", name, "--policy", policy]) == 0
        assert set(rewards(tmp_path, policy)) == {reward}
    # The shop has no tool that runs commands, so nothing of this can be played.
    assert main(["env", "check", name, "--only", "stale-reward"]) == (3 if name == "shop_env.py" else 0)


def test_the_judge_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("haiku_env.py").write_text(RECIPES["haiku_env.py"])

    async def scenario() -> None:
        async with LoopbackServer(FakeAnswer(completion("8"))) as server:
            run = ["run", "haiku_env.py", "--policy", "oracle", "--env.judge_url", server.url]
            assert await asyncio.to_thread(main, run) == 0
            asked = sum(each.method == "POST" for each in server.seen)
            (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
            assert await asyncio.to_thread(main, ["replay", str(journal.parent)]) == 0
            assert (asked, sum(each.method == "POST" for each in server.seen)) == (2, 2)

    asyncio.run(scenario())
    assert rewards(tmp_path, "oracle") == [0.8, 0.8]
